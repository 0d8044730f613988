"""Fetch a whole version in ranges, in parallel, from the sources that have it; each block is
checked on arrival. And serve it, block by block, to other servers.

Each trainer host has a part of the version, and the parts are read at the same time.
A range that is lost, or that holds a block with another digest, is read again, from the next source
first. No source is trusted: what passes is what the trainer hashed. A process of the same user on
the same host reads the memfd itself: the trainer's (MemfdReader), or another server's
(BesideReader).
"""

import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from titan_grpo.errors import SyncError, TransferFailed
from titan_grpo.layout.image import Hashing, ImageAddress, SharedImage, open_memfd
from titan_grpo.layout.manifest import Manifest, Part
from titan_grpo.protocol.messages import RangeSource
from titan_grpo.runkey import Key
from titan_grpo.sync.transports.channel import (
    ADDRESS,
    ADDRESS_ONLY,
    RANGE,
    connect,
    fill,
    send_all,
)
from titan_grpo.sync.transports.range_server import RangeServer
from titan_grpo.sync.transports.tls import Certificate

RANGE_BYTES = 4 << 20
"""Bytes of one request, rounded to whole blocks: small enough to stay in a core's cache between
the copy and the check."""

ATTEMPTS = 2
"""How often each source is asked for a range before the range is given up."""


class RangeReader(Protocol):
    """Reads ranges of one part of an image from one source. Used by one thread."""

    def read_into(self, offset: int, *views: memoryview) -> None:
        """Fill ``views`` (uint8), one after the other, with the part's bytes from ``offset``.
        TransferFailed if the source is gone, or no byte came within its deadline."""
        ...

    def close(self) -> None:
        """Let go of the source. Idempotent."""
        ...


class MemfdReader:
    """Reads another process's memfd on this host: one copy by the kernel, no socket, no mapping."""

    def __init__(self, memfd: dict[str, int], part: Part | None = None) -> None:
        """``part``: which one the memfd has pages of; None: the whole image. TransferFailed if that
        process is not on this host, of another user, or gone."""
        self._fd, self._part = -1, part
        try:
            self._fd = open_memfd(ImageAddress.from_json(memfd), os.O_RDONLY)
        except (SyncError, TypeError) as error:
            raise TransferFailed(str(error)) from error

    def read_into(self, offset: int, *views: memoryview) -> None:
        for view in views:
            stop = offset + view.nbytes
            pieces = [(offset, stop)] if self._part is None else self._part.pieces(offset, stop)
            done = 0
            for low, high in pieces:
                self._read(low, view[done : done + high - low])
                done += high - low
            offset = stop

    def _read(self, offset: int, view: memoryview) -> None:
        done = 0
        while done < view.nbytes:
            try:
                got = os.preadv(self._fd, [view[done:]], offset + done)
            except OSError as error:
                raise TransferFailed(f"the image's memfd cannot be read: {error}") from error
            if got == 0:
                raise TransferFailed(f"the image's memfd ends before byte {offset + view.nbytes}")
            done += got

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


class TcpReader:
    """One TCP connection to a source."""

    def __init__(
        self, source: RangeSource, key: Key | None, timeout_s: float, whole: bool = False
    ) -> None:
        """Connect and exchange proofs. ``timeout_s``: the longest wait for the next byte, or for a
        ``whole`` range, in seconds. TransferFailed if the source does not answer, or lacks the
        key."""
        self._range_s = timeout_s if whole else math.inf
        self._name = f"source at {source.host}:{source.port}"
        at = source.host, source.port
        self._socket = connect(at, source.ticket, key, timeout_s, "source", source.pin)

    def read_into(self, offset: int, *views: memoryview) -> None:
        nbytes = sum(view.nbytes for view in views)
        send_all(self._socket, RANGE.pack(offset, nbytes), self._name)
        until = time.monotonic() + self._range_s
        for view in views:
            fill(self._socket, view, self._name, until)

    def address(self, offset: int, nbytes: int) -> dict[str, int]:
        """Where the image is on the source's host, once these bytes are there; TransferFailed as
        for ``read_into``."""
        send_all(self._socket, RANGE.pack(offset, nbytes | ADDRESS_ONLY), self._name)
        answer = bytearray(ADDRESS.size)
        fill(self._socket, memoryview(answer), self._name, time.monotonic() + self._range_s)
        return ImageAddress(*ADDRESS.unpack(answer)).to_json()

    def close(self) -> None:
        self._socket.close()


