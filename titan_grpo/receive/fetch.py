"""Fetch a whole version in ranges, in parallel, from the sources that have it; each block is
checked on arrival.

Each trainer host has a part of the version (layout.parts), and the parts are read at the same time.
A range that is lost, or that holds a block with another digest, is read again, from the next source
first. No source is trusted: what passes is what the trainer hashed.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from titan_grpo.errors import TransferFailed
from titan_grpo.layout.digest import digest_block
from titan_grpo.layout.image import SharedImage
from titan_grpo.layout.manifest import Manifest
from titan_grpo.sync.transports.ranges import RangeReader

RANGE_BYTES = 4 << 20
"""Bytes of one request, rounded to whole blocks: small enough to stay in a core's cache between
the copy and the check."""

ATTEMPTS = 2
"""How often each source is asked for a range before the range is given up."""

Open = Callable[[], RangeReader]
"""Opens a reader of one source; TransferFailed if the source cannot be reached."""

Moved = Callable[[int], object]
"""Called with the number of bytes that are there and checked, wherever in the image they are."""


@dataclass(frozen=True, slots=True)
class Content:
    """What the image must hold: ``digests`` of the manifest's blocks, and how they are hashed (see
    layout.digest)."""

    manifest: Manifest
    digests: Sequence[bytes]
    algorithm: str
    key: bytes | None

    def first_bad(self, image: memoryview, blocks: range) -> int | None:
        """The first of these blocks of ``image`` that differs; None if none does."""
        for index in blocks:
            pieces = [image[a:b] for a, b in self.manifest.block(index)]
            if digest_block(pieces, self.algorithm, self.key) != self.digests[index]:
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
        patched: bool = False,
        relaying: Relaying | None = None,
    ) -> None:
        """``sources`` of each part, in the order in which they are asked. ``bucket_bytes``: between
        two marks. ``patched``: only what differs in the image is read."""
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
        self._unusable: dict[tuple[int, int], str] = {}
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
                    lambda mark=mark: self._arrived >= mark or self.error or not self._running,  # type: ignore[misc]
                    max(0.0, deadline - time.monotonic()),
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

    def _work(self) -> None:
        """Thread: one range after the other."""
        readers: dict[tuple[int, int], RangeReader] = {}
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

    def _range(self, range_: _Range, readers: dict[tuple[int, int], RangeReader]) -> None:
        """Read and check one range; _RangeLost if no source has it."""
        part, manifest = range_.part, self._content.manifest
        pieces = manifest.parts[part].pieces(range_.start, range_.stop)
        views = [self._buffer[low:high] for low, high in pieces]
        if self._patched and self._content.first_bad(self._buffer, range_.blocks) is None:
            self._done(range_)
            return
        reason, bad = "", -1
        for number in list(range(len(self._sources.get(part, ())))) * ATTEMPTS:
            source = part, number
            other = self._other(source)
            if source in self._unusable:
                reason = reason or self._unusable[source]
                continue
            try:
                if source not in readers:
                    readers[source] = self._open(source)
                readers[source].read_into(range_.start, *views)
            except TransferFailed as error:
                if (reader := readers.pop(source, None)) is not None:
                    reader.close()
                reason = str(error)
                self._strike(source, reason)
                continue
            began = time.monotonic()
            wrong = self._content.first_bad(self._buffer, range_.blocks)
            with self._turn:
                self.verify_s += time.monotonic() - began
                self.read_bytes += range_.stop - range_.start
                if other is not None and wrong is None:
                    self.relay_bytes += range_.stop - range_.start
            if wrong is None:
                self._done(range_)
                return
            bad = wrong
            reason = f"block {bad} of {manifest.num_blocks} differs from what the trainer hashed"
            self._strike(source, reason)
        raise _RangeLost(reason or "the trainer named no source", bad)

    def _other(self, source: tuple[int, int]) -> Open | None:
        """The source, if it is another server."""
        part, number = source
        opens = self._sources[part][number]
        return opens if self._relaying is not None and opens in self._relaying.others else None

    def _strike(self, source: tuple[int, int], reason: str) -> None:
        """Ask another server that failed no more in this transfer: each try may take its wait."""
        if (other := self._other(source)) is not None:
            with self._turn:
                self._unusable[source] = reason
                self.lost.add(other)

    def _open(self, source: tuple[int, int]) -> RangeReader:
        part, number = source
        try:
            return self._sources[part][number]()
        except TransferFailed as error:
            # not asked again in this transfer: each try may take a connection's deadline
            with self._turn:
                unusable = sum(of == part for of, _ in self._unusable)
                if unusable + 1 < len(self._sources[part]):
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
