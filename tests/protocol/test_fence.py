"""The engine's fence: only a newer trainer is served, versions never go back, and only a finished
load changes what is held."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from titan_grpo.errors import ProtocolError
from titan_grpo.protocol.server import (
    CommitRequested,
    EngineState,
    FenceEvent,
    Loaded,
    OpenEpoch,
)
from titan_grpo.protocol.server import fence as step

RUNS = st.sampled_from(["a", "b", "c"])
TERMS = st.integers(0, 3)
EVENTS = st.one_of(
    st.builds(OpenEpoch, RUNS, st.integers(1, 4), TERMS),
    st.builds(CommitRequested, RUNS, st.integers(1, 4), st.integers(0, 4)),
    st.builds(Loaded, RUNS, st.integers(0, 4), st.just("f"), st.booleans(), st.booleans()),
)


NEW = EngineState()


def after(*events: FenceEvent, start: EngineState = NEW) -> EngineState:
    """The state after these events, all of which are listed."""
    for event in events:
        start, _ = step(start, event)
    return start


def loaded(run: str, epoch: int, version: int) -> tuple[CommitRequested, Loaded]:
    return CommitRequested(run, epoch, version), Loaded(run, version, f"f{version}", True, True)


def refusal(holding: EngineState, event: FenceEvent) -> str:
    """Why the event is refused; fails if it is not, or if it changes the state."""
    same, refused = step(holding, event)
    assert same == holding
    assert refused
    return refused


def test_a_state_shows_whom_it_obeys_and_what_it_holds() -> None:
    assert repr(EngineState()) == "<in force no epoch, holds its own weights>"
    held = after(OpenEpoch("r", 2, 1), *loaded("r", 2, 5))
    assert repr(held) == "<in force r/2 term 1, holds r v5 f5>"
    half = after(
        CommitRequested("r", 2, 6),
        Loaded("r", 6, "", False, False),
        CommitRequested("r", 2, 6),
        start=held,
    )
    assert repr(half) == "<in force r/2 term 1, holds r v5 f5, broken, loading r v6>"


@given(st.lists(st.builds(OpenEpoch, RUNS, st.integers(1, 4), TERMS), max_size=12))
def test_admitted_epochs_only_ever_get_newer(hellos: list[OpenEpoch]) -> None:
    state, admitted = EngineState(), []
    for hello in hellos:
        state, refused = step(state, hello)
        if not refused:
            assert state.in_force == (hello.run_id, hello.epoch)
            admitted.append((state.term, hello.run_id, hello.epoch))
    assert admitted == sorted(set(admitted))


def test_a_run_whose_clock_is_behind_takes_over_with_a_higher_term_and_keeps_the_server() -> None:
    behind = after(OpenEpoch("r", 5, 3), OpenEpoch("q", 1, 4))
    assert (behind.in_force, behind.term) == (("q", 1), 4)
    assert "term 4" in refusal(behind, OpenEpoch("r", 6, 3))
    assert after(OpenEpoch("q", 2, 4), start=behind).in_force == ("q", 2)


def test_a_refusal_by_the_own_run_says_so_and_not_to_end_it() -> None:
    state, _ = step(EngineState(), OpenEpoch("r", 2, 1))
    own, other = (refusal(state, OpenEpoch(run, 2, 1)) for run in ("r", "q"))
    assert "another of its lanes" in own
    assert "end run" not in own
    assert "end run r" in other


def test_a_pause_guard_that_knows_no_term_opens_an_epoch_of_the_run_in_force_alone() -> None:
    lane = after(OpenEpoch("r", 2, 3))
    assert after(OpenEpoch("r", 3, 0), start=lane) == EngineState(("r", 3), 3)
    assert "not newer" in refusal(lane, OpenEpoch("s", 3, 0))
    assert after(OpenEpoch("r", 3, 0)).in_force == ("r", 3)


def test_a_replayed_hello_is_refused() -> None:
    assert "not newer than epoch 3, which is in force for run r" in refusal(
        after(OpenEpoch("r", 3, 1)), OpenEpoch("r", 3, 1)
    )


def test_an_older_run_is_refused_whatever_its_epoch() -> None:
    assert "run q is not newer" in refusal(after(OpenEpoch("r", 1, 1)), OpenEpoch("q", 99, 1))


def test_versions_go_forward_within_a_run_and_may_repeat() -> None:
    held = after(OpenEpoch("r", 1, 1), *loaded("r", 1, 5))
    assert after(CommitRequested("r", 1, 5), start=held).granted == ("r", 5)
    assert "older than version 5" in refusal(held, CommitRequested("r", 1, 4))


def test_a_new_run_may_start_at_a_lower_version_and_ends_the_old_one() -> None:
    held = after(OpenEpoch("r", 1, 1), *loaded("r", 1, 5), OpenEpoch("s", 1, 1))
    assert after(CommitRequested("s", 1, 0), start=held).granted == ("s", 0)
    assert "in force" in refusal(held, CommitRequested("r", 1, 6))


def test_a_commit_before_any_hello_is_refused() -> None:
    assert "in force" in refusal(EngineState(), CommitRequested("r", 1, 1))


def test_a_second_commit_during_a_load_is_refused() -> None:
    assert "version 6 of run r is being loaded" in refusal(
        after(OpenEpoch("r", 1, 1), CommitRequested("r", 1, 6)), CommitRequested("r", 1, 7)
    )


def test_a_failed_load_keeps_the_version_and_says_whether_it_is_whole() -> None:
    held = after(OpenEpoch("r", 1, 1), *loaded("r", 1, 5))
    untouched = after(CommitRequested("r", 1, 6), Loaded("r", 6, "", False, True), start=held)
    assert untouched == held
    broken = after(CommitRequested("r", 1, 6), Loaded("r", 6, "", False, False), start=held)
    assert (broken.version, broken.intact) == (5, False)
    assert after(*loaded("r", 1, 6), start=broken).intact


def test_a_load_that_touched_nothing_does_not_mend_broken_weights() -> None:
    broken = after(
        OpenEpoch("r", 1, 1), CommitRequested("r", 1, 6), Loaded("r", 6, "", False, False)
    )
    assert not after(
        CommitRequested("r", 1, 7), Loaded("r", 7, "", False, True), start=broken
    ).intact


def test_a_hello_during_a_load_does_not_hide_what_was_loaded() -> None:
    held = after(
        OpenEpoch("r", 1, 1),
        CommitRequested("r", 1, 5),
        OpenEpoch("s", 1, 1),
        Loaded("r", 5, "f", True, True),
    )
    assert repr(held) == "<in force s/1 term 1, holds r v5 f>"


@pytest.mark.parametrize(
    "start",
    [EngineState(), after(OpenEpoch("r", 1, 1), CommitRequested("r", 1, 5))],
    ids=["nothing lent", "another"],
)
def test_the_end_of_a_load_that_was_not_lent_is_our_bug(start: EngineState) -> None:
    with pytest.raises(ProtocolError, match="not about a commit that was granted"):
        step(start, Loaded("r", 4, "f", True, True))


def test_a_good_load_of_broken_weights_is_our_bug() -> None:
    with pytest.raises(ProtocolError, match="leaves whole weights"):
        step(
            after(OpenEpoch("r", 1, 1), CommitRequested("r", 1, 5)),
            Loaded("r", 5, "f", True, False),
        )


@given(st.lists(EVENTS, max_size=30))
def test_what_is_held_never_goes_back_and_changes_by_loads_only(events: list[FenceEvent]) -> None:
    holding = EngineState()
    for event in events:
        try:
            new, refused = step(holding, event)
        except ProtocolError:
            continue
        if not isinstance(event, Loaded):
            assert (new.run, new.version, new.intact) == (
                holding.run,
                holding.version,
                holding.intact,
            )
        if new.run == holding.run:
            assert new.version >= holding.version
        if refused:
            assert new == holding
        assert (new.term, new.in_force) >= (holding.term, holding.in_force)
        holding = new
