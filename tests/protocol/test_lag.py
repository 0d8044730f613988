"""For how many versions no server of a run has committed anything."""

from collections.abc import Mapping, Sequence

from hypothesis import given
from hypothesis import strategies as st

from titan_grpo.protocol.ledger import Lag


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
def test_it_counts_the_versions_since_the_last_commit(commits) -> None:
    held, boundaries, expected, quiet = 0, [], [], 0
    for version, commit in enumerate(commits):
        held += commit
        quiet = 0 if commit or version == 0 else quiet + 1
        boundaries.append({"a": held})
        expected.append(quiet)
    assert lags(boundaries) == expected
