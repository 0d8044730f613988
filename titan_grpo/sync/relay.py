"""Servers that read versions from each other: the table of protocol/relay.py behind one lock, and
the address and tickets at which each server is read."""

import secrets
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from urllib.parse import urlsplit

from titan_grpo.config import WeightSync
from titan_grpo.protocol import relay
from titan_grpo.protocol.messages import Joined, RangeSource, Staged
from titan_grpo.sync.transports.channel import TICKET_BYTES

PATIENCE_S = 2.0
"""Base of a server's wait for a range from another one, in seconds."""


@dataclass(frozen=True, slots=True)
class Places:
    """Sources of one transfer. ``sources``: other servers in order of preference, each part by
    part; ``urls``: the server of each source; ``serve``: this server's own ticket for each part."""

    sources: tuple[RangeSource, ...] = ()
    urls: tuple[str, ...] = ()
    serve: tuple[str, ...] = ()


class Relay:
    """Shared by all lanes of a run. Any thread; never waits."""

    def __init__(
        self,
        on: bool = False,
        relayed: Callable[[int], object] = int,
        zones: Sequence[str] = (),
        trainer_hosts: int = 1,
    ) -> None:
        """``on``: weight_sync.relay with transport tcp; otherwise the table stays empty.
        ``relayed`` is called with the bytes that a server has read from others. ``zones``: see
        weight_sync.zones."""
        self._on, self._relayed, self._zones = on, relayed, zones
        self._lock = threading.Lock()
        self._table = relay.Relays(roots=trainer_hosts)
        self._ports: dict[str, tuple[int, str]] = {}
        """Server -> port and pin."""
        self._tickets: dict[str, tuple[str, ...]] = {}
        """Server -> ticket of each part of its last transfer."""

    def wait_s(self, config: WeightSync, block_bytes: int) -> float:
        """Return how long a server waits for other ones (receive.fetch.Patience), in seconds; 0:
        servers do not read from each other. Covers a chain of waiting servers, but leaves a quarter
        of ``progress_deadline_s`` for the trainer, before the transfer counts as stalled."""
        hop_s = config.connections * block_bytes / config.min_rate
        wait_s = min(config.progress_deadline_s * 3 / 4, PATIENCE_S + relay.DEPTH * hop_s)
        return wait_s if self._on else 0.0

    def came(self, url: str, joined: Joined, trainer: str) -> None:
        """Add a server that has joined. ``trainer``: this host's address towards it. A server on
        this host is left out: it reads the trainer's memory, and shares the trainer's link."""
        if not self._on or joined.relay_host == trainer:
            return
        name = urlsplit(url).hostname or ""
        # The host's name is in lower case, as in all URLs.
        fits = (zone for zone in self._zones if fnmatchcase(name, zone.lower()))
        zone = joined.zone or next(fits, "")
        with self._lock:
            self._ports[url] = joined.relay_port, joined.relay_pin
            self._step(relay.Came(url, joined.relay_host, zone, joined.relay_port > 0))

    def gone(self, url: str) -> None:
        """Remove a server whose lane has closed the connection. Idempotent."""
        with self._lock:
            self._step(relay.Gone(url))
            self._ports.pop(url, None)
            self._tickets.pop(url, None)

    def asked(self, url: str, version: int, parts: int) -> Places:
        """Assign the sources from which a server reads ``version``, which has ``parts`` parts."""
        with self._lock:
            if url not in self._ports:
                return Places()
            ((ancestors),) = (action.urls for action in self._step(relay.Asked(url, version)))
            serve = tuple(secrets.token_bytes(TICKET_BYTES).hex() for _ in range(parts))
            self._tickets[url] = serve
            sources = tuple(
                RangeSource(self._table.nodes[u].host, port, ticket, part=part, pin=pin)
                for u in ancestors
                for port, pin in [self._ports[u]]
                for part, ticket in enumerate(self._tickets[u])
            )
            return Places(sources, tuple(u for u in ancestors for _ in range(parts)), serve)

    def answered(self, url: str, answer: Staged, places: Places, nbytes: int) -> None:
        """Record the end of a server's transfer of ``nbytes`` from ``places``."""
        rate = nbytes / max(answer.receive_s, 1e-9)
        lost = tuple(dict.fromkeys(places.urls[i] for i in answer.lost if i < len(places.urls)))
        with self._lock:
            if url in self._ports:
                self._step(relay.Answered(url, answer.version, answer.ok, rate, lost))
        if answer.relay_bytes:
            self._relayed(answer.relay_bytes)

    def _step(self, event: relay.Event) -> tuple[relay.Read, ...]:
        self._table, actions = relay.step(self._table, event)
        return actions
