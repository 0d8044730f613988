"""When a fleet has fallen too far behind to go on. A pure table; the boundary of each step is its
only event.

Rollouts bound this by themselves: without a commit the trainer soon has no groups that are fresh
enough, and stops by its deadline for them. On recorded rollouts nothing else would ever stop a run
whose servers are all dead.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Lag:
    """``held``: highest version that each server was read back with so far; ``since``: where the
    last of them rose.

    ``max_lag`` is a number of versions; 0: never too far.
    """

    max_lag: int
    held: frozenset[tuple[str, int]] = frozenset()
    since: int | None = None

    def __repr__(self) -> str:
        return (
            f"<no commit since v{self.since}, {self.max_lag or 'any number of'} versions may pass>"
        )


@dataclass(frozen=True, slots=True)
class Boundary:
    """The trainer is at ``version``; ``held`` as in Lag."""

    version: int
    held: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Stop:
    """No server has committed anything for ``versions`` versions."""

    versions: int


def step(lag: Lag, event: Boundary) -> tuple[Lag, tuple[Stop, ...]]:
    """The next state, and whether the run must stop. A server counts as alive if it committed
    anything, however old.

    >>> lag, _ = step(Lag(max_lag=2), Boundary(4, {"a": 4}))
    >>> lag, stop = step(lag, Boundary(5, {"a": 4}))
    >>> lag, stop
    (<no commit since v4, 2 versions may pass>, ())
    >>> step(lag, Boundary(6, {"a": 4}))[1]
    (Stop(versions=2),)
    """
    held = frozenset(event.held.items())
    if held != lag.held or lag.since is None:
        return replace(lag, held=held, since=event.version), ()
    versions = event.version - lag.since
    return lag, (Stop(versions),) if 0 < lag.max_lag <= versions else ()
