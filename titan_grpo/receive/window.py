"""Windowed apply: a ring of buckets between a lane and a paused engine, instead of a whole image.

Byte ``b`` of the version is at ``b % capacity`` of the ring. The receiver fills bucket after bucket
and checks its blocks (Window); the engine copies tensors out of it and reports its progress, which
frees room for further buckets (WindowReader).
"""

import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING

import torch

from titan_grpo.errors import PeerError, TransferFailed
from titan_grpo.layout.image import SharedImage
from titan_grpo.layout.manifest import Manifest, TensorSpec
from titan_grpo.receive.fetch import Content
from titan_grpo.sync.transports.broadcast import Transport

if TYPE_CHECKING:
    from titan_grpo.receive.commit import Workers

Tensors = Iterator[tuple[str, torch.Tensor]]

WINDOW_BUCKETS = 4
"""Buckets in a ring: one that is filled, one that is read, and slack on both sides."""


def window_bytes(total_bytes: int, bucket_bytes: int) -> int:
    """Return the size of the ring, whole buckets: ``window_bytes(100, 16) == 64``,
    ``window_bytes(20, 16) == 32``."""
    return min(WINDOW_BUCKETS, -(-total_bytes // bucket_bytes)) * bucket_bytes


class Window:
    """The receiver's end of one transfer. The lane's thread calls ``fill``, the engine's thread
    ``open`` and ``take``."""

    def __init__(self, ring: SharedImage, content: Content, bucket_bytes: int) -> None:
        """``ring`` has window_bytes(total_bytes, bucket_bytes) bytes. ``content``: the version's,
        which has one part: each block is one piece of the ring."""
        self._ring, self._content, self._bucket = ring, content, bucket_bytes
        self._total = content.manifest.total_bytes
        self._turn = threading.Condition()
        self._opened = False
        self._filled = self._consumed = 0
        self._error = ""
        self.bad_block = -1
        self.verify_s = 0.0

    def open(self) -> None:
        """Let ``fill`` begin: the engine is paused and will take."""
        with self._turn:
            self._opened = True
            self._turn.notify_all()

    def take(self, consumed: int, wait_s: float) -> int:
        """Free the bytes before ``consumed`` and wait for more. Return how many bytes, counted from
        the version's start, may be read now: at most a bucket more.

        Raises PeerError if the transfer failed, or no byte came within ``wait_s`` seconds.
        """
        with self._turn:
            self._consumed = consumed
            self._turn.notify_all()
            came = self._turn.wait_for(lambda: bool(self._error) or self._filled > consumed, wait_s)
            if self._error:
                raise PeerError(self._error)
            if not came:
                raise PeerError(
                    f"no byte after byte {consumed} of {self._total} came before the deadline"
                )
            # One bucket at most: its room is freed only by the next call.
            return min(self._filled, consumed + self._bucket)

    def fail(self, error: str) -> None:
        """End the transfer: both sides' waits fail with the first ``error``. No effect after the
        last byte."""
        with self._turn:
            if self._filled < self._total:
                self._error = self._error or error
            self._turn.notify_all()

    def fill(self, transport: Transport, timeout_s: float) -> None:
        """Wait until the engine has opened the window, then receive the whole version; each of the
        two takes at most ``timeout_s`` seconds.

        Raises TransferFailed if the engine does not open or stops taking, the lane fails, or a
        block differs.
        """
        self._wait(lambda: self._opened, timeout_s, "the engine did not begin to load")
        deadline = time.monotonic() + timeout_s
        ring, total = self._ring.tensor(), self._total
        for start in range(0, total, self._bucket):
            stop = min(start + self._bucket, total)
            left = deadline - time.monotonic()
            room_made = partial(self._has_consumed, stop - ring.numel())
            self._wait(room_made, left, "the engine stopped loading")
            at, left = start % ring.numel(), deadline - time.monotonic()
            transport.broadcast(ring[at : at + stop - start], max(0.0, left))
            received = time.monotonic()
            self._verify(start, stop)
            self.verify_s += time.monotonic() - received
            with self._turn:
                self._filled = stop
                self._turn.notify_all()

    def _verify(self, start: int, stop: int) -> None:
        each = self._content.manifest.block_bytes
        blocks = range(start // each, -(-stop // each))
        buffer = self._ring.buffer
        bad = self._content.first_bad(buffer, blocks, start - start % buffer.nbytes)
        if bad is not None:
            self.bad_block = bad
            raise TransferFailed(
                f"{self._content.differs(bad)}; no byte of its bucket reached the engine"
            )

    def _has_consumed(self, count: int) -> bool:
        return self._consumed >= count

    def _wait(self, ready: Callable[[], bool], wait_s: float, otherwise: str) -> None:
        with self._turn:
            came = self._turn.wait_for(lambda: bool(self._error) or ready(), max(0.0, wait_s))
            if self._error or not came:
                raise TransferFailed(self._error or f"{otherwise} before the deadline")


class WindowReader:
    """The engine's end of one transfer. All workers of an engine read in lockstep."""

    def __init__(
        self,
        ring: torch.Tensor,
        manifest: Manifest,
        workers: "Workers",
        take: Callable[[int], int],
    ) -> None:
        """``ring``: uint8[window bytes], filled by the receiver. ``take``: Window.take with its
        ``wait_s`` bound, called on rank 0 only."""
        self._ring, self._manifest, self._workers, self._take = ring, manifest, workers, take
        self._filled = 0
        self.broken = ""

    def begun(self) -> Tensors:
        """Wait for the first tensor, then return ``tensors()``: if none arrives, the caller has not
        begun to change weights."""
        tensors = self.tensors()
        return chain([next(tensors)], tensors)

    def tensors(self) -> Tensors:
        """Yield (HF name, tensor), each after its last block's check; end after that of the whole
        version.

        Tensors are copies: engines keep a layer's tensors until the layer is complete, and the ring
        is overwritten. Raises TransferFailed on every worker if the transfer or a worker failed;
        ``broken`` is then the reason.
        """
        for spec in self._manifest.tensors:
            yield spec.name, self._tensor(spec)
        while self._filled < self._manifest.total_bytes:
            self._advance()

    def _tensor(self, spec: TensorSpec) -> torch.Tensor:
        flat = torch.empty(spec.nbytes, dtype=torch.uint8)
        done = 0
        while done < spec.nbytes:
            start = spec.offset + done
            if self._filled <= start:
                self._advance()
                continue
            at = start % self._ring.numel()
            size = min(self._filled - start, spec.nbytes - done, self._ring.numel() - at)
            flat[done : done + size] = self._ring[at : at + size]
            done += size
        return flat.view(getattr(torch, spec.dtype)).view(spec.shape)

    def _advance(self) -> None:
        """Free all bytes so far (they have been read) and wait for more. All workers call it at the
        same byte."""
        # Gather first: it pairs with the final gather of a worker whose load failed.
        failed = [why for why in self._workers.gather("") if why]
        if not failed:
            self._filled, why = self._workers.share(self._request())
            failed = [why] if why else []
        if failed:
            self.broken = failed[0]
            raise TransferFailed(self.broken)

    def _request(self) -> tuple[int, str]:
        if self._workers.rank != 0:
            return 0, ""
        try:
            return self._take(self._filled), ""
        except Exception as error:  # noqa: BLE001 - the other workers wait for what this one shares
            return self._filled, f"{type(error).__name__}: {error}"
