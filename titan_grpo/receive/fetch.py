"""Fetch a whole version in ranges, in parallel, from the sources that have it; each block is
checked on arrival.

A range that is lost, or that holds a block with another digest, is read again, from the next source
first. No source is trusted: what passes is what the trainer hashed.
"""

import threading
import time
from collections.abc import Callable, Sequence
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
"""Called with the number of bytes that are there and checked from the image's start."""


@dataclass(frozen=True, slots=True)
class Content:
    """What the image must hold: ``digests`` of the manifest's blocks, and how they are hashed (see
    layout.digest)."""

    manifest: Manifest
    digests: Sequence[bytes]
    algorithm: str
    key: bytes | None

    def first_bad(self, image: memoryview, start: int, stop: int) -> int | None:
        """The first block in ``[start, stop)`` of ``image`` that differs; None if none does. Both
        ends lie on the borders of blocks."""
        size = self.manifest.block_bytes
        for index in range(start // size, -(-stop // size)):
            low, high = self.manifest.block(index)
            if digest_block(image[low:high], self.algorithm, self.key) != self.digests[index]:
                return index
        return None


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
    differed, or -1) and ``verify_s`` (seconds of checks, summed over the threads).
    """

    def __init__(
        self, image: SharedImage, content: Content, sources: Sequence[Open], bucket_bytes: int
    ) -> None:
        """``sources`` in the order in which they are asked. ``bucket_bytes``: between two marks."""
        self._buffer, self._content, self._sources = image.buffer, content, sources
        manifest = content.manifest
        self._step = range_bytes(manifest.block_bytes, bucket_bytes)
        self._total = manifest.total_bytes
        self._turn = threading.Condition()
        self._next = 0
        self._count = -(-self._total // self._step)
        self._arrived = [False] * self._count
        self._prefix = 0
        self._unusable: dict[int, str] = {}
        self._running = 0
        self._deadline = 0.0
        self._returned: list[int] = []
        self.error = ""
        self.bad_block = -1
        self.verify_s = 0.0

    def run(self, threads: int, timeout_s: float, marks: Sequence[int], moved: Moved) -> None:
        """Fetch on ``threads`` threads within ``timeout_s`` seconds. ``moved`` is called, on this
        thread, when the prefix has reached each of ``marks`` (bytes, ascending). What went wrong
        is in ``error``.

        TransferFailed if a thread did not end: the image is still written to.
        """
        deadline = self._deadline = time.monotonic() + timeout_s
        workers = [
            threading.Thread(target=self._work, name=f"fetch {i}", daemon=True)
            for i in range(min(threads, self._count))
        ]
        self._running = len(workers)
        for worker in workers:
            worker.start()
        for mark in marks:
            with self._turn:
                self._turn.wait_for(
                    lambda mark=mark: self._bytes() >= mark or self.error or not self._running,  # type: ignore[misc]
                    max(0.0, deadline - time.monotonic()),
                )
                if self._bytes() < mark:
                    self.error = self.error or (
                        f"{self._bytes()} of {self._total} bytes came within {timeout_s:.1f} s"
                    )
                    break
            moved(mark)
        for worker in workers:
            worker.join(max(1.0, deadline - time.monotonic()))
            if worker.is_alive():
                raise TransferFailed("a range is still being read past the transfer's deadline")

    def _bytes(self) -> int:
        return min(self._prefix * self._step, self._total)

    def _work(self) -> None:
        """Thread: one range after the other."""
        readers: dict[int, RangeReader] = {}
        try:
            while (index := self._take()) is not None:
                try:
                    self._range(index, readers)
                except _RangeLost as lost:
                    self._lost(index, lost)
                    break
        except Exception as error:  # noqa: BLE001 - top of a thread: the transfer would wait for it
            self._fail(f"fetching broke off: {type(error).__name__}: {error}", -1)
        finally:
            for reader in readers.values():
                reader.close()

    def _take(self) -> int | None:
        """The next range; None: this thread is done. It stays until every range is there, for one
        that another thread gives back."""
        with self._turn:
            self._turn.wait_for(
                lambda: self.error or self._returned or self._next < self._count or self._whole(),
                max(0.0, self._deadline - time.monotonic()),
            )
            if not self.error and self._returned:
                return self._returned.pop()
            if not self.error and self._next < self._count:
                self._next += 1
                return self._next - 1
            self._running -= 1
            self._turn.notify_all()
            return None

    def _whole(self) -> bool:
        return self._prefix == self._count

    def _lost(self, index: int, lost: _RangeLost) -> None:
        """This thread ends. Another one reads its range: a source that serves many readers may
        accept only some of their connections."""
        with self._turn:
            if lost.bad_block < 0 and self._running > 1 and not self.error:
                self._returned.append(index)
                self._running -= 1
                self._turn.notify_all()
                return
        self._fail(str(lost), lost.bad_block)

    def _range(self, index: int, readers: dict[int, RangeReader]) -> None:
        """Read and check one range; _RangeLost if no source has it."""
        start, stop = index * self._step, min((index + 1) * self._step, self._total)
        view, reason, bad = self._buffer[start:stop], "", -1
        for source in list(range(len(self._sources))) * ATTEMPTS:
            if source in self._unusable:
                reason = reason or self._unusable[source]
                continue
            try:
                if source not in readers:
                    readers[source] = self._open(source)
                readers[source].read_into(start, view)
            except TransferFailed as error:
                if (reader := readers.pop(source, None)) is not None:
                    reader.close()
                reason = str(error)
                continue
            began = time.monotonic()
            wrong = self._content.first_bad(self._buffer, start, stop)
            with self._turn:
                self.verify_s += time.monotonic() - began
            if wrong is None:
                self._done(index)
                return
            bad = wrong
            reason = (
                f"block {bad} of {self._content.manifest.num_blocks} differs from what the trainer"
                " hashed"
            )
        raise _RangeLost(reason or "the trainer named no source", bad)

    def _open(self, source: int) -> RangeReader:
        try:
            return self._sources[source]()
        except TransferFailed as error:
            # not asked again in this transfer: each try may take a connection's deadline
            with self._turn:
                if len(self._unusable) + 1 < len(self._sources):
                    self._unusable[source] = str(error)
            raise

    def _done(self, index: int) -> None:
        with self._turn:
            self._arrived[index] = True
            while self._prefix < self._count and self._arrived[self._prefix]:
                self._prefix += 1
            self._turn.notify_all()

    def _fail(self, error: str, bad_block: int) -> None:
        with self._turn:
            if not self.error:
                self.error, self.bad_block = error, bad_block
            self._running -= 1
            self._turn.notify_all()
