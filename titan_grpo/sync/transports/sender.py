"""A source's images (``Grant``), and the threads that send them (``Sender``), each with readers of
its own. A ``Loop`` is the thread of a Sender and of a RangeServer."""

import logging
import os
import selectors
import socket
import ssl
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from titan_grpo.layout.manifest import Part
from titan_grpo.runkey import Key
from titan_grpo.sync.transports.channel import ADDRESS, ADDRESS_ONLY, RANGE
from titan_grpo.sync.transports.tls import WOULD_BLOCK, send_records

logger = logging.getLogger(__name__)

MOST_SENDERS = 8
"""Limit of a source's sending threads: their Python code runs one at a time."""

SEND_BYTES = 8 << 20
"""Most bytes in one call: a connection must not delay the others of its thread."""

TLS_BYTES = 1 << 20
"""The same where the thread encrypts them."""

LONG_BYTES = 256 << 10
"""Least bytes of a piece that gets a call of its own."""

PIECES = 512
"""Most pieces in one call; the kernel takes 1024."""


def senders_of(cores: int) -> int:
    """Return the limit of a source's sending threads on a host with so many cores: half of them are
    for other work.

    >>> [senders_of(cores) for cores in (1, 2, 4, 16, 64)]
    [1, 1, 2, 8, 8]
    """
    return max(1, min(MOST_SENDERS, cores // 2))


class Grant:
    """An image that readers may read until ``revoke`` returns."""

    def __init__(
        self,
        view: memoryview,
        fd: int | None,
        key: Key | None,
        part: Part,
        has: Callable[[int, int], bool] | None,
    ) -> None:
        """See RangeServer.grant."""
        self.key, self.part = key, part
        self.revoked = False
        self._view, self._has = view, has
        # A descriptor of our own: the number of a closed one may be another file's.
        self._fd = os.dup(fd) if fd is not None else -1
        self._turn = threading.Condition()
        self._readings = 0
        """Number of threads that now use the image or its descriptor."""

    def has(self, offset: int, nbytes: int) -> bool:
        return self._has is None or self._has(offset, nbytes)

    def send(self, sock: socket.socket, offset: int, nbytes: int) -> int:
        """Send some of the bytes without blocking; return how many, 0 once revoked. Raises one of
        WOULD_BLOCK if the socket takes none."""
        if not self._begin():
            return 0
        try:
            return self._send(sock, offset, nbytes)
        finally:
            self._end()

    def address(self) -> bytes:
        """Return the image's ADDRESS for a reader on this host; zeros without a memfd, empty once
        revoked."""
        if not self._begin():
            return b""
        try:
            if self._fd < 0:
                return bytes(ADDRESS.size)
            about = os.fstat(self._fd)
            return ADDRESS.pack(os.getpid(), self._fd, about.st_size, about.st_ino)
        finally:
            self._end()

    def revoke(self) -> None:
        """End all reads of the image: when this returns, no thread reads it, and none will.
        Idempotent.

        Waits for calls in progress, each of SEND_BYTES at most. sendfile gives the kernel pages of
        the memfd, not copies: a slow reader may get the next bytes written to them, and finds that
        by its check of the blocks.
        """
        with self._turn:
            self.revoked = True
            # no deadline: between _begin and _end there is one call on a non-blocking socket and
            # no lock, so it ends whatever the caller holds
            self._turn.wait_for(lambda: self._readings == 0)
            # No thread uses the descriptor now, and _begin admits none: it can be closed.
            fd, self._fd = self._fd, -1
            self._view = memoryview(b"")
        if fd >= 0:
            os.close(fd)

    def _begin(self) -> bool:
        with self._turn:
            if self.revoked:  # under the lock: revoke() counts this thread, or this sees it
                return False
            self._readings += 1
            return True

    def _end(self) -> None:
        with self._turn:
            self._readings -= 1
            if self.revoked:
                self._turn.notify_all()

    def _send(self, sock: socket.socket, offset: int, nbytes: int) -> int:
        # Not under the lock: other threads would wait for the kernel's copy.
        tls = isinstance(sock, ssl.SSLSocket)
        stop = offset + min(nbytes, TLS_BYTES if tls else SEND_BYTES)
        pieces = list(islice(self.part.pieces(offset, stop), PIECES))
        low, high = pieces[0]
        alone = len(pieces) == 1 or high - low >= LONG_BYTES
        if isinstance(sock, ssl.SSLSocket):
            some = self._view[low:high] if alone else b"".join(self._view[a:b] for a, b in pieces)
            return send_records(sock, memoryview(some))
        if self._fd >= 0 and alone:
            return os.sendfile(sock.fileno(), self._fd, low, high - low)
        # One call for all short pieces: by itself, each would be a packet.
        return sock.sendmsg([self._view[a:b] for a, b in pieces])


def _nothing() -> None:
    """Do nothing; return no deadline."""


class Loop:
    """A thread that serves sockets and calls functions for other threads; else it sleeps."""

    def __init__(
        self,
        name: str,
        ready: Callable[[Any], object],
        tidy: Callable[[], float | None] = _nothing,
        at_end: Callable[[], object] = _nothing,
    ) -> None:
        """Start the thread. It calls ``ready`` with the data of each ready socket in ``selector``,
        ``tidy`` before each wait for its longest time in seconds, and ``at_end`` last. An error
        that one of them raises ends the process. Raises OSError or RuntimeError if the system has
        no descriptor or thread left."""
        self.selector: selectors.BaseSelector = selectors.DefaultSelector()
        """Used by the thread only. The data of each socket is not None."""
        self._ready, self._tidy, self._at_end = ready, tidy, at_end
        self._lock = threading.Lock()
        self._todo: dict[tuple[Any, ...], None] = {}
        self._stopping = self._ended = False
        self._bell = -1
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        try:
            self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
            self.selector.register(self._bell, selectors.EVENT_READ)
            self._thread.start()
        except (OSError, RuntimeError):
            self._close()
            raise

    def soon(self, work: Callable[..., object], *about: Any) -> None:
        """Have the thread call ``work(*about)``, after all earlier ones. A call that is still
        queued is not repeated, but moves to the end. No effect once the thread has ended. Never
        waits."""
        task = (work, *about)
        with self._lock:
            if self._ended:
                return
            silent = not self._todo
            self._todo.pop(task, None)
            self._todo[task] = None
            if silent:  # else the bell is rung already, and not read yet
                os.eventfd_write(self._bell, 1)

    def close(self, timeout_s: float) -> None:
        """End the thread; wait up to ``timeout_s`` seconds for it. Idempotent."""
        self.soon(self._stop)
        self._thread.join(timeout_s)

    def _stop(self) -> None:
        self._stopping = True

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._once()
            self._at_end()
            self._close()
        except Exception:  # top of a thread: end the process, or every reader waits in vain
            # In a run it is a sync process or a receiver: either is started again.
            logger.exception("the thread %r ended, and its process does", self._thread.name)
            os._exit(1)

    def _once(self) -> None:
        # no deadline: if tidy() returns none, a ready socket or soon() ends the wait; the thread is
        # a daemon
        ready = [entry.data for entry, _ in self.selector.select(self._tidy())]
        for data in ready:
            if data is not None:
                self._ready(data)
        # After the sockets: a queued call may close a socket that is in ``ready``.
        if None in ready:
            self._do()

    def _do(self) -> None:
        os.eventfd_read(self._bell)  # before the list is taken: later calls ring again
        with self._lock:
            todo, self._todo = self._todo, {}
        for work, *about in todo:
            work(*about)

    def _close(self) -> None:
        with self._lock:  # soon() must not ring a closed descriptor
            self._ended = True
            if self._bell >= 0:
                os.close(self._bell)
        self.selector.close()


@dataclass(slots=True, eq=False)
class Reader:
    """A connection that has proven its key. ``out``: bytes of the greeting or of an address still
    to be sent; ``left``: number of bytes of its range still to be sent."""

    sock: socket.socket
    grant: Grant
    out: memoryview
    inbox: bytearray = field(default_factory=bytearray)
    offset: int = 0
    left: int = 0
    address_only: bool = False
    """Whether it reads the range from the memfd."""
    parked: bool = False
    """Whether its range is not there yet."""
    events: int = selectors.EVENT_READ
    """Events that its selector waits for."""


class Sender:
    """One sending thread. Any thread may call its methods; only ``close`` waits."""

    def __init__(self, name: str) -> None:
        """Start the thread. Raises as Loop."""
        self._lock = threading.Lock()
        self._load = 0
        self._readers: dict[Grant, set[Reader]] = {}
        self._loop = Loop(name, self._serve, at_end=self._drop_all)

    @property
    def load(self) -> int:
        return self._load

    def take(self, reader: Reader) -> None:
        """Serve a reader until it is gone. Its socket must be in no other selector."""
        with self._lock:  # counted here, not by the thread: the next reader's choice needs it
            self._load += 1
        self._loop.soon(self._taken, reader)

    def arrived(self, grant: Grant) -> None:
        """Serve the image's parked readers: more of it is there."""
        # Without readers, do not wake the thread. A reader that comes meanwhile enters the table
        # before it calls has(), and that finds the new bytes.
        if grant in self._readers:
            self._loop.soon(self._serve_parked, grant)

    def revoked(self, grant: Grant) -> None:
        """Close the connections of a revoked image's readers."""
        self._loop.soon(self._drop_readers, grant)

    def close(self, timeout_s: float) -> None:
        """Close all connections and end the thread; wait up to ``timeout_s`` seconds for it."""
        self._loop.close(timeout_s)

    # The thread.

    def _taken(self, reader: Reader) -> None:
        self._readers.setdefault(reader.grant, set()).add(reader)
        self._loop.selector.register(reader.sock, reader.events, reader)
        if reader.grant.revoked:  # before it entered the table: _drop_readers missed it
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
        """Do what the connection can do now without blocking."""
        try:
            alive = self._write(reader) and self._read(reader) and self._write(reader)
        except OSError:  # the reader is gone
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
        """Read what has come; return whether the connection lives."""
        if (reader.out or reader.left) and not reader.parked:
            return True
        want = 1 if reader.parked else RANGE.size - len(reader.inbox)
        try:
            # no deadline: the socket does not block
            chunk = reader.sock.recv(want)
        except WOULD_BLOCK:
            return True
        if not chunk or reader.parked:  # a parked reader must send nothing
            return False
        reader.inbox += chunk
        if len(reader.inbox) < RANGE.size:
            return True
        reader.offset, nbytes = RANGE.unpack(reader.inbox)
        reader.inbox.clear()
        reader.address_only, reader.left = bool(nbytes & ADDRESS_ONLY), nbytes & ~ADDRESS_ONLY
        return reader.offset + reader.left <= reader.grant.part.nbytes

    def _write(self, reader: Reader) -> bool:
        """Send what the socket takes; return whether the connection lives."""
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
