"""A fleet without a commit stops the run after max_lag versions, and not a version earlier."""

from hypothesis import given
from hypothesis import strategies as st

from titan_grpo.protocol.lag import Boundary, Lag, Stop, step


def stops(lag: Lag, boundaries: list[Boundary]) -> list[int]:
    """Versions at which the run would stop."""
    out = []
    for boundary in boundaries:
        lag, actions = step(lag, boundary)
        if actions:
            out.append(boundary.version)
    return out


def test_a_silent_fleet_stops_after_max_lag_versions() -> None:
    assert stops(Lag(3), [Boundary(v, {"a": 0}) for v in range(6)]) == [3, 4, 5]
    assert step(step(Lag(3), Boundary(7, {}))[0], Boundary(10, {}))[1] == (Stop(3),)


def test_one_server_that_commits_keeps_the_run_going_however_old_its_version_is() -> None:
    assert stops(Lag(2), [Boundary(v, {"a": 0, "b": v // 2}) for v in range(20)]) == []


def test_zero_never_stops() -> None:
    assert stops(Lag(0), [Boundary(v, {}) for v in range(100)]) == []


@given(st.integers(1, 5), st.lists(st.booleans(), max_size=40))
def test_it_stops_exactly_when_the_last_max_lag_boundaries_saw_no_commit(max_lag, commits) -> None:
    held, boundaries, expected, quiet = 0, [], [], 0
    for version, commit in enumerate(commits):
        held += commit
        quiet = 0 if commit or version == 0 else quiet + 1
        boundaries.append(Boundary(version, {"a": held}))
        if quiet >= max_lag:
            expected.append(version)
    assert stops(Lag(max_lag), boundaries) == expected
