"""What a source serves (``Grant``), and the threads that send it to its readers (``Sender``), each
of which has its own. What one waits in is a ``Loop``."""

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

MOST_SENDERS = 8
"""Threads of a source. What each does in Python is done one after the other."""

SEND_BYTES = 8 << 20
"""Most bytes handed to the kernel in one call, so that one connection does not delay the others of
its thread."""

TLS_BYTES = 1 << 20
"""The same where the thread encrypts them."""

LONG_BYTES = 256 << 10
"""A piece of an image that is worth a call of its own."""

PIECES = 512
"""Most pieces in one call; the kernel takes 1024."""


def senders_of(cores: int) -> int:
    """Most sending threads of a source on a host with so many cores: the rest are for what else the
    host does.

    >>> [senders_of(cores) for cores in (1, 2, 4, 16, 64)]
    [1, 1, 2, 8, 8]
    """
    return max(1, min(MOST_SENDERS, cores // 2))


class Grant:
    """An image that may be read until ``revoke`` returns."""

    def __init__(
        self,
        view: memoryview,
        fd: int | None,
        key: Key | None,
        part: Part,
        has: Callable[[int, int], bool] | None,
    ) -> None:
        """As RangeServer.grant."""
        self.key, self.part = key, part
        self.revoked = False
        self._view, self._has = view, has
        # a descriptor of our own: a closed one's number may be another file's by then
        self._fd = os.dup(fd) if fd is not None else -1
        self._turn = threading.Condition()
        self._readings = 0
        """Threads that read the image, or use its descriptor, now."""

    def has(self, offset: int, nbytes: int) -> bool:
        """Whether these bytes are there."""
        return self._has is None or self._has(offset, nbytes)

    def send(self, sock: socket.socket, offset: int, nbytes: int) -> int:
        """Hand some bytes to the kernel without blocking: how many; 0 once it is revoked. Raises
        one of WOULD_BLOCK if the socket takes none."""
        if not self._begin():
            return 0
        try:
            return self._send(sock, offset, nbytes)
        finally:
            self._end()

    def address(self) -> bytes:
        """Where a reader on this host finds the image, as ADDRESS; zeros: in no memfd. Empty once
        it is revoked."""
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
        """When it returns, no thread reads the image, and none will. Idempotent.

        It waits for calls that are under way, each with SEND_BYTES at most. What sendfile has
        handed to the kernel are pages of the memfd, not copies: a reader that has not taken them
        yet may get what is written to them next, and its check of the blocks finds that.
        """
        with self._turn:
            self.revoked = True
            # no deadline: between _begin and _end there is one call on a socket that does not
            # block, and no lock is taken, so whatever the caller holds, it ends
            self._turn.wait_for(lambda: self._readings == 0)
            # no thread uses the number now, and _begin lets none: it may be another file's next
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
        # Not under the lock: the other threads would wait for the kernel's copy.
        stop = offset + min(nbytes, SEND_BYTES)
        pieces = list(islice(self.part.pieces(offset, stop), PIECES))
        low, high = pieces[0]
        alone = len(pieces) == 1 or high - low >= LONG_BYTES
        if isinstance(sock, ssl.SSLSocket):
            some = self._view[low:high] if alone else b"".join(self._view[a:b] for a, b in pieces)
            return send_records(sock, memoryview(some)[:TLS_BYTES])
        if self._fd >= 0 and alone:
            return os.sendfile(sock.fileno(), self._fd, low, high - low)
        # one call for short pieces: each by itself would be a packet of its own
        return sock.sendmsg([self._view[a:b] for a, b in pieces])


def _nothing() -> None:
    """No deadline, and nothing to do."""


class Loop:
    """One such thread. It sleeps while nothing comes and nothing is to be done."""

    def __init__(
        self,
        name: str,
        ready: Callable[[Any], object],
        tidy: Callable[[], float | None] = _nothing,
        at_end: Callable[[], object] = _nothing,
    ) -> None:
        """Start it. On it, ``ready`` is called with the data of a socket in ``selector`` that is
        ready; ``tidy`` before each wait, for the longest time of the wait in seconds; ``at_end``
        last. OSError or RuntimeError where the system has no further descriptor or thread now."""
        self.selector: selectors.BaseSelector = selectors.DefaultSelector()
        """The thread's own, with data of each socket that is not None."""
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
        """Have the thread call ``work``, after all that it was given before. Once, where it has not
        called it since the last time. Never waits. Nothing happens once the thread has ended."""
        task = (work, *about)
        with self._lock:
            if self._ended:
                return
            silent = not self._todo
            self._todo.pop(task, None)
            self._todo[task] = None
            if silent:  # else the thread has yet to hear the bell
                os.eventfd_write(self._bell, 1)

    def close(self, timeout_s: float) -> None:
        """End the thread; it has ``timeout_s`` seconds. Idempotent."""
        self.soon(self._stop)
        self._thread.join(timeout_s)

    def _stop(self) -> None:
        self._stopping = True

    def _run(self) -> None:
        while not self._stopping:
            # no deadline: where tidy() names none; a socket that is ready and soon() end it, and
            # the thread is a daemon
            ready = [entry.data for entry, _ in self.selector.select(self._tidy())]
            for data in ready:
                if data is not None:
                    self._ready(data)
            # Last: what is to be done may close a socket that was ready too.
            if None in ready:
                self._do()
        self._at_end()
        self._close()

    def _do(self) -> None:
        os.eventfd_read(self._bell)  # before the list is taken: what is added after rings again
        with self._lock:
            todo, self._todo = self._todo, {}
        for work, *about in todo:
            work(*about)

    def _close(self) -> None:
        with self._lock:  # soon() rings an open bell or none
            self._ended = True
            if self._bell >= 0:
                os.close(self._bell)
        self.selector.close()


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
