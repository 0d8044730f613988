"""Fetch a version in ranges, in parallel, check each block on arrival, and serve the blocks to
other servers.

Each trainer host has a part of the version; the parts are read at the same time. No source is
trusted: a block passes only with the digest that the trainer made. A range that is lost or fails
the check is read again, from the next source first. Processes of one user on one host read the
memfd itself: the trainer's (MemfdReader), or another server's (BesideReader).
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

RELAY_HOST = "TITAN_GRPO_RELAY_HOST"
"""Environment variable of a server: see receiver.Place.host."""

NOWHERE = "none"
"""Value of it."""

ATTEMPTS = 2
"""Attempts per source at a range, before this thread gives it up."""


class RangeReader(Protocol):
    """Reader of one part of an image from one source, for one thread."""

    def read_into(self, offset: int, *views: memoryview) -> None:
        """Fill ``views`` (uint8), one after the other, with the part's bytes from ``offset``.
        Raises TransferFailed if the source is gone or too slow."""
        ...

    def close(self) -> None:
        """Close the connection or memfd. Idempotent."""
        ...


class MemfdReader:
    """Reader of another process's memfd on this host: one copy by the kernel, without a socket."""

    def __init__(self, memfd: dict[str, int], part: Part) -> None:
        """``part``: the part to read. Raises TransferFailed if the process is not on this host, of
        another user, or gone."""
        self._fd, self._part = -1, part
        try:
            self._fd = open_memfd(ImageAddress.from_json(memfd), os.O_RDONLY)
        except (SyncError, TypeError) as error:
            raise TransferFailed(str(error)) from error

    def read_into(self, offset: int, *views: memoryview) -> None:
        for view in views:
            stop, done = offset + view.nbytes, 0
            for low, high in self._part.pieces(offset, stop):
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
    """Reader over one TCP connection."""

    def __init__(
        self,
        source: RangeSource,
        key: Key | None,
        timeout_s: float,
        until: Callable[[], float] = lambda: math.inf,
    ) -> None:
        """Connect and exchange proofs. ``timeout_s``: seconds for that, and to wait for the next
        byte. ``until``: returns when it, or a range that is asked for now, must be complete
        (Patience). Raises TransferFailed if the source is silent or lacks the key."""
        self._until = until
        self._name = f"source at {source.host}:{source.port}"
        at, within_s = (source.host, source.port), min(timeout_s, until() - time.monotonic())
        self._socket = connect(at, source.ticket, key, within_s, "source", source.pin)
        self._socket.settimeout(timeout_s)

    def read_into(self, offset: int, *views: memoryview) -> None:
        nbytes, until = sum(view.nbytes for view in views), self._until()
        send_all(self._socket, RANGE.pack(offset, nbytes), self._name)
        for view in views:
            fill(self._socket, view, self._name, until)

    def address(self, offset: int, nbytes: int) -> dict[str, int]:
        """Return the image's address on the source's host, once the source has these bytes. Raises
        TransferFailed as ``read_into`` does."""
        send_all(self._socket, RANGE.pack(offset, nbytes | ADDRESS_ONLY), self._name)
        answer = bytearray(ADDRESS.size)
        fill(self._socket, memoryview(answer), self._name, self._until())
        return ImageAddress(*ADDRESS.unpack(answer)).to_json()

    def close(self) -> None:
        self._socket.close()


class BesideReader:
    """Reader of another server on this host: request each range over TCP, and read the bytes from
    its memfd, or over TCP if the kernel refuses that (in separate containers)."""

    def __init__(
        self,
        source: RangeSource,
        key: Key | None,
        timeout_s: float,
        until: Callable[[], float],
        part: Part,
    ) -> None:
        """See TcpReader. ``part``: the source's."""
        self._tcp, self._part = TcpReader(source, key, timeout_s, until), part
        self._memfd: MemfdReader | None = None
        self._apart = False

    def read_into(self, offset: int, *views: memoryview) -> None:
        """See RangeReader. The server may overwrite its image meanwhile: check the blocks."""
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
"""Opens a reader of one source. Raises TransferFailed if the source cannot be reached."""

Moved = Callable[[int], object]
"""Callback with the number of bytes that have arrived and passed, anywhere in the image."""


