"""A ring of buckets between a lane and an engine that stands still: how a version passes without a
whole image of it.

Byte ``b`` of the version lies at ``b % capacity`` of the ring. The receiver fills bucket after
bucket and checks its blocks; the engine copies tensors out of it and says how far it is, which
makes room for further buckets.
"""

import threading
import time
from collections.abc import Callable, Sequence
from functools import partial

import torch

from titan_grpo.errors import PeerError, TransferFailed
from titan_grpo.layout.digest import digest_block
from titan_grpo.layout.image import SharedImage
from titan_grpo.layout.manifest import Manifest
from titan_grpo.sync.transports.base import Transport

WINDOW_BUCKETS = 4
"""Buckets in a ring: enough for one to be filled and one to be read at any time, with some slack on
both sides."""


def window_bytes(total_bytes: int, bucket_bytes: int) -> int:
    """Size of the ring, whole buckets: ``window_bytes(100, 16) == 64``, ``window_bytes(20, 16) ==
    32``."""
    return min(WINDOW_BUCKETS, -(-total_bytes // bucket_bytes)) * bucket_bytes


class Window:
    """One streamed transfer at the receiver. The lane's thread calls ``fill``, the engine's side
    ``open`` and ``take``."""

    def __init__(self, ring: SharedImage, manifest: Manifest, bucket_bytes: int) -> None:
        """``ring`` has window_bytes(manifest.total_bytes, bucket_bytes) bytes."""
        self._ring, self._manifest, self._bucket = ring, manifest, bucket_bytes
        self._turn = threading.Condition()
        self._opened = False
        self._filled = self._consumed = 0
        self._error = ""
        self.bad_block = -1
        self.receive_s = self.verify_s = 0.0

    def open(self) -> None:
        """The engine stands still and will take."""
        with self._turn:
            self._opened = True
            self._turn.notify_all()

    def take(self, consumed: int, wait_s: float) -> int:
        """Bytes before ``consumed`` are no longer needed; how many from the start may be read now,
        at most a bucket more.

        Waits for a further byte. PeerError if the transfer failed, or none came within ``wait_s``
        seconds.
        """
        with self._turn:
            self._consumed = consumed
            self._turn.notify_all()
            came = self._turn.wait_for(lambda: bool(self._error) or self._filled > consumed, wait_s)
            if self._error:
                raise PeerError(self._error)
            if not came:
                raise PeerError(
                    f"no byte after byte {consumed} of {self._manifest.total_bytes} came before the"
                    " deadline"
                )
            # not all there is: what the engine has read of it becomes room only when it asks again
            return min(self._filled, consumed + self._bucket)

    def fail(self, error: str) -> None:
        """End the transfer: both sides' waits end with ``error``. The first reason counts; none
        after the last byte."""
        with self._turn:
            if self._filled < self._manifest.total_bytes:
                self._error = self._error or error
            self._turn.notify_all()

    def fill(
        self,
        transport: Transport,
        expected: Sequence[bytes],
        algorithm: str,
        timeout_s: float,
        key: bytes | None = None,
    ) -> None:
        """Receive the whole version, once the engine has opened; each part waits at most
        ``timeout_s`` seconds.

        ``algorithm`` and ``key`` are digest_block's.

        TransferFailed if the engine does not come or stops taking, the lane fails, or a block
        differs from ``expected``.
        """
        self._wait(lambda: self._opened, timeout_s, "the engine did not begin to load")
        deadline = time.monotonic() + timeout_s
        tensor, total, capacity = (
            self._ring.tensor(),
            self._manifest.total_bytes,
            self._ring.address.nbytes,
        )
        for start in range(0, total, self._bucket):
            stop = min(start + self._bucket, total)
            room = stop - capacity
            self._wait(
                partial(self._has_consumed, room),
                deadline - time.monotonic(),
                "the engine stopped loading",
            )
            began = time.monotonic()
            at = start % capacity
            transport.broadcast(tensor[at : at + stop - start], max(0.0, deadline - began))
            received = time.monotonic()
            self._verify((start, stop), expected, algorithm, key)
            self.receive_s += received - began
            self.verify_s += time.monotonic() - received
            with self._turn:
                self._filled = stop
                self._turn.notify_all()

    def _verify(
        self, span: tuple[int, int], expected: Sequence[bytes], algorithm: str, key: bytes | None
    ) -> None:
        start, stop = span
        shift = start - start % self._ring.address.nbytes
        buffer = self._ring.buffer
        for index in range(
            start // self._manifest.block_bytes, -(-stop // self._manifest.block_bytes)
        ):
            low, high = self._manifest.block(index)
            if digest_block(buffer[low - shift : high - shift], algorithm, key) != expected[index]:
                self.bad_block = index
                raise TransferFailed(
                    f"block {index} of {self._manifest.num_blocks} differs from what the trainer"
                    " hashed; no byte of its bucket reached the engine"
                )

    def _has_consumed(self, count: int) -> bool:
        return self._consumed >= count

    def _wait(self, ready: Callable[[], bool], wait_s: float, otherwise: str) -> None:
        with self._turn:
            came = self._turn.wait_for(lambda: bool(self._error) or ready(), max(0.0, wait_s))
            if self._error or not came:
                raise TransferFailed(self._error or f"{otherwise} before the deadline")


def copy_out(ring: torch.Tensor, start: int, into: torch.Tensor) -> None:
    """Copy ``len(into)`` bytes of the version from its byte ``start`` on; both uint8, 1-D. Copes
    with the ring's end.

    Worked example: a ring of 8, start 6, 4 bytes -> ring[6:8] and ring[0:2].
    """
    capacity, done = ring.numel(), 0
    while done < into.numel():
        at = (start + done) % capacity
        size = min(into.numel() - done, capacity - at)
        into[done : done + size] = ring[at : at + size]
        done += size
