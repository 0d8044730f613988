"""Which servers may be left paused, and when each is recovered: the table alone."""

import pytest

from titan_grpo.errors import ProtocolError
from titan_grpo.protocol.lane import LaneEvent, Point
from titan_grpo.protocol.pause_guard import (
    Action,
    CancelRecovery,
    Deadlines,
    Ended,
    Event,
    Failed,
    GiveUp,
    GuardState,
    LaneReported,
    Phase,
    Recover,
    Recovered,
    Superseded,
    Ticked,
    step,
)

DEADLINES = Deadlines(pause_s=3.0, greet_s=20.0, again_s=2.0, tries=3, first_s=0.5)
URL = "http://a"


def passed(point: Point, now: float, epoch: int = 2, url: str = URL) -> LaneReported:
    return LaneReported(LaneEvent(point, url, "run", epoch, 7), now)


def drive(*events: Event) -> tuple[GuardState, tuple[Action, ...]]:
    """The state after all events, and all actions of the last one."""
    state = GuardState(DEADLINES)
    actions: tuple[Action, ...] = ()
    for event in events:
        state, actions = step(state, event)
    return state, actions


def test_a_commit_in_time_leaves_nothing_open() -> None:
    state, actions = drive(
        passed(Point.GREET, 0),
        passed(Point.CONNECTED, 1),
        passed(Point.PAUSE, 2),
        passed(Point.RESUMED, 3),
    )
    assert (repr(state), actions) == ("<nothing open>", ())
    assert step(state, Ended(clean=False, now=4.0))[0].done


def test_points_outside_a_commit_change_nothing() -> None:
    before, _ = drive(passed(Point.PAUSE, 0))
    for point in (Point.BEGIN, Point.EXTENT, Point.SENT, Point.STAGED):
        assert step(before, passed(point, 1)) == (before, ())


@pytest.mark.parametrize("point", [Point.PAUSE, Point.LOAD, Point.LABEL, Point.RESUME])
def test_each_point_of_a_commit_renews_its_lease_and_so_does_the_same_one_again(
    point: Point,
) -> None:
    state, actions = drive(passed(Point.PAUSE, 0), passed(point, 2.9), Ticked(5.8))
    assert (state.due, actions) == (5.9, ())


def test_a_pause_past_its_lease_is_settled_once() -> None:
    state, actions = drive(passed(Point.PAUSE, 0), Ticked(2.9))
    assert (state.due, actions) == (3.0, ())
    state, actions = step(state, Ticked(3.0))
    assert actions == (Recover(URL, "run", 2, False, number=1),)
    assert repr(state) == "<http://a settling epoch 2 due 3.0>"
    assert step(state, Ticked(9.0)) == (state, ())


def test_a_frozen_trainers_server_is_looked_at_again_as_long_as_its_lane_is_silent() -> None:
    state, _ = drive(passed(Point.PAUSE, 0), Ticked(3.0), Recovered(URL, 1, 4.0))
    assert repr(state) == "<http://a settled epoch 2 due 7.0>"
    for number in range(2, 7):
        assert state.due is not None
        state, actions = step(state, Ticked(state.due))
        assert actions == (Recover(URL, "run", 2, True, number),)
        state, _ = step(state, Recovered(URL, number, state.servers[URL].due))
    assert step(state, passed(Point.RESUMED, 99))[0].servers == {}


def test_after_a_recovery_the_tries_are_counted_anew() -> None:
    state, _ = drive(passed(Point.PAUSE, 0))
    results: list[type[Failed | Recovered]] = [Failed, Failed, Recovered, Failed, Failed]
    for number, result in enumerate(results, start=1):
        assert state.due is not None
        now = state.due
        state, _ = step(state, Ticked(now))
        state, actions = step(state, result(URL, number, now))
        assert actions == ()
    assert GiveUp(URL) in step(step(state, Ticked(99.0))[0], Failed(URL, 6, 99.0))[1]


@pytest.mark.parametrize("point", [Point.GREET, Point.PAUSE, Point.CONNECTED, Point.RESUMED])
def test_a_look_is_called_off_when_the_lane_speaks(point: Point) -> None:
    state, actions = drive(passed(Point.PAUSE, 0), Ticked(3.0), passed(point, 3.5, epoch=4))
    assert actions == (CancelRecovery(URL),)
    assert step(state, Recovered(URL, 1, 4.0)) == (state, ())
    assert step(state, Failed(URL, 1, 4.0)) == (state, ())
    assert step(state, Superseded(URL, 1)) == (state, ())