@dataclass(frozen=True, slots=True)
class Content:
    """Expected content of the image: ``digests`` of the manifest's blocks."""

    manifest: Manifest
    digests: Sequence[bytes]
    hashing: Hashing

    def first_bad(self, image: memoryview, blocks: range, start: int = 0) -> int | None:
        """Return the first of these blocks that differs, or None. ``image``: the version's bytes
        from byte ``start`` on."""
        for index in blocks:
            pieces = [image[a - start : b - start] for a, b in self.manifest.block(index)]
            if self.hashing.block(pieces) != self.digests[index]:
                return index
        return None

    def differs(self, block: int) -> str:
        """Return the error of a block that differs."""
        return f"block {block} of {self.manifest.num_blocks} differs from what the trainer hashed"


class Patience:
    """How long a transfer waits for other servers: until it is ``wait_s`` later than at
    ``min_rate`` since its last mark. All its waits share that time, whatever their number.

    With ``due_s``, when the bytes since the last mark would have come at ``min_rate``, a wait ends
    at ``due_s + wait_s``. So none ends more than ``wait_s`` plus the time of these bytes after the
    mark, and the trainer has the rest of the lane's progress deadline for the other bytes.
    """

    def __init__(self, wait_s: float, min_rate: float) -> None:
        """The transfer begins now. ``min_rate``: bytes per second."""
        self._wait_s, self._min_rate = wait_s, min_rate
        self._due_s = time.monotonic()
        """Never later than now: bytes that came early do not lengthen a later wait."""

    def came(self, nbytes: int, marked: bool) -> None:
        """Note bytes that have arrived, from any source. ``marked``: they reach a mark. One thread
        at a time."""
        now = time.monotonic()
        self._due_s = now if marked else min(now, self._due_s + nbytes / self._min_rate)

    def until(self) -> float:
        """Return when a wait that begins now must end (monotonic clock)."""
        return self._due_s + self._wait_s

    def short(self) -> bool:
        """Whether less than half of the time is left. A server that is asked then could be taken
        for a late one."""
        return self.until() - time.monotonic() < self._wait_s / 2


@dataclass(frozen=True, slots=True)
class Relaying:
    """Options of a fetch among servers that read from each other: each serves a block as soon as it
    has it. ``others``: the sources that are servers; they get one attempt. ``arrived``: callback
    with part, start and stop of each range that has arrived and passed. ``patience``: that of the
    readers of ``others``."""

    others: frozenset[Open]
    arrived: Callable[[int, int, int], object]
    patience: Patience


@dataclass(frozen=True, slots=True)
class _Range:
    """Whole blocks of one part. ``start`` and ``stop`` count bytes of the part's stream."""

    part: int
    start: int
    stop: int
    blocks: range


