import itertools

import pytest

from titan_grpo.errors import ProtocolError
from titan_grpo.protocol import recovery as P
from titan_grpo.protocol.messages import UNUSABLE, Label
from titan_grpo.protocol.recovery import Pause, Relabel, Resume, settle

OLD, NEW = Label("r", 7, "cd"), Label("r", 8, "ab")


def test_a_server_that_nobody_left_in_the_middle_needs_nothing() -> None:
    assert settle(OLD, True, str(OLD), False) == ()
    assert settle(None, True, "default", False) == ()


def test_a_server_paused_before_its_load_goes_on_with_what_it_has() -> None:
    assert settle(OLD, True, str(OLD), True) == (Resume(),)


def test_a_server_loaded_and_not_labelled_is_labelled_before_it_goes_on() -> None:
    assert settle(NEW, True, str(OLD), True) == (Relabel(str(NEW)), Resume())


@pytest.mark.parametrize(
    ("shown", "paused"), list(itertools.product([str(OLD), UNUSABLE], [True, False]))
)
def test_a_half_loaded_server_ends_paused_and_labelled_unusable(shown: str, paused: bool) -> None:
    steps = settle(OLD, False, shown, paused)
    assert Resume() not in steps
    assert (Pause() in steps) == (not paused)
    assert (Relabel(UNUSABLE) in steps) == (shown != UNUSABLE)


PACE = P.Backoff(first_s=0.5, longest_s=3.0)


def test_rests_double_up_to_the_longest_and_an_answer_starts_over() -> None:
    health, rests = P.Health(PACE), []
    for _ in range(5):
        health, actions = P.step(health, P.Silent(10.0))
        (rest,) = actions
        assert isinstance(rest, P.Rest)
        rests.append(rest.until - 10.0)
    assert rests == [0.5, 1.0, 2.0, 3.0, 3.0]
    health, actions = P.step(health, P.Answered())
    assert (repr(health), actions) == ("<alive>", ())
    assert P.step(health, P.Silent(20.0))[1] == (P.Rest(20.5),)


def test_nobody_is_asked_during_a_rest_and_after_it_nothing_is_proven() -> None:
    health, _ = P.step(P.Health(PACE), P.Silent(10.0))
    assert repr(health) == "<away 1 failures, until 10.5>"
    assert not health.askable(10.4)
    with pytest.raises(ProtocolError, match="not listed"):
        P.step(health, P.Rested(10.4))
    assert health.askable(10.5)
    health, actions = P.step(health, P.Rested(10.5))
    assert (repr(health), actions) == ("<unproven>", (P.Ask(),))
    with pytest.raises(ProtocolError, match="not listed"):
        P.step(health, P.Rested(11.0))


def test_failures_add_up_over_rests() -> None:
    health = P.Health(PACE)
    for now in (0.0, 10.0):
        health, _ = P.step(health, P.Silent(now))
        health, _ = P.step(health, P.Rested(now + 5))
    assert P.step(health, P.Silent(20.0))[1] == (P.Rest(22.0),)
