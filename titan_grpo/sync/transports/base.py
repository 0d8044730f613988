"""The data plane of a lane: a broadcast from rank 0 with a deadline and an abort."""

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from titan_grpo.errors import TransferFailed

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class TransportOptions:
    """How a transport is opened. ``timeout_s``: of opening and of one transfer; ``bucket_bytes``:
    of one broadcast."""

    timeout_s: float
    bind_host: str
    bucket_bytes: int
    device: str = "cpu"


class Transport(ABC):
    """One communicator with rank 0 as the only sender. Used by one thread; ``abort`` may come from
    any other."""

    @abstractmethod
    def broadcast(self, view: "torch.Tensor", timeout_s: float) -> None:
        """Send (rank 0) or fill (others) ``view``: uint8, 1-D, contiguous, on the host; as long on
        every rank.

        Returns when this rank's part is done. Raises TransferFailed when the peer is gone,
        ``timeout_s`` passed or the transport was aborted; it is then of no further use.
        """

    @abstractmethod
    def abort(self) -> None:
        """Make a broadcast in progress, and every later one, raise TransferFailed at once. Any
        thread; idempotent."""

    @abstractmethod
    def close(self) -> None:
        """Free sockets and buffers without blocking on the peer. Idempotent."""


def broadcast_image(
    transport: Transport,
    image: "torch.Tensor",
    bucket_bytes: int,
    timeout_s: float,
    moved: Callable[[int], object] | None = None,
) -> float:
    """Broadcast a whole image (uint8[nbytes]) in buckets under one deadline; the seconds it took.

    ``image`` of 10 bytes with 4-byte buckets goes as [0:4], [4:8], [8:10] on every rank. ``moved``
    is called after each of them with the number of bytes that are through; it must not block.
    """
    start = time.monotonic()
    for offset in range(0, image.numel(), bucket_bytes):
        left = start + timeout_s - time.monotonic()
        if left <= 0:
            raise TransferFailed(
                f"a transfer must end within {timeout_s} s, {offset} of {image.numel()} bytes had"
                " moved by then; raise weight_sync.lane_deadline_s if the network is that slow"
            )
        transport.broadcast(image[offset : offset + bucket_bytes], left)
        if moved is not None:
            moved(min(offset + bucket_bytes, image.numel()))
    return time.monotonic() - start


class Completion:
    """A flag that one thread waits for with a deadline and that is set by the operation's end, or
    by an abort."""

    def __init__(self) -> None:
        self._event = threading.Event()
        self.aborted = False

    def done(self) -> None:
        """The operation ended, well or badly."""
        self._event.set()

    def abort(self) -> None:
        """Wake the waiter without waiting for the operation."""
        self.aborted = True
        self._event.set()

    def wait(self, timeout_s: float) -> bool:
        """True if set within ``timeout_s`` seconds."""
        return self._event.wait(timeout_s)