def _ranges(manifest: Manifest, part: int, nbytes: int) -> deque[_Range]:
    """Split a part into ranges of ``nbytes``, a multiple of the block size."""
    blocks, end = manifest.blocks(part), manifest.parts[part].nbytes
    each = nbytes // manifest.block_bytes
    return deque(
        _Range(part, i * nbytes, min((i + 1) * nbytes, end), blocks[i * each : (i + 1) * each])
        for i in range(-(-end // nbytes))
    )


def range_bytes(block_bytes: int, mark_bytes: int) -> int:
    """Return the bytes of one range: whole blocks, at most RANGE_BYTES (or one block). Between two
    marks are whole ranges, so that a mark is reached as soon as its bytes have arrived.

    >>> range_bytes(1 << 20, 64 << 20) >> 20, range_bytes(1 << 20, 10 << 20) >> 20
    (4, 2)
    """
    blocks = max(1, RANGE_BYTES // block_bytes)
    while mark_bytes // block_bytes % blocks:
        blocks -= 1
    return blocks * block_bytes


class _RangeLost(TransferFailed):
    """Failure of all sources of a range. ``bad_block``: the block that differed last, or -1."""

    def __init__(self, reason: str, bad_block: int) -> None:
        super().__init__(reason)
        self.bad_block = bad_block


class Fetch:
    """One transfer into an image; ``run`` it once.

    Results: ``error`` (empty if every block has arrived and passed), ``bad_block`` (the block that
    differed, or -1), ``verify_s`` (seconds of checks, summed over the threads), ``read_bytes``, of
    these ``relay_bytes`` from other servers, and ``lost``, the other servers that failed.
    """

    def __init__(
        self,
        image: SharedImage,
        content: Content,
        sources: Mapping[int, Sequence[Open]],
        mark_bytes: int,
        patched: Collection[int] = (),
        relaying: Relaying | None = None,
    ) -> None:
        """``sources``: of each part, in order of preference. ``mark_bytes``: between two marks.
        ``patched``: parts that were patched: read only ranges whose blocks differ."""
        self._patched, self._relaying = patched, relaying
        self._buffer, self._content, self._sources = image.buffer, content, sources
        manifest = content.manifest
        step = range_bytes(manifest.block_bytes, mark_bytes)
        if relaying is not None:
            step = manifest.block_bytes
        self._total, self._mark_bytes = manifest.total_bytes, mark_bytes
        self._turn = threading.Condition()
        self._left = [_ranges(manifest, part, step) for part in range(len(manifest.parts))]
        self._reading = [0] * len(self._left)
        """Number of threads whose last range was of each part, those that wait excluded."""
        self._count = sum(map(len, self._left))
        self._arrived = 0
        self._others = frozenset[Open]() if relaying is None else relaying.others
        self._unusable: dict[Open, str] = {}
        """Sources not to be opened again in this transfer, and why."""
        self._running = 0
        self._deadline = 0.0
        self.error = ""
        self.bad_block = -1
        self.verify_s = 0.0
        self.read_bytes = self.relay_bytes = 0
        self.lost: set[Open] = set()

    def run(self, threads: int, timeout_s: float, marks: Sequence[int], moved: Moved) -> None:
        """Fetch within ``timeout_s`` seconds, on ``threads`` threads or one per part if that is
        more. Call ``moved`` on this thread with each of ``marks`` (bytes, ascending) that is
        reached. A failure is in ``error``.

        Raises TransferFailed if a thread did not end: it still writes to the image.
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
                    partial(self._reached, mark), max(0.0, deadline - time.monotonic())
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

    def _reached(self, mark: int) -> bool:
        """Whether ``mark`` bytes have arrived, or will not."""
        return self._arrived >= mark or bool(self.error) or not self._running

    def _work(self) -> None:
        """Fetch one range after the other (a thread's main function)."""
        readers: dict[Open, RangeReader] = {}
        last = None
        try:
            while (range_ := self._take(last)) is not None:
                last = range_.part
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

    def _take(self, last: int | None) -> _Range | None:
        """Return the next range, of the part with the fewest readers: no host's link is idle while
        its part has ranges left. ``last``: the part of this thread's last range, which it prefers:
        each other part costs a connection. None: this thread is done."""
        with self._turn:
            # Not when the range is done: a part would seem to have no reader between two ranges, so
            # threads would change parts until each had connections to all of them.
            if last is not None:
                self._reading[last] -= 1
            # Wait until all has arrived: another thread may give its range back.
            self._turn.wait_for(
                lambda: self.error or any(self._left) or self._arrived == self._total,
                max(0.0, self._deadline - time.monotonic()),
            )
            parts = [part for part, ranges in enumerate(self._left) if ranges]
            if not self.error and parts:
                part = min(parts, key=lambda p: (self._reading[p], p != last, -len(self._left[p])))
                self._reading[part] += 1
                return self._left[part].popleft()
            self._running -= 1
            self._turn.notify_all()
            return None

    def _lost(self, range_: _Range, lost: _RangeLost) -> None:
        """Give the range back to the other threads: a busy source may have accepted only some of
        the connections. Fail the transfer if this thread is the last or a block differed."""
        with self._turn:
            self._reading[range_.part] -= 1
            if lost.bad_block < 0 and self._running > 1 and not self.error:
                self._left[range_.part].append(range_)
                self._running -= 1
                self._turn.notify_all()
                return
        self._fail(str(lost), lost.bad_block)

    def _range(self, range_: _Range, readers: dict[Open, RangeReader]) -> None:
        """Read and check one range. Raises _RangeLost if all sources fail."""
        part, manifest = range_.part, self._content.manifest
        pieces = manifest.parts[part].pieces(range_.start, range_.stop)
        views = [self._buffer[low:high] for low, high in pieces]
        if part in self._patched and self._first_bad(range_) is None:
            self._done(range_)
            return
        reason, bad = "", -1
        for source in [*self._sources.get(part, ())] * ATTEMPTS:
            # The trainer's: one thread could not connect; connections that are open still serve.
            if source in self._unusable and (source in self._others or source not in readers):
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
            wrong = self._first_bad(range_)
            with self._turn:
                self.read_bytes += range_.stop - range_.start
                if source in self._others and wrong is None:
                    self.relay_bytes += range_.stop - range_.start
            if wrong is None:
                self._done(range_)
                return
            bad = wrong
            reason = self._content.differs(bad)
            self._strike(source, reason)
        raise _RangeLost(reason or "the trainer named no source", bad)

    def _first_bad(self, range_: _Range) -> int | None:
        """Check a range; return the first of its blocks that differs, or None."""
        began = time.monotonic()
        wrong = self._content.first_bad(self._buffer, range_.blocks)
        with self._turn:
            self.verify_s += time.monotonic() - began
        return wrong

    def _strike(self, source: Open, reason: str) -> None:
        """Exclude another server that failed from this transfer: each retry could time out. If
        waiting has used up the time for other servers, exclude them all."""
        if self._relaying is not None and source in self._others:
            with self._turn:
                self.lost.add(source)
                failed = self._others if self._relaying.patience.short() else (source,)
                self._unusable.update(dict.fromkeys(failed, reason))

    def _open(self, part: int, source: Open) -> RangeReader:
        try:
            return source()
        except TransferFailed as error:
            # Do not open it again while the part has another source: each try could time out.
            with self._turn:
                if any(s not in self._unusable for s in self._sources[part] if s is not source):
                    self._unusable[source] = str(error)
            raise

    def _done(self, range_: _Range) -> None:
        if self._relaying is not None:
            self._relaying.arrived(range_.part, range_.start, range_.stop)
        with self._turn:
            before, self._arrived = self._arrived, self._arrived + range_.stop - range_.start
            if self._relaying is not None:
                marked = before // self._mark_bytes < self._arrived // self._mark_bytes
                self._relaying.patience.came(range_.stop - range_.start, marked)
            self._turn.notify_all()

    def _fail(self, error: str, bad_block: int) -> None:
        with self._turn:
            if not self.error:
                self.error, self.bad_block = error, bad_block
            self._running -= 1
            self._turn.notify_all()


class Sharing:
    """Server of this receiver's version to other servers, block by block as they arrive
    (protocol.relay). For any thread."""

    def __init__(self, host: str, key: Key | None, certificate: Certificate | None = None) -> None:
        """Listen at this host's address ``host``; readers prove ``key``. Raises ConfigError if the
        address cannot be bound."""
        # A reader may ask for a version before this receiver has the order to fetch it.
        self._server, self._key = RangeServer(expects=True, certificate=certificate), key
        self.host, self.port = host, self._server.listen(host)
        self._lock = threading.Lock()
        self._tickets: Sequence[str] = ()
        self._there: list[bytearray] = []
        """Per part, 1 for each block that has arrived and passed."""
        self._block_bytes = 1

    def begin(self, image: SharedImage, manifest: Manifest, tickets: Sequence[str]) -> None:
        """Start serving each part under its ticket, as yet without blocks."""
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
        """Serve bytes ``start`` to ``stop`` of the part's stream too: whole blocks, checked."""
        with self._lock:
            for block in range(start // self._block_bytes, -(-stop // self._block_bytes)):
                self._there[part][block] = 1
            ticket = self._tickets[part]
        self._server.arrived(ticket)

    def end(self) -> None:
        """Stop serving: after it no thread here reads the image (Grant.revoke). Readers of the
        memfd, or of pages that the kernel has yet to send, may get newer bytes; their checks find
        it. Idempotent."""
        with self._lock:
            tickets, self._tickets = self._tickets, ()
        for ticket in tickets:
            self._server.revoke(ticket)


def _all_there(there: bytearray, block_bytes: int, offset: int, nbytes: int) -> bool:
    """Whether these bytes of a part's stream have arrived."""
    return 0 not in there[offset // block_bytes : -(-(offset + nbytes) // block_bytes)]
