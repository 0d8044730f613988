"""Which server may take a group. Bookkeeping without I/O; time is an argument, in seconds of any
monotonic clock."""

from collections.abc import Callable
from dataclasses import dataclass, field

from titan_grpo.protocol import recovery
from titan_grpo.rollout.messages import ServerState

PACE = recovery.Backoff(first_s=0.5, longest_s=15.0)
"""How long a server that failed to generate gets no new groups, in seconds."""


@dataclass(slots=True)
class Server:
    """One server: the last word of the ledger on it, and how it has answered us. The ledger does
    not see generation fail."""

    url: str
    version: int | None = None
    accepting: bool = False
    label: str = ""
    engine: str = ""
    in_flight: int = 0
    left: bool = False
    health: recovery.Health = field(default_factory=lambda: recovery.Health(PACE))


def burden(in_flight: int, lag: int, requests: int) -> int:
    """What speaks against giving a server a group of ``requests``: its load, and a further group's
    worth for each version that it is behind the newest one that could take it. So a late server
    fills up last, and its groups are the ones that go stale.

    >>> burden(8, 0, 8) == burden(0, 1, 8)
    True
    """
    return in_flight + lag * requests


class Pool:
    """The servers. ``capacity`` is the number of requests that one server may have in flight."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._servers: dict[str, Server] = {}

    def set(self, state: ServerState) -> Server:
        """Take over the ledger's word. A rest after failures stays."""
        server = self._servers.setdefault(state.url, Server(state.url))
        server.version, server.accepting = state.version, state.accepting
        server.label, server.engine = state.label, state.engine
        return server

    def remove(self, url: str) -> None:
        """The server left the run. What runs on it keeps its record, which accepts nothing more."""
        server = self._servers.pop(url, None)
        if server is not None:
            server.accepting, server.left = False, True

    def in_flight(self) -> dict[str, int]:
        """Requests in flight by server URL."""
        return {url: server.in_flight for url, server in self._servers.items()}

    def pick(
        self, requests: int, now: float, may_start: Callable[[int], bool], avoid: str = ""
    ) -> Server | None:
        """The best server (``burden``) that accepts, is not at rest, has room for ``requests`` and
        a version that may start.

        ``avoid`` (where the group failed before) is taken only if no other server is there. A group
        larger than the capacity is admitted to an idle server, whose connections then bound what is
        in flight. All requests of a group go to the one server, which has its prompt in its cache
        after the first of them.
        """
        able = [
            (s, s.version)
            for s in self._servers.values()
            if s.version is not None and self._able(s, requests, now)
        ]
        able = [(s, version) for s, version in able if may_start(version)]
        newest = max((version for _, version in able), default=0)
        others = [(s, version) for s, version in able if s.url != avoid]
        ranked = [
            (burden(s.in_flight, newest - version, requests), newest - version, s.url, s)
            for s, version in others or able
        ]
        return min(ranked, key=lambda r: r[:3])[3] if ranked else None

    def failed(self, server: Server, now: float) -> float:
        """A request failed on it: no new groups for a while. Returns when the rest ends."""
        server.health, _ = recovery.step(server.health, recovery.Silent(now))
        return server.health.until

    def succeeded(self, server: Server) -> None:
        """A group came back whole."""
        server.health, _ = recovery.step(server.health, recovery.Answered())

    def _able(self, server: Server, requests: int, now: float) -> bool:
        room = server.in_flight + requests <= self._capacity or server.in_flight == 0
        return server.accepting and room and server.health.askable(now)
