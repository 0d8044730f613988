"""Which server may take a group. Bookkeeping without I/O; time is an argument, in seconds of any
monotonic clock."""

from collections.abc import Callable
from dataclasses import dataclass, field

from titan_grpo.protocol import recovery
from titan_grpo.protocol.messages import ServerState

PACE = recovery.Backoff(first_s=0.5, longest_s=15.0)
"""How long a server that failed to generate gets no new groups, in seconds."""


@dataclass(slots=True)
class Server:
    """What the ledger has of a server, and how its generation went, which the ledger does not
    see."""

    url: str
    version: int | None = None
    accepting: bool = False
    label: str = ""
    engine: str = ""
    committing: int | None = None
    in_flight: int = 0
    left: bool = False
    health: recovery.Health = field(default_factory=lambda: recovery.Health(PACE))

    @property
    def newest(self) -> int | None:
        """The newest version that it may serve: from a commit's pause on that one, though the
        ledger learns only some time after the engine goes on that it is in. None: unknown."""
        return self.version if self.version is None else max(self.version, self.committing or 0)


def cost(in_flight: int, lag: int, requests: int) -> int:
    """Cost of giving a server a group of ``requests``: its load, and a further group's worth for
    each version that it is behind the newest candidate. So a late server, whose groups go stale
    first, fills up last.

    >>> cost(8, 0, 8) == cost(0, 1, 8)
    True
    """
    return in_flight + lag * requests


class Pool:
    """The servers. ``capacity`` is the number of requests that one server may have in flight."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._servers: dict[str, Server] = {}

    def set(self, state: ServerState) -> Server:
        """Take over the ledger's state. A rest after failures stays."""
        server = self._servers.setdefault(state.url, Server(state.url))
        server.version, server.accepting = state.version, state.accepting
        server.label, server.engine = state.label, state.engine
        server.committing = state.committing
        return server

    def remove(self, url: str) -> None:
        """The server left the run. Its running groups keep its record, which takes no others."""
        server = self._servers.pop(url, None)
        if server is not None:
            server.accepting, server.left = False, True

    def in_flight(self) -> dict[str, int]:
        """Requests in flight by server URL."""
        return {url: server.in_flight for url, server in self._servers.items()}

    def committing(self, url: str) -> int | None:
        """The version whose commit runs on a server."""
        return self._servers[url].committing if url in self._servers else None

    def newest(self) -> int | None:
        """The newest version that a server is known to hold."""
        return max(
            (s.version for s in self._servers.values() if s.version is not None), default=None
        )

    def pick(
        self, requests: int, now: float, may_start: Callable[[int], bool], avoid: str = ""
    ) -> Server | None:
        """The server of least ``cost`` that accepts, is not at rest, has room for ``requests`` and
        a version that may start.

        ``avoid`` (where the group failed before) is taken only if there is no other. A group larger
        than the capacity is admitted to an idle server, whose connections then bound what is in
        flight. All requests of a group go to one server, which has its prompt in its cache after
        the first of them.
        """
        able = [
            (server, server.version)
            for server in self._servers.values()
            if server.version is not None
            and server.accepting
            and (server.in_flight + requests <= self._capacity or server.in_flight == 0)
            and server.health.askable(now)
            and may_start(server.version)
        ]
        newest = max((version for _, version in able), default=0)
        others = [(server, version) for server, version in able if server.url != avoid]

        def rank(candidate: tuple[Server, int]) -> tuple[int, int, str]:
            server, version = candidate
            lag = newest - version
            return cost(server.in_flight, lag, requests), lag, server.url

        return min(others or able, key=rank)[0] if able else None

    def failed(self, server: Server, now: float) -> float:
        """A request failed on it: no new groups for a while. Returns when that ends."""
        server.health, _ = recovery.step(server.health, recovery.Silent(now))
        return server.health.until

    def succeeded(self, server: Server) -> None:
        """A group came back whole."""
        server.health, _ = recovery.step(server.health, recovery.Answered())
