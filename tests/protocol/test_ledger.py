from collections.abc import Mapping, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from titan_grpo.errors import ProtocolError
from titan_grpo.protocol import ledger as L
from titan_grpo.protocol.ledger import Entry, Lag, Standing
from titan_grpo.protocol.messages import Label


def do(*events: L.Event) -> Entry:
    entry = Entry()
    for event in events:
        entry = L.step(entry, event)
    return entry


def test_a_server_holds_a_version_only_after_its_read_back() -> None:
    e = do(L.Receiving(3), L.Committing())
    assert (repr(e), e.accepting) == ("committing(? <- v3)", False)
    e = L.step(e, L.Holds(3))
    assert (repr(e), e.accepting) == ("holds(v3)", True)


def test_a_receiving_server_goes_on_serving_what_it_holds() -> None:
    e = do(L.Holds(3), L.Receiving(4))
    assert (repr(e), e.accepting) == ("receiving(v3 <- v4)", True)
    assert repr(L.step(e, L.TransferFailed())) == "holds(v3)"


def test_a_commit_in_doubt_makes_the_server_unknown() -> None:
    e = do(L.Holds(3), L.Receiving(4), L.Committing(), L.Forgotten())
    assert (repr(e), e.accepting) == ("unknown(?)", False)


def test_rollouts_are_withheld_when_the_commit_begins() -> None:
    assert not do(L.Holds(3), L.Receiving(4), L.Committing()).accepting


def test_a_half_loaded_server_takes_nothing_until_a_full_sync() -> None:
    e = do(L.Holds(3), L.Quarantined(), L.Receiving(4))
    assert (e.standing, e.accepting) == (Standing.QUARANTINED, False)
    assert repr(do(L.Quarantined(), L.Receiving(4), L.Committing(), L.Holds(4))) == "holds(v4)"


def test_a_servers_version_never_goes_back() -> None:
    with pytest.raises(ProtocolError, match="never goes back"):
        L.step(do(L.Holds(3)), L.Receiving(3))
    with pytest.raises(ProtocolError, match="never goes back"):
        L.step(do(L.Holds(3)), L.Holds(2))


def test_a_server_that_left_stays_gone_whatever_its_lane_still_says_until_it_comes_again() -> None:
    gone = do(L.Holds(3), L.Receiving(4), L.Left())
    for late in (
        L.Receiving(5),
        L.Committing(),
        L.Holds(5),
        L.Forgotten(),
        L.TransferFailed(),
        L.Quarantined(),
        L.Left(),
    ):
        assert L.step(gone, late) == gone
    assert repr(L.step(gone, L.Came())) == "unknown(?)"


def test_an_event_that_a_standing_does_not_list_raises_and_changes_nothing() -> None:
    events: list[L.Event] = [
        L.Receiving(9),
        L.Committing(),
        L.Holds(9),
        L.TransferFailed(),
        L.Forgotten(),
        L.Quarantined(),
        L.Left(),
        L.Came(),
    ]
    for standing in Standing:
        for event in events:
            entry = Entry(standing, incoming=9)
            if type(event) in L.TRANSITIONS[standing]:
                L.step(entry, event)
                continue
            with pytest.raises(ProtocolError, match="not listed"):
                L.step(entry, event)
            assert entry == Entry(standing, incoming=9)


def test_labels_round_trip_and_foreign_ones_are_not_ours() -> None:
    label = Label("018bcfe56800-00ff", 12, "abcd")
    assert Label.parse(str(label)) == label
    for foreign in (None, "", "default", "a:b:c", "unusable", "7"):
        assert Label.parse(foreign) is None


def lags(held: Sequence[Mapping[str, int]]) -> list[int]:
    """At each boundary, from version 0 on."""
    lag, out = Lag(), []
    for version, now in enumerate(held):
        lag, behind = lag.at(version, now)
        out.append(behind)
    return out


def test_one_server_that_commits_keeps_the_run_going_however_old_its_version_is() -> None:
    assert lags([{"a": 0, "b": v // 2} for v in range(7)]) == [0, 1, 0, 1, 0, 1, 0]


def test_a_run_that_is_resumed_counts_from_its_own_first_boundary() -> None:
    assert Lag().at(7, {})[0].at(10, {})[1] == 3


@given(st.lists(st.booleans(), max_size=40))
def test_it_counts_the_versions_since_the_last_commit(commits: list[bool]) -> None:
    held, boundaries, expected, quiet = 0, [], [], 0
    for version, commit in enumerate(commits):
        held += commit
        quiet = 0 if commit or version == 0 else quiet + 1
        boundaries.append({"a": held})
        expected.append(quiet)
    assert lags(boundaries) == expected