class BesideReader:
    """Reads from another server on this host: asks it for each range, and takes the bytes from its
    memfd. Over the connection where the kernel does not let it: in containers of their own."""

    def __init__(self, source: RangeSource, key: Key | None, timeout_s: float, part: Part) -> None:
        """As TcpReader, for ``whole`` ranges; ``part``: the source's."""
        self._tcp, self._part = TcpReader(source, key, timeout_s, whole=True), part
        self._memfd: MemfdReader | None = None
        self._apart = False

    def read_into(self, offset: int, *views: memoryview) -> None:
        """See RangeReader. That server may write its image anew meanwhile: the reader's check of
        the blocks finds it."""
        if not self._apart:
            address = self._tcp.address(offset, sum(view.nbytes for view in views))
            if self._memfd is None:
                try:
                    self._memfd = MemfdReader(address, self._part)
                except TransferFailed:
                    self._apart = True
        if self._memfd is not None:
            self._memfd.read_into(offset, *views)
        else:
            self._tcp.read_into(offset, *views)

    def close(self) -> None:
        self._tcp.close()
        if self._memfd is not None:
            self._memfd.close()


Open = Callable[[], RangeReader]
"""Opens a reader of one source; TransferFailed if the source cannot be reached."""

Moved = Callable[[int], object]
"""Called with the number of bytes that are there and checked, wherever in the image they are."""


@dataclass(frozen=True, slots=True)
class Content:
    """What the image must hold: ``digests`` of the manifest's blocks."""

    manifest: Manifest
    digests: Sequence[bytes]
    hashing: Hashing

    def first_bad(self, image: memoryview, blocks: range) -> int | None:
        """The first of these blocks of ``image`` that differs; None if none does."""
        for index in blocks:
            pieces = [image[a:b] for a, b in self.manifest.block(index)]
            if self.hashing.block(pieces) != self.digests[index]:
                return index
        return None


@dataclass(frozen=True, slots=True)
class Relaying:
    """Of a fetch among servers that read from each other, block by block: each serves a block as
    soon as it has it. ``others``: the sources that are servers; one that fails once is asked no
    more. ``arrived``: called with part, start and stop of each range that is there and checked."""

    others: frozenset[Open]
    arrived: Callable[[int, int, int], object]


@dataclass(frozen=True, slots=True)
class _Range:
    """Whole blocks of one part. ``start`` and ``stop`` count bytes of the part's stream."""

    part: int
    start: int
    stop: int
    blocks: range


