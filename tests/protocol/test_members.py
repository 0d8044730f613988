"""Who belongs to the run: sources, commands, and lanes that take their time to end."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from titan_grpo.errors import ProtocolError
from titan_grpo.protocol.members import (
    Action,
    Add,
    Ended,
    Event,
    Join,
    Leave,
    Listed,
    Members,
    Refuse,
    Remove,
    start,
    step,
)


def urls(*names: str) -> frozenset[str]:
    return frozenset(names)


def run(members: Members, *events: Event) -> tuple[Members, list[Action]]:
    out: list[Action] = []
    for event in events:
        members, actions = step(members, event)
        out += actions
    return members, out


def test_what_a_file_adds_joins_and_what_it_drops_leaves() -> None:
    members, actions = run(start(urls("a"), urls("b", "c")), Listed(urls("c", "d")))
    assert actions == [Join("d"), Leave("b")]
    assert repr(members) == "<here a c d; leaving b>"
    assert run(members, Ended("b"))[0].present == urls("a", "c", "d")


def test_the_same_list_again_changes_nothing() -> None:
    members = start(urls(), urls("b"))
    assert step(members, Listed(urls("b"))) == (members, ())


def test_an_empty_list_is_refused_and_the_last_good_one_stays() -> None:
    members = start(urls("a"), urls("b"))
    after, (refusal,) = step(members, Listed(urls()))
    assert after == members
    assert isinstance(refusal, Refuse)


def test_a_server_removed_by_command_stays_away_until_the_file_names_it_anew() -> None:
    members, _ = run(
        start(urls(), urls("a", "b")), Remove("a"), Ended("a"), Listed(urls("a", "b", "c"))
    )
    assert members.present == urls("b", "c")
    _, actions = run(members, Listed(urls("b", "c")), Listed(urls("a", "b", "c")))
    assert actions == [Join("a")]


def test_a_server_added_and_removed_by_command_is_the_files_afterwards() -> None:
    members, _ = run(start(urls("a")), Add("b"), Remove("b"), Ended("b"), Listed(urls("b")))
    assert run(members, Listed(urls("c")))[1] == [Join("c"), Leave("b")]


def test_a_server_added_by_command_stays_when_the_file_changes() -> None:
    members, _ = run(start(urls(), urls("a")), Add("x"), Listed(urls("b")))
    assert members.present == urls("b", "x")


@pytest.mark.parametrize(
    ("event", "words"),
    [
        (Add("a"), "there already"),
        (Remove("z"), "not a server of this run"),
        (Listed(urls()), "without a server"),
    ],
)
def test_what_makes_no_sense_is_refused_with_a_reason(event: Event, words: str) -> None:
    members = start(urls("a", "b"))
    after, (refusal,) = step(members, event)
    assert after == members
    assert isinstance(refusal, Refuse)
    assert words in refusal.reason


def test_the_last_server_can_not_be_removed_by_any_way() -> None:
    members, _ = run(start(urls(), urls("a", "b")), Remove("a"), Ended("a"))
    for event in (Remove("b"), Listed(urls("a"))):
        after, (refusal,) = step(members, event)
        assert (after, type(refusal)) == (members, Refuse), event


def test_a_server_wanted_again_joins_when_its_last_lane_has_ended() -> None:
    members, _ = run(start(urls("a", "b")), Remove("a"))
    members, actions = run(members, Add("a"))
    assert actions == []
    assert run(members, Ended("a"))[1] == [Join("a")]


def test_an_end_that_nobody_asked_for_raises_and_changes_nothing() -> None:
    members = start(urls("a", "b"))
    with pytest.raises(ProtocolError, match="not listed"):
        step(members, Ended("a"))


NAMES = st.sampled_from("abcd")
EVENTS = st.one_of(
    NAMES.map(Add),
    NAMES.map(Remove),
    NAMES.map(Ended),
    st.frozensets(NAMES, max_size=3).map(Listed),
)


@given(st.frozensets(NAMES, min_size=1, max_size=2), st.lists(EVENTS, max_size=40))
def test_lanes_follow_the_wish_and_no_server_ever_has_two(
    fixed: frozenset[str], events: list[Event]
) -> None:
    members, lanes = start(fixed), set(fixed)
    for event in events:
        if isinstance(event, Ended) and event.url not in members.leaving:
            continue
        if isinstance(event, Ended):
            lanes.remove(event.url)
        members, actions = step(members, event)
        for action in actions:
            if isinstance(action, Join):
                assert action.url not in lanes
                lanes.add(action.url)
        assert members.wanted
        assert not members.present & members.leaving
        assert members.present | members.leaving == lanes
        assert members.present <= members.wanted <= members.present | members.leaving
