import pytest

from titan_grpo.errors import ProtocolError
from titan_grpo.protocol import lane as L
from titan_grpo.protocol.messages import Entry, Standing

JOINED = L.Connected(held=None, intact=True)
GOOD = (
    L.Started(),
    JOINED,
    L.Newer(3),
    L.Staged(3),
    L.Paused(),
    L.Loaded(3, True, True),
    L.Labelled(),
    L.Resumed(),
)
LOADING = GOOD[:5]


def drive(*events: L.Event, streamed: bool = False) -> tuple[L.Lane, list[L.Action]]:
    state = L.Lane(streamed=streamed)
    done: list[L.Action] = []
    for event in events:
        state, actions = L.step(state, event)
        done += actions
    return state, done


def work(actions: list[L.Action]) -> list[L.Action]:
    return [a for a in actions if not isinstance(a, (L.Note, L.Release))]


def notes(actions: list[L.Action]) -> list[str]:
    return [repr(a.entry) for a in actions if isinstance(a, L.Note)]


def test_a_good_sync_sends_pauses_loads_labels_resumes_and_reads_back() -> None:
    state, actions = drive(*GOOD, L.ReadBack(3))
    begin = [L.Connect(1, 1), L.AwaitNewer(), L.Send(3), L.Pause(), L.Load(3)]
    assert work(actions) == [
        *begin,
        L.SetLabel(L.Outcome.NEW, 3),
        L.Resume(),
        L.ReadLabel(),
        L.AwaitNewer(),
    ]
    assert notes(actions) == [
        "unknown(?)",
        "receiving(? <- v3)",
        "committing(? <- v3)",
        "holds(v3)",
    ]
    assert repr(state) == "<ready epoch 1>"


@pytest.mark.parametrize("so_far", range(1, 9))
def test_a_failure_anywhere_rests_and_connects_again_in_a_new_epoch(so_far: int) -> None:
    state, actions = drive(*GOOD[:so_far], L.Failed(), L.Rested())
    assert work(actions)[-2:] == [L.Rest(), L.Connect(2, 1)]
    assert repr(state) == "<connecting epoch 2>"
    assert notes(actions)[-1] == "unknown(?)"


def test_holds_is_said_after_the_read_back_only() -> None:
    _, actions = drive(*GOOD)
    assert "holds(v3)" not in notes(actions)
    state, actions = drive(*GOOD, L.ReadBack(None))
    assert notes(actions)[-1] == "unknown(?)"
    assert repr(state) == "<backoff epoch 1>"


def test_a_refused_load_shows_the_old_label_and_resumes_before_the_lane_rests() -> None:
    state, actions = drive(*LOADING, L.Loaded(3, False, True), L.Labelled(), L.Resumed())
    assert work(actions)[-3:] == [L.SetLabel(L.Outcome.OLD, 3), L.Resume(), L.Rest()]
    assert (repr(state), notes(actions)[-1]) == ("<backoff epoch 1>", "unknown(?)")


@pytest.mark.parametrize("labelled", [L.Labelled(), L.Failed()])
def test_a_half_loaded_server_is_never_resumed(labelled: L.Labelled | L.Failed) -> None:
    _, actions = drive(*LOADING, L.Loaded(3, False, False), labelled)
    assert work(actions)[-2:] == [L.SetLabel(L.Outcome.BROKEN, 3), L.Rest()]
    assert L.Resume() not in actions
    assert notes(actions)[-1] == "quarantined(?)"


def test_a_joining_server_is_quarantined_unless_intact_and_else_held_for_what_it_holds() -> None:
    assert notes(drive(L.Started(), L.Connected(5, False))[1]) == ["quarantined(?)"]
    assert notes(drive(L.Started(), L.Connected(5, True))[1]) == ["holds(v5)"]


def test_a_server_takes_rollouts_while_it_receives_and_none_while_it_commits() -> None:
    state, _ = drive(L.Started(), L.Connected(3, True), L.Newer(4))
    assert (repr(state.entry), state.entry.accepting) == ("receiving(v3 <- v4)", True)
    assert repr(L.step(state, L.Failed())[0].entry) == "holds(v3)"
    assert not drive(L.Started(), L.Connected(None, True), L.Newer(4))[0].entry.accepting
    state, _ = L.step(state, L.Staged(4))
    assert (repr(state.entry), state.entry.accepting) == ("committing(v3 <- v4)", False)
    assert state.entry.committing == 4
    assert repr(L.step(state, L.Failed())[0].entry) == "unknown(?)", "its commit is in doubt"