def _ranges(manifest: Manifest, part: int, nbytes: int) -> deque[_Range]:
    """A part in ranges of ``nbytes``, which are whole blocks."""
    blocks, end = manifest.blocks(part), manifest.parts[part].nbytes
    each = nbytes // manifest.block_bytes
    return deque(
        _Range(part, i * nbytes, min((i + 1) * nbytes, end), blocks[i * each : (i + 1) * each])
        for i in range(-(-end // nbytes))
    )


def range_bytes(block_bytes: int, bucket_bytes: int) -> int:
    """Bytes of one range: whole blocks, RANGE_BYTES or less where they allow it, and a bucket is
    whole ranges: its mark is set as soon as it is there.

    >>> range_bytes(1 << 20, 64 << 20) >> 20, range_bytes(1 << 20, 10 << 20) >> 20
    (4, 2)
    """
    blocks = max(1, RANGE_BYTES // block_bytes)
    while bucket_bytes // block_bytes % blocks:
        blocks -= 1
    return blocks * block_bytes


class _RangeLost(TransferFailed):
    """No source gave the range. ``bad_block``: the block that differed at the last one, or -1."""

    def __init__(self, reason: str, bad_block: int) -> None:
        super().__init__(reason)
        self.bad_block = bad_block


class Fetch:
    """One transfer into an image. Made for one ``run``.

    After it: ``error`` (empty if every block is there and checked), ``bad_block`` (the block that
    differed, or -1), ``verify_s`` (seconds of checks, summed over the threads), ``read_bytes``, of
    these ``relay_bytes`` from other servers, and ``lost``, the other servers that failed.
    """

    def __init__(
        self,
        image: SharedImage,
        content: Content,
        sources: Mapping[int, Sequence[Open]],
        bucket_bytes: int,
        patched: Collection[int] = (),
        relaying: Relaying | None = None,
    ) -> None:
        """``sources`` of each part, in the order in which they are asked. ``bucket_bytes``: between
        two marks. ``patched``: parts of which only what differs in the image is read."""
        self._patched, self._relaying = patched, relaying
        self._buffer, self._content, self._sources = image.buffer, content, sources
        manifest = content.manifest
        step = range_bytes(manifest.block_bytes, bucket_bytes)
        if relaying is not None:
            step = manifest.block_bytes
        self._total = manifest.total_bytes
        self._turn = threading.Condition()
        self._left = [_ranges(manifest, part, step) for part in range(len(manifest.parts))]
        self._reading = [0] * len(self._left)
        """Threads per part that read a range of it."""
        self._count = sum(map(len, self._left))
        self._arrived = 0
        self._others = frozenset[Open]() if relaying is None else relaying.others
        self._unusable: dict[Open, str] = {}
        """Sources that are opened no more in this transfer, and why."""
        self._running = 0
        self._deadline = 0.0
        self.error = ""
        self.bad_block = -1
        self.verify_s = 0.0
        self.read_bytes = self.relay_bytes = 0
        self.lost: set[Open] = set()

    def run(self, threads: int, timeout_s: float, marks: Sequence[int], moved: Moved) -> None:
        """Fetch within ``timeout_s`` seconds, on ``threads`` threads or one for each part, if that
        is more. ``moved`` is called, on this thread, when as many bytes as each of ``marks``
        (ascending) have arrived. What went wrong is in ``error``.

        TransferFailed if a thread did not end: the image is still written to.
        """
        deadline = self._deadline = time.monotonic() + timeout_s
        workers = [
            threading.Thread(target=self._work, name=f"fetch {i}", daemon=True)
            for i in range(min(max(threads, len(self._left)), self._count))
        ]
        self._running = len(workers)
        for worker in workers:
            worker.start()
        for mark in marks:
            with self._turn:
                self._turn.wait_for(
                    partial(self._settled, mark), max(0.0, deadline - time.monotonic())
                )
                if self._arrived < mark:
                    self.error = self.error or (
                        f"{self._arrived} of {self._total} bytes came within {timeout_s:.1f} s"
                    )
                    break
            moved(mark)
        for worker in workers:
            worker.join(max(1.0, deadline - time.monotonic()))
            if worker.is_alive():
                raise TransferFailed("a range is still being read past the transfer's deadline")

    def _settled(self, mark: int) -> bool:
        """Whether ``mark`` bytes are there, or will not come."""
        return self._arrived >= mark or bool(self.error) or not self._running

    def _work(self) -> None:
        """Thread: one range after the other."""
        readers: dict[Open, RangeReader] = {}
        try:
            while (range_ := self._take()) is not None:
                try:
                    self._range(range_, readers)
                except _RangeLost as lost:
                    self._lost(range_, lost)
                    break
        except Exception as error:  # noqa: BLE001 - top of a thread: the transfer would wait for it
            self._fail(f"fetching broke off: {type(error).__name__}: {error}", -1)
        finally:
            for reader in readers.values():
                reader.close()

    def _take(self) -> _Range | None:
        """The next range, of the part that the fewest threads read: no host's link is idle while
        it has something to send. None: this thread is done. It stays until every range is there,
        for one that another thread gives back."""
        with self._turn:
            self._turn.wait_for(
                lambda: self.error or any(self._left) or self._arrived == self._total,
                max(0.0, self._deadline - time.monotonic()),
            )
            parts = [part for part, ranges in enumerate(self._left) if ranges]
            if not self.error and parts:
                part = min(parts, key=lambda p: (self._reading[p], -len(self._left[p])))
                self._reading[part] += 1
                return self._left[part].popleft()
            self._running -= 1
            self._turn.notify_all()
            return None

    def _lost(self, range_: _Range, lost: _RangeLost) -> None:
        """This thread ends. Another one reads its range: a source that serves many readers may
        accept only some of their connections."""
        with self._turn:
            self._reading[range_.part] -= 1
            if lost.bad_block < 0 and self._running > 1 and not self.error:
                self._left[range_.part].append(range_)
                self._running -= 1
                self._turn.notify_all()
                return
        self._fail(str(lost), lost.bad_block)

    def _range(self, range_: _Range, readers: dict[Open, RangeReader]) -> None:
        """Read and check one range; _RangeLost if no source has it."""
        part, manifest = range_.part, self._content.manifest
        pieces = manifest.parts[part].pieces(range_.start, range_.stop)
        views = [self._buffer[low:high] for low, high in pieces]
        if part in self._patched and self._content.first_bad(self._buffer, range_.blocks) is None:
            self._done(range_)
            return
        reason, bad = "", -1
        for source in [*self._sources.get(part, ())] * ATTEMPTS:
            # a thread that could not connect says nothing of the connections that are there
            if source in self._unusable and (source in self.lost or source not in readers):
                reason = reason or self._unusable[source]
                continue
            try:
                if source not in readers:
                    readers[source] = self._open(part, source)
                readers[source].read_into(range_.start, *views)
            except TransferFailed as error:
                if (reader := readers.pop(source, None)) is not None:
                    reader.close()
                reason, bad = str(error), -1
                self._strike(source, reason)
                continue
            began = time.monotonic()
            wrong = self._content.first_bad(self._buffer, range_.blocks)
            with self._turn:
                self.verify_s += time.monotonic() - began
                self.read_bytes += range_.stop - range_.start
                if source in self._others and wrong is None:
                    self.relay_bytes += range_.stop - range_.start
            if wrong is None:
                self._done(range_)
                return
            bad = wrong
            reason = f"block {bad} of {manifest.num_blocks} differs from what the trainer hashed"
            self._strike(source, reason)
        raise _RangeLost(reason or "the trainer named no source", bad)

    def _strike(self, source: Open, reason: str) -> None:
        """Ask another server that failed no more in this transfer: each try may take its wait."""
        if source in self._others:
            with self._turn:
                self._unusable[source] = reason
                self.lost.add(source)

    def _open(self, part: int, source: Open) -> RangeReader:
        try:
            return source()
        except TransferFailed as error:
            # not opened again in this transfer: each try may take a connection's deadline
            with self._turn:
                if any(s not in self._unusable for s in self._sources[part] if s is not source):
                    self._unusable[source] = str(error)
            raise

    def _done(self, range_: _Range) -> None:
        if self._relaying is not None:
            self._relaying.arrived(range_.part, range_.start, range_.stop)
        with self._turn:
            self._reading[range_.part] -= 1
            self._arrived += range_.stop - range_.start
            self._turn.notify_all()

    def _fail(self, error: str, bad_block: int) -> None:
        with self._turn:
            if not self.error:
                self.error, self.bad_block = error, bad_block
            self._running -= 1
            self._turn.notify_all()


class Sharing:
    """Serves the version that this server has, or is reading, to other servers, block by block as
    they arrive (protocol.relay). One receiver's. Any thread."""

    def __init__(self, host: str, key: Key | None, certificate: Certificate | None = None) -> None:
        """Listen at this host's address ``host``; readers prove ``key``. ConfigError if the address
        cannot be bound."""
        # a reader may come for a version before the order to read it has come here
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
            has = partial(_all_there, there, manifest.block_bytes)
            self._server.grant(image.buffer, fd, self._key, part, ticket=ticket, has=has)

    def arrived(self, part: int, start: int, stop: int) -> None:
        """Bytes ``start`` to ``stop`` of the part's stream, whole blocks, are there and checked."""
        with self._lock:
            for block in range(start // self._block_bytes, -(-stop // self._block_bytes)):
                self._there[part][block] = 1
            ticket = self._tickets[part]
        self._server.arrived(ticket)

    def end(self) -> None:
        """Serve nothing: when it returns, no thread reads the image any more (Grant.revoke). Who
        reads the memfd on this host, or gets pages of it that the kernel had not sent yet, finds by
        its checks that the image is another one's. Idempotent."""
        with self._lock:
            tickets, self._tickets = self._tickets, ()
        for ticket in tickets:
            self._server.revoke(ticket)

    def close(self) -> None:
        """Stop listening. Idempotent."""
        self._server.close()


def _all_there(there: bytearray, block_bytes: int, offset: int, nbytes: int) -> bool:
    """Whether bytes of a part's stream are there."""
    return 0 not in there[offset // block_bytes : -(-(offset + nbytes) // block_bytes)]
