"""Which server may take a group. Bookkeeping without I/O; time is an argument, in seconds of any monotonic clock."""

from collections.abc import Callable
from dataclasses import dataclass

FIRST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 15.0


@dataclass(slots=True)
class Server:
    """One server: the last word of the ledger on it, and what we have seen ourselves."""

    url: str
    version: int | None = None
    accepting: bool = False
    label: str = ""
    in_flight: int = 0
    failures: int = 0
    paused_until: float = 0.0


class Pool:
    """The servers. ``capacity`` is the number of requests that one server may have in flight."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._servers: dict[str, Server] = {}

    def set(self, url: str, version: int | None, accepting: bool, label: str) -> Server:
        """Take over the ledger's word. A pause after failures stays: the ledger does not see generation fail."""
        server = self._servers.setdefault(url, Server(url))
        server.version, server.accepting, server.label = version, accepting, label
        return server

    def pick(self, requests: int, now: float, may_start: Callable[[int], bool], avoid: str = "") -> Server | None:
        """The least loaded server that accepts, is not paused, has room for ``requests`` and a version that may start.

        ``avoid`` (where the group failed before) is taken only if no other server is there. A group larger than the
        capacity is admitted to an idle server, whose connections then bound what is in flight.
        """
        able = [s for s in self._servers.values() if self._able(s, requests, now) and s.version is not None]
        able = [s for s in able if s.version is not None and may_start(s.version)]
        others = [s for s in able if s.url != avoid]
        return min(others or able, key=lambda s: (s.in_flight, -(s.version or 0), s.url), default=None)

    def failed(self, server: Server, now: float) -> float:
        """A request failed on it: no new groups for a while, doubling. Returns when the pause ends."""
        server.failures += 1
        server.paused_until = now + min(FIRST_PAUSE_S * 2 ** (server.failures - 1), LONGEST_PAUSE_S)
        return server.paused_until

    def succeeded(self, server: Server) -> None:
        """A group came back whole."""
        server.failures = 0

    def _able(self, server: Server, requests: int, now: float) -> bool:
        room = server.in_flight + requests <= self._capacity or server.in_flight == 0
        return server.accepting and room and now >= server.paused_until
