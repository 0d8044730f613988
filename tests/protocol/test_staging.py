"""A receiver's staging memory: what is lent is whole, asked for by its name, and not written
over."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from titan_grpo.errors import ProtocolError
from titan_grpo.protocol.server import (
    TRANSITIONS,
    Arrived,
    Begin,
    LendRequested,
    Phase,
    Returned,
    Spent,
    Staging,
    StagingEvent,
)
from titan_grpo.protocol.server import staging as step

STAGED = (Begin(1, 7), Arrived(1, 7, "ff", True))
LENT = (*STAGED, LendRequested(1, 7, "ff"))


def after(*events: StagingEvent, streamed: bool = False) -> Staging:
    state = Staging(streamed=streamed)
    for event in events:
        state, refused = step(state, event)
        assert not refused
    return state


def refusal(state: Staging, event: StagingEvent) -> str:
    same, refused = step(state, event)
    assert same == state
    assert refused
    return refused


def test_a_state_shows_what_is_staged() -> None:
    assert repr(Staging()) == "<empty -, transfer 0>"
    assert repr(after(Begin(1, 7))) == "<writing v7 -, transfer 1>"
    assert repr(after(*LENT)) == "<lent v7 ff, transfer 1>"
    assert repr(after(*STAGED, streamed=True)) == "<staged v7 ff, transfer 1 streamed>"


def test_a_checked_transfer_is_lent_and_may_be_lent_again_after_its_return() -> None:
    state = after(*LENT)
    assert state.phase is Phase.LENT
    assert after(*LENT, Returned(), LendRequested(1, 7, "ff")) == state
    assert "lent already" in refusal(state, LendRequested(1, 7, "ff"))


@pytest.mark.parametrize(
    "asked", [LendRequested(2, 7, "ff"), LendRequested(1, 8, "ff"), LendRequested(1, 7, "gg")]
)
def test_anything_but_what_is_staged_is_refused(asked: LendRequested) -> None:
    assert "staged is (1, 7, 'ff')" in refusal(after(*STAGED), asked)


def test_nothing_is_lent_before_the_bytes_are_checked_or_after_a_bad_check() -> None:
    for state in (Staging(), after(Begin(1, 7)), after(Begin(1, 7), Arrived(1, 7, "ff", False))):
        assert "not staged here" in refusal(state, LendRequested(1, 7, "ff"))


def test_a_transfer_overwrites_what_is_staged_and_never_what_is_lent() -> None:
    state = after(*STAGED, Begin(2, 8))
    assert repr(state) == "<writing v8 -, transfer 2>"
    assert "not staged here" in refusal(state, LendRequested(1, 7, "ff"))
    assert "still loads" in refusal(after(*LENT), Begin(2, 8))
    assert after(*LENT, Returned(), Begin(2, 8)) == state


def test_a_transfer_begins_over_one_that_broke_off() -> None:
    assert after(Begin(1, 7), Begin(2, 8)) == after(Begin(2, 8))


def test_a_report_about_a_refused_commit_returns_nothing() -> None:
    for events in ((), (Begin(1, 7),), STAGED):
        assert step(after(*events), Returned()) == (after(*events), "")


def test_a_window_is_lent_once() -> None:
    assert "not staged here" in refusal(
        after(*LENT, Returned(), streamed=True), LendRequested(1, 7, "ff")
    )
    assert "not staged here" in refusal(
        after(*STAGED, Spent(), streamed=True), LendRequested(1, 7, "ff")
    )
    assert after(*LENT, Spent(), streamed=True).phase is Phase.LENT
    assert after(*LENT, Returned(), Spent(), streamed=True).phase is Phase.EMPTY


@pytest.mark.parametrize(
    ("events", "event", "words"),
    [
        (STAGED, Begin(1, 8), "count up"),
        ((Begin(1, 7),), Arrived(2, 7, "ff", True), "not about the transfer under way"),
        ((Begin(1, 7),), Arrived(1, 8, "ff", True), "not about the transfer under way"),
        ((), Arrived(1, 7, "ff", True), "not listed"),
        ((Begin(1, 7),), Spent(), "not listed"),
        (LENT, Arrived(1, 7, "ff", True), "not listed"),
    ],
)
def test_an_event_that_a_state_does_not_list_is_our_bug(
    events: tuple[StagingEvent, ...], event: StagingEvent, words: str
) -> None:
    with pytest.raises(ProtocolError, match=words):
        step(after(*events), event)


def test_every_phase_has_a_row() -> None:
    assert set(TRANSITIONS) == set(Phase)


NUMBERS, PRINTS = st.integers(1, 4), st.sampled_from(["f", "g"])
EVENTS = st.one_of(
    st.builds(Begin, NUMBERS, NUMBERS),
    st.builds(Arrived, NUMBERS, NUMBERS, PRINTS, st.booleans()),
    st.builds(LendRequested, NUMBERS, NUMBERS, PRINTS),
    st.sampled_from([Returned(), Spent()]),
)


@given(st.booleans(), st.lists(EVENTS, max_size=30))
def test_what_is_lent_was_checked_and_stays_as_it_is_until_it_returns(
    streamed: bool, events: list[StagingEvent]
) -> None:
    state, checked = Staging(streamed=streamed), set()
    for event in events:
        try:
            new, refused = step(state, event)
        except ProtocolError:
            continue
        if isinstance(event, Arrived) and event.ok:
            checked.add((event.number, event.version, event.fingerprint))
        if isinstance(event, LendRequested) and not refused:
            assert (new.number, new.version, new.fingerprint) in checked
        if state.phase is Phase.LENT and isinstance(event, Begin):
            assert refused
        state = new
