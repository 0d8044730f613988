"""An image that a source serves, until it is revoked. Any number of threads send it at once."""

import os
import socket
import ssl
import threading
from collections.abc import Callable
from itertools import islice

from titan_grpo.layout.manifest import Part
from titan_grpo.runkey import Key
from titan_grpo.sync.transports.channel import ADDRESS
from titan_grpo.sync.transports.tls import send_records

SEND_BYTES = 8 << 20
"""Most bytes handed to the kernel in one call, so that one connection does not delay the others of
its thread."""

TLS_BYTES = 1 << 20
"""The same where the thread encrypts them."""

LONG_BYTES = 256 << 10
"""A piece of an image that is worth a call of its own."""

PIECES = 512
"""Most pieces in one call; the kernel takes 1024."""


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
