"""The threads that send ranges of images to the readers of a source. Each has its own readers."""

import selectors
import socket
import threading
from contextlib import suppress
from dataclasses import dataclass, field

from titan_grpo.sync.transports.channel import ADDRESS_ONLY, RANGE
from titan_grpo.sync.transports.grant import Grant
from titan_grpo.sync.transports.loop import Loop
from titan_grpo.sync.transports.tls import WOULD_BLOCK

MOST_SENDERS = 8
"""Threads of a source. What each does in Python is done one after the other."""


def senders_of(cores: int) -> int:
    """Most sending threads of a source on a host with so many cores: the rest are for what else the
    host does.

    >>> [senders_of(cores) for cores in (1, 2, 4, 16, 64)]
    [1, 1, 2, 8, 8]
    """
    return max(1, min(MOST_SENDERS, cores // 2))


@dataclass(slots=True, eq=False)
class Reader:
    """A connection that has proven its key. ``out``: of the greeting, or an address, what is still
    to be sent. ``left``: the same of its range."""

    sock: socket.socket
    grant: Grant
    out: memoryview
    inbox: bytearray = field(default_factory=bytearray)
    offset: int = 0
    left: int = 0
    address_only: bool = False
    """It reads them from the memfd."""
    parked: bool = False
    """The range that it asked for has not come yet."""
    events: int = selectors.EVENT_READ
    """That its selector waits for."""


class Sender:
    """One thread. Its other methods are for any thread, and never wait."""

    def __init__(self, name: str) -> None:
        """Start it. Errors as of Loop."""
        self._lock = threading.Lock()
        self._load = 0
        self._readers: dict[Grant, set[Reader]] = {}
        self._loop = Loop(name, self._serve, at_end=self._drop_all)

    @property
    def load(self) -> int:
        """How many readers it has."""
        return self._load

    def take(self, reader: Reader) -> None:
        """Serve a reader for the rest of its life. Its socket is in no other selector."""
        with self._lock:  # at once: the next one goes to a thread with fewer
            self._load += 1
        self._loop.soon(self._taken, reader)

    def arrived(self, grant: Grant) -> None:
        """More of that image is there."""
        # It need not wake for an image that it does not read. A reader that comes meanwhile is put
        # into the table before it asks what is there, and that was said before this call.
        if grant in self._readers:
            self._loop.soon(self._serve_parked, grant)

    def revoked(self, grant: Grant) -> None:
        """Close the connections of an image that is revoked."""
        self._loop.soon(self._drop_readers, grant)

    def close(self, timeout_s: float) -> None:
        """Close all connections and end; it has ``timeout_s`` seconds, for which this one waits."""
        self._loop.close(timeout_s)

    # The thread.

    def _taken(self, reader: Reader) -> None:
        self._readers.setdefault(reader.grant, set()).add(reader)
        self._loop.selector.register(reader.sock, reader.events, reader)
        if reader.grant.revoked:  # before it was in the table: _drop_readers did not find it
            self._drop(reader)
        else:
            self._serve(reader)

    def _serve_parked(self, grant: Grant) -> None:
        for reader in [r for r in self._readers.get(grant, ()) if r.parked]:
            self._serve(reader)

    def _drop_readers(self, grant: Grant) -> None:
        for reader in list(self._readers.get(grant, ())):
            self._drop(reader)

    def _drop_all(self) -> None:
        for grant in list(self._readers):
            self._drop_readers(grant)

    def _serve(self, reader: Reader) -> None:
        """Whatever the connection can do now without blocking."""
        try:
            alive = self._write(reader) and self._read(reader) and self._write(reader)
        except OSError:  # it went away
            alive = False
        if not alive:
            self._drop(reader)
            return
        sends = (reader.out or reader.left) and not reader.parked
        events = selectors.EVENT_WRITE if sends else selectors.EVENT_READ
        if events != reader.events:  # each change is a system call
            reader.events = events
            self._loop.selector.modify(reader.sock, events, reader)

    def _read(self, reader: Reader) -> bool:
        """Take what has come; whether the connection lives."""
        if (reader.out or reader.left) and not reader.parked:
            return True
        want = 1 if reader.parked else RANGE.size - len(reader.inbox)
        try:
            # no deadline: the socket does not block
            chunk = reader.sock.recv(want)
        except WOULD_BLOCK:
            return True
        if not chunk or reader.parked:  # while it is, it has nothing to say
            return False
        reader.inbox += chunk
        if len(reader.inbox) < RANGE.size:
            return True
        reader.offset, nbytes = RANGE.unpack(reader.inbox)
        reader.inbox.clear()
        reader.address_only, reader.left = bool(nbytes & ADDRESS_ONLY), nbytes & ~ADDRESS_ONLY
        return reader.offset + reader.left <= reader.grant.part.nbytes

    def _write(self, reader: Reader) -> bool:
        """Send what the socket takes; whether the connection lives."""
        with suppress(*WOULD_BLOCK):  # it takes no more for now
            return self._write_all(reader)
        return True

    def _write_all(self, reader: Reader) -> bool:
        grant = reader.grant
        while reader.out or reader.left:
            if reader.out:
                reader.out = reader.out[reader.sock.send(reader.out) :]
                continue
            reader.parked = not grant.has(reader.offset, reader.left)
            if reader.parked:
                return True
            if reader.address_only:
                reader.out, reader.left = memoryview(grant.address()), 0
                if not reader.out:
                    return False
                continue
            sent = grant.send(reader.sock, reader.offset, reader.left)
            if sent == 0:
                return False
            reader.offset += sent
            reader.left -= sent
        return True

    def _drop(self, reader: Reader) -> None:
        self._loop.selector.unregister(reader.sock)
        reader.sock.close()
        readers = self._readers[reader.grant]
        readers.discard(reader)
        if not readers:
            del self._readers[reader.grant]
        with self._lock:
            self._load -= 1
