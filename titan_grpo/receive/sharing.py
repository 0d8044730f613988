"""Serve the version that this server has, or is reading, to other servers, block by block as they
arrive (protocol.relay)."""

import threading
from collections.abc import Sequence

from titan_grpo.layout.image import SharedImage
from titan_grpo.layout.manifest import Manifest
from titan_grpo.runkey import Key
from titan_grpo.sync.transports.range_server import RangeServer
from titan_grpo.sync.transports.tls import Certificate


class Sharing:
    """One receiver's. Any thread."""

    def __init__(self, host: str, key: Key | None, certificate: Certificate | None = None) -> None:
        """Listen at this host's address ``host``; readers prove ``key``. ConfigError if the address
        cannot be bound."""
        # a reader may be told of a version before the order to read it has come here
        self._server, self._key = RangeServer(expects=True, certificate=certificate), key
        self.host, self.port = host, self._server.listen(host)
        self._lock = threading.Lock()
        self._tickets: Sequence[str] = ()
        self._there: list[bytearray] = []
        """Per part, which blocks are there and checked."""
        self._block_bytes = 1

    def begin(self, image: SharedImage, manifest: Manifest, tickets: Sequence[str]) -> None:
        """Serve each part under its ticket from now on: nothing is there yet."""
        self.end()
        with self._lock:
            self._block_bytes = manifest.block_bytes
            self._there = [bytearray(len(manifest.blocks(p))) for p in range(len(manifest.parts))]
            self._tickets = tickets
        fd = image.address.fd
        for ticket, part, there in zip(tickets, manifest.parts, self._there, strict=True):
            has = _Has(there, manifest.block_bytes)
            self._server.grant(image.buffer, fd, self._key, part, ticket=ticket, has=has)

    def arrived(self, part: int, start: int, stop: int) -> None:
        """Bytes ``start`` to ``stop`` of the part's stream, whole blocks, are there and checked."""
        with self._lock:
            for block in range(start // self._block_bytes, -(-stop // self._block_bytes)):
                self._there[part][block] = 1
            ticket = self._tickets[part]
        self._server.arrived(ticket)

    def end(self) -> None:
        """Serve nothing: when it returns, no byte of the image is sent any more. Who reads the
        memfd on this host finds by its checks that the image is another one's. Idempotent."""
        with self._lock:
            tickets, self._tickets = self._tickets, ()
        for ticket in tickets:
            self._server.revoke(ticket)

    def close(self) -> None:
        """Stop listening. Idempotent."""
        self._server.close()


class _Has:
    """Whether bytes of a part's stream are there."""

    def __init__(self, there: bytearray, block_bytes: int) -> None:
        self._there, self._block_bytes = there, block_bytes

    def __call__(self, offset: int, nbytes: int) -> bool:
        first, last = offset // self._block_bytes, -(-(offset + nbytes) // self._block_bytes)
        return 0 not in self._there[first:last]