def test_a_look_that_was_called_off_does_not_count_as_the_next_one_of_its_epoch() -> None:
    late, _ = drive(
        passed(Point.PAUSE, 0), Ticked(3.0), passed(Point.LOAD, 3.5), Ended(clean=False, now=4.0)
    )
    late, actions = step(late, Ticked(4.0))
    assert actions == (Recover(URL, "run", 2, False, number=2),)
    for result in (Recovered(URL, 1, 4.1), Failed(URL, 1, 4.1), Superseded(URL, 1)):
        assert step(late, result) == (late, ())
    state, _ = step(late, Failed(URL, 2, 4.2))
    assert state.due == 4.7


def test_servers_that_are_due_at_once_are_settled_under_numbers_of_their_own() -> None:
    other = "http://b"
    state, actions = drive(passed(Point.PAUSE, 0), passed(Point.PAUSE, 0, url=other), Ticked(3.0))
    expected = (Recover(URL, "run", 2, False, number=1), Recover(other, "run", 2, False, number=2))
    assert actions == expected
    state, _ = step(state, Recovered(other, 2, 4.0))
    assert state.servers[other].phase is Phase.RECOVERED
    assert state.servers[URL].phase is Phase.RECOVERING


def test_a_pause_stays_open_while_the_lane_connects_anew() -> None:
    state, _ = drive(
        passed(Point.PAUSE, 0),
        passed(Point.GREET, 1, epoch=4),
        Ticked(20.9),
        Ended(clean=True, now=21.0),
    )
    _, actions = step(state, Ticked(21.0))
    assert actions == (Recover(URL, "run", 4, False, number=1),)


def test_a_dead_trainers_servers_are_looked_at_twice_and_the_others_are_not() -> None:
    events = [
        passed(Point.PAUSE, 0),
        passed(Point.PAUSE, 0, url="http://b"),
        passed(Point.RESUMED, 1, url="http://b"),
    ]
    state, actions = drive(*events, Ended(clean=False, now=1.0), Ticked(1.0))
    assert actions == (Recover(URL, "run", 2, False, number=1),)
    state, _ = step(state, Recovered(URL, 1, 1.5))
    assert step(state, Ticked(3.4))[1] == ()
    state, actions = step(state, Ticked(3.5))
    assert actions == (Recover(URL, "run", 2, True, number=2),)
    state, _ = step(state, Recovered(URL, 2, 3.6))
    assert repr(state) == "<nothing open, trainer gone>"
    assert state.done


def test_a_look_of_before_the_trainers_death_is_followed_by_one_after() -> None:
    state, _ = drive(
        passed(Point.PAUSE, 0), Ticked(3.0), Ended(clean=False, now=3.1), Recovered(URL, 1, 3.2)
    )
    assert not state.done
    state, actions = step(state, Ticked(5.2))
    assert actions == (Recover(URL, "run", 2, True, number=2),)
    assert step(state, Recovered(URL, 2, 5.3))[0].done


def test_a_server_whose_lane_was_still_connecting_may_have_been_found_paused() -> None:
    _, actions = drive(passed(Point.GREET, 0), Ended(clean=False, now=1.0), Ticked(1.0))
    assert actions == (Recover(URL, "run", 2, True, number=1),)


def test_after_a_clean_end_a_server_that_never_joined_is_asked_once() -> None:
    state, _ = drive(passed(Point.GREET, 0), Ended(clean=True, now=1.0), Ticked(1.0))
    state, actions = step(state, Failed(URL, 1, 1.1))
    assert actions == (GiveUp(URL),)
    assert state.done


def test_after_a_clean_end_a_server_whose_commit_began_gets_all_its_tries() -> None:
    state, _ = drive(passed(Point.PAUSE, 0), Ended(clean=True, now=1.0), Ticked(1.0))
    assert step(state, Failed(URL, 1, 1.5))[1] == ()


def test_a_silent_server_is_given_up_after_its_tries_with_growing_rests() -> None:
    state, _ = drive(passed(Point.PAUSE, 0), Ended(clean=False, now=0.0))
    rests = []
    for number, now in ((1, 0.0), (2, 10.0)):
        state, _ = step(state, Ticked(now))
        state, actions = step(state, Failed(URL, number, now))
        assert state.due is not None
        rests.append(state.due - now)
        assert actions == ()
    assert rests == [0.5, 1.0]
    assert state.servers[URL].phase is Phase.PAUSED
    state, _ = step(state, Ticked(20.0))
    state, actions = step(state, Failed(URL, 3, 20.0))
    assert (actions, state.done) == ((GiveUp(URL),), True)


def test_a_server_that_a_newer_trainer_has_is_left_to_it() -> None:
    state, _ = drive(
        passed(Point.PAUSE, 0), Ended(clean=False, now=1.0), Ticked(1.0), Superseded(URL, 1)
    )
    assert state.done


def test_a_lane_after_the_trainers_end_is_a_bug() -> None:
    state, _ = drive(Ended(clean=True, now=0.0))
    for event in (passed(Point.PAUSE, 1.0), Ended(clean=True, now=1.0)):
        with pytest.raises(ProtocolError, match="not listed"):
            step(state, event)
