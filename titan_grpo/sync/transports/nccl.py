"""Broadcast between GPUs with NCCL, through one device bucket on each side. Written from the API;
not run yet.

The image stays on the host: sender copies host -> bucket -> NCCL, receiver NCCL -> bucket -> host,
in the order of one stream of low priority with few CTAs, so that training kernels keep the device.
"""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

from titan_grpo.errors import TransferFailed
from titan_grpo.sync.transports.base import Transport, TransportOptions

MAX_CTAS = 4
"""Thread blocks that NCCL may use: a lane competes with training for the device, and a network
needs no more."""

WATCHDOG_FACTOR = 10
"""NCCL's watchdog gets this many times our deadline: it ends the process, our own timer only ends
the lane."""

ERROR_HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"


@contextmanager
def watchdog_does_not_end_the_process() -> Iterator[None]:
    """Within it, a new process group takes "0" for its error handling: a dead server must not end
    the trainer.

    The variable is read by the group's constructor; it is put back for the training groups that may
    come later.
    """
    before = os.environ.get(ERROR_HANDLING)
    os.environ[ERROR_HANDLING] = "0"
    try:
        yield
    finally:
        if before is None:
            del os.environ[ERROR_HANDLING]
        else:
            os.environ[ERROR_HANDLING] = before


class NcclTransport(Transport):
    """A ProcessGroupNCCL of its own, outside torch.distributed's registry, on a stream of its
    own."""

    def __init__(self, store: dist.Store, rank: int, size: int, options: TransportOptions) -> None:
        """Connect all ranks; TransferFailed if one is missing past the deadline.
        ``options.device``: "cuda" or "cuda:N"."""
        name = options.device if options.device.startswith("cuda") else "cuda"
        self._device = (
            torch.device(name) if ":" in name else torch.device("cuda", torch.cuda.current_device())
        )
        self._rank = rank
        self._lock = threading.Lock()
        self._aborted = False
        nccl = dist.ProcessGroupNCCL.Options(is_high_priority_stream=False)
        nccl._timeout = timedelta(seconds=options.timeout_s * WATCHDOG_FACTOR)
        nccl.config.min_ctas = 1
        nccl.config.max_ctas = MAX_CTAS
        with watchdog_does_not_end_the_process():
            group = dist.ProcessGroupNCCL(store, rank, size, nccl)
        self._group: dist.ProcessGroupNCCL | None = group
        # low priority: the least of the device's range
        self._stream = torch.cuda.Stream(self._device, priority=0)
        self._bucket = torch.empty(options.bucket_bytes, dtype=torch.uint8, device=self._device)
        # the communicator is made by the first collective: make it here, where a missing peer is
        # expected
        self._run(self._bucket[:1], options.timeout_s)

    def broadcast(self, view: torch.Tensor, timeout_s: float) -> None:
        """See Transport."""
        part = self._bucket[: view.numel()]
        with torch.cuda.stream(self._stream):
            if self._rank == 0:
                part.copy_(view, non_blocking=True)
            self._run(part, timeout_s)
            if self._rank != 0:
                view.copy_(part)

    def _run(self, part: torch.Tensor, timeout_s: float) -> None:
        """One broadcast, waited for; NCCL can only be interrupted by an abort, so a timer does that
        at the deadline."""
        with self._lock:
            if self._aborted or self._group is None:
                raise TransferFailed("the transport was aborted or closed")
            group = self._group
        timer = threading.Timer(timeout_s, self.abort)
        timer.daemon = True
        timer.start()
        try:
            options = dist.BroadcastOptions()
            options.rootRank = 0
            with torch.cuda.stream(self._stream):
                # no deadline: a timer aborts the communicator at the deadline
                group.broadcast([part], options).wait()  # type: ignore[attr-defined]
                # the stream's own synchronize spins on a core for the whole transfer
                done = torch.cuda.Event(blocking=True)
                done.record(self._stream)
                done.synchronize()
        except RuntimeError as error:
            raise TransferFailed(
                f"NCCL broadcast of {part.numel()} bytes failed: {str(error).splitlines()[0]}"
            ) from error
        finally:
            timer.cancel()
        if self._aborted:
            raise TransferFailed(
                f"an NCCL broadcast was aborted, or did not end within {timeout_s:.1f} s"
            )

    def abort(self) -> None:
        """See Transport."""
        with self._lock:
            if self._aborted or self._group is None:
                return
            self._aborted = True
            group = self._group
        group.abort()

    def close(self) -> None:
        """See Transport: aborts, since a regular shutdown waits for the peer."""
        self.abort()
        with self._lock:
            self._group = None
