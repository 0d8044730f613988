"""When a fleet has fallen too far behind to go on. Pure.

Rollouts bound this by themselves: without a commit the trainer soon has no groups that are fresh
enough, and stops by its deadline for them. On recorded rollouts nothing else would ever stop a run
whose servers are all dead.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Lag:
    """``held``: highest version that each server was read back with so far; ``since``: the
    trainer's version when the last of them rose."""

    held: Mapping[str, int] = field(default_factory=dict)
    since: int | None = None

    def at(self, version: int, held: Mapping[str, int]) -> tuple["Lag", int]:
        """At a boundary with the trainer at ``version``: the next state, and for how many versions
        no server has committed anything. A server that commits counts, however old its version is.

        >>> lag, _ = Lag().at(4, {"a": 4})
        >>> lag.at(6, {"a": 4})[1], lag.at(6, {"a": 5})[1]
        (2, 0)
        """
        if held != self.held or self.since is None:
            return Lag(dict(held), version), 0
        return self, version - self.since
