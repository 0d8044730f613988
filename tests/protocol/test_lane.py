import pytest

from titan_grpo.errors import ProtocolError
from titan_grpo.protocol import lane as L


def drive(*events: L.Event) -> tuple[L.Lane, list[L.Action]]:
    state, actions = L.Lane(), []
    for event in events:
        state, action = L.step(state, event)
        actions.append(action)
    return state, actions


def test_a_good_sync_connects_sends_commits_and_waits_again():
    state, actions = drive(L.Started(), L.Connected(), L.Newer(3), L.Staged(3), L.Committed(3))
    assert actions == [L.Connect(1), L.AwaitNewer(), L.Send(3), L.Commit(3), L.AwaitNewer()]
    assert repr(state) == "<ready epoch 1>"


@pytest.mark.parametrize(
    "before",
    [
        (L.Started(),),
        (L.Started(), L.Connected()),
        (L.Started(), L.Connected(), L.Newer(3)),
        (L.Started(), L.Connected(), L.Newer(3), L.Staged(3)),
    ],
)
def test_a_failure_anywhere_rests_and_connects_again_in_a_new_epoch(before):
    state, actions = drive(*before, L.Failed("gone"), L.Rested())
    assert actions[-2:] == [L.Rest(1), L.Connect(2)]
    assert repr(state) == "<connecting epoch 2 failures 1>"


def test_a_commit_resets_the_count_of_failures():
    state, _ = drive(
        L.Started(),
        L.Failed("a"),
        L.Rested(),
        L.Failed("b"),
        L.Rested(),
        L.Connected(),
        L.Newer(1),
        L.Staged(1),
        L.Committed(1),
    )
    assert state.failures == 0
    assert state.epoch == 3


def test_every_phase_but_stopped_can_stop():
    for phase in L.Phase:
        state = L.Lane(phase=phase)
        if phase is L.Phase.STOPPED:
            with pytest.raises(ProtocolError):
                L.step(state, L.Stopped())
        else:
            assert L.step(state, L.Stopped())[1] == L.Leave()


def test_an_event_that_a_state_does_not_list_raises_and_changes_nothing():
    events = [L.Started(), L.Connected(), L.Newer(1), L.Staged(1), L.Committed(1), L.Failed("x"), L.Rested(), L.Stopped()]
    for phase in L.Phase:
        for event in events:
            state = L.Lane(phase=phase, version=1)
            if type(event) in L.TRANSITIONS[phase]:
                L.step(state, event)
                continue
            with pytest.raises(ProtocolError, match="not listed"):
                L.step(state, event)
            assert state == L.Lane(phase=phase, version=1)


def test_an_answer_for_another_version_is_refused():
    state, _ = drive(L.Started(), L.Connected(), L.Newer(3))
    with pytest.raises(ProtocolError, match="version 2"):
        L.step(state, L.Staged(2))


def test_backoff_doubles_up_to_its_bound():
    assert [L.backoff_s(n, 0.5, 15.0) for n in (1, 2, 5, 6, 1000)] == [0.5, 1.0, 8.0, 15.0, 15.0]