def test_a_half_loaded_server_takes_nothing_until_a_full_sync() -> None:
    broken = (L.Started(), L.Connected(3, False))
    state, _ = drive(*broken, L.Newer(4))
    assert (state.entry.standing, state.entry.accepting) == (Standing.QUARANTINED, False)
    assert repr(L.step(state, L.Failed())[0].entry) == "quarantined(?)"
    state, _ = drive(*broken, L.Newer(3), *GOOD[3:], L.ReadBack(3))
    assert repr(state.entry) == "holds(v3)"


def test_a_servers_version_never_goes_back() -> None:
    state, _ = drive(*GOOD, L.ReadBack(3))
    with pytest.raises(ProtocolError, match="never goes back"):
        L.step(state, L.Newer(3))


@pytest.mark.parametrize(("streamed", "released_by"), [(False, L.Staged), (True, L.Loaded)])
def test_the_image_is_released_as_soon_as_its_bytes_are_through(
    streamed: bool, released_by: type[L.Event]
) -> None:
    state = L.Lane(streamed=streamed)
    for event in GOOD:
        state, actions = L.step(state, event)
        assert (L.Release() in actions) == isinstance(event, released_by)
    for so_far in (3, 4, 5):
        state, _ = drive(*GOOD[:so_far], streamed=streamed)
        assert (L.Release() in L.step(state, L.Failed())[1]) == state.pinned


def test_a_lane_can_stop_unless_a_commit_runs_and_then_as_soon_as_that_has_ended() -> None:
    for phase in L.Phase:
        state = L.Lane(phase=phase, version=1)
        if state.stoppable:
            assert L.step(state, L.Stopped())[1][-1] == L.Leave()
        else:
            with pytest.raises(ProtocolError, match="not listed"):
                L.step(state, L.Stopped())
    assert {p for p in L.Phase if not L.Lane(phase=p).stoppable} == L.COMMITTING | {L.Phase.STOPPED}


def test_a_lane_that_stops_while_it_sends_gives_the_transfer_up_and_has_nothing_else_to_say() -> (
    None
):
    for phase in L.Phase:
        entry = Entry(Standing.RECEIVING, 0, 1) if phase is L.Phase.SENDING else Entry()
        state = L.Lane(phase=phase, version=1, entry=entry)
        if state.stoppable:
            said = ["holds(v0)"] if phase is L.Phase.SENDING else []
            assert notes(list(L.step(state, L.Stopped())[1])) == said


def test_a_first_epoch_that_an_earlier_run_refuses_is_opened_again_with_a_higher_term() -> None:
    state, done = drive(L.Started(), L.Outranked(4, earlier=True))
    # Noted: a lane of a restarted process does not know that its server was said to have a version.
    assert done[-2:] == [L.Note(Entry()), L.Connect(2, 5)]
    state, actions = L.step(state, L.Outranked(7, earlier=True))
    assert actions == (L.Note(Entry()), L.Connect(3, 8))
    assert (L.step(state, JOINED)[0].term, L.step(state, JOINED)[0].admitted) == (8, True)


@pytest.mark.parametrize("earlier", [True, False])
def test_a_replaced_trainer_rests_and_keeps_its_term(earlier: bool) -> None:
    first = (L.Started(),) if not earlier else (L.Started(), JOINED, L.Failed(), L.Rested())
    state, actions = drive(*first, L.Outranked(4, earlier=earlier))
    assert actions[-2:] == [L.Note(Entry()), L.Rest()]
    assert L.step(state, L.Rested())[1] == (L.Connect(state.epoch + 1, 1),)


def test_the_deadlines_of_a_commit_are_the_sum_of_its_steps() -> None:
    assert set(L.CALLS) == L.COMMITTING | {L.Phase.CONNECTING}
    assert L.step_s(L.Phase.RESUMING, 10.0, 60.0) == 30.0
    assert L.commit_s(10.0, 60.0) == 190.0 + 60.0


def test_an_event_that_a_state_does_not_list_raises_and_changes_nothing() -> None:
    known: list[L.Event] = [*GOOD, L.ReadBack(1), L.Failed(), L.Rested(), L.Stopped()]
    changed: dict[type[L.Event], L.Event] = {L.Newer: L.Newer(1), L.Staged: L.Staged(1)}
    events = [changed.get(type(event), event) for event in known]
    for phase in L.Phase:
        for event in events:
            state = L.Lane(phase=phase, version=3 if isinstance(event, L.Loaded) else 1)
            if type(event) in L.TRANSITIONS[phase]:
                L.step(state, event)
                continue
            with pytest.raises(ProtocolError, match="not listed"):
                L.step(state, event)


def test_an_answer_for_another_version_is_refused() -> None:
    state, _ = drive(*GOOD[:3])
    with pytest.raises(ProtocolError, match="version 2"):
        L.step(state, L.Staged(2))
