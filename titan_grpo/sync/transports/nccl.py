"""Broadcast between GPUs with NCCL, through one device bucket on each side.

The image stays on the host: sender copies host -> bucket -> NCCL, receiver NCCL -> bucket -> host,
in the order of one stream, with few CTAs, so that training kernels keep most of the device.

A lane's communicator lives in the trainer's process, and torch gives each process group a watchdog
that ends the process when a peer is lost. So these groups are made without one
(TORCH_NCCL_BLOCKING_WAIT): ``wait`` looks for errors itself, and raises them. NCCL's blocking
initialisation waits for a missing peer without end, even when it is aborted: it is made
non-blocking (``ncclConfig_t.blocking = 0``), which torch gives up by itself
(store.limit_nccl_opening).
"""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta

import torch
import torch.distributed as dist

from titan_grpo.errors import TransferFailed
from titan_grpo.sync.transports.base import Transport, TransportOptions
from titan_grpo.sync.transports.store import limit_nccl_opening

MAX_CTAS = 4
"""Thread blocks that NCCL may use: a lane competes with training for the device, and a network
needs no more."""

BLOCKING_WAIT = "TORCH_NCCL_BLOCKING_WAIT"

ABORT_S = 5.0
"""Seconds that closing waits for NCCL to have aborted."""

_environment = threading.Lock()
"""The environment is the process's: lanes that connect at once would put back each other's
value."""


@contextmanager
def no_watchdog() -> Iterator[None]:
    """Within it, a new process group gets no watchdog, and its ``wait`` raises what went wrong.

    The variable is read by the group's constructor; it is put back for the training groups that may
    come later.
    """
    with _environment:
        before = os.environ.get(BLOCKING_WAIT)
        os.environ[BLOCKING_WAIT] = "1"
        try:
            yield
        finally:
            if before is None:
                del os.environ[BLOCKING_WAIT]
            else:
                os.environ[BLOCKING_WAIT] = before


class NcclTransport(Transport):
    """A ProcessGroupNCCL of its own, outside torch.distributed's registry, on a stream of its
    own."""

    def __init__(self, store: dist.Store, rank: int, size: int, options: TransportOptions) -> None:
        """Connect all ranks; TransferFailed if one is missing past the deadline, or the device has
        no memory left. ``options.device``: "cuda" or "cuda:N"."""
        limit_nccl_opening(options.timeout_s)  # of a process that has no other NCCL group
        name = options.device if options.device.startswith("cuda") else "cuda"
        self._device = (
            torch.device(name) if ":" in name else torch.device("cuda", torch.cuda.current_device())
        )
        self._rank = rank
        self._lock = threading.Lock()
        self._aborted = False
        self._group: dist.ProcessGroupNCCL | None = None
        self._ending: threading.Thread | None = None
        nccl = dist.ProcessGroupNCCL.Options(is_high_priority_stream=False)
        nccl._timeout = timedelta(seconds=options.timeout_s)
        nccl.config.blocking = 0
        nccl.config.min_ctas = 1
        nccl.config.max_ctas = MAX_CTAS
        try:
            with no_watchdog():
                self._group = dist.ProcessGroupNCCL(store, rank, size, nccl)
            with torch.cuda.device(self._device):
                self._stream = torch.cuda.Stream(self._device)
                self._bucket = torch.empty(
                    options.bucket_bytes, dtype=torch.uint8, device=self._device
                )
            # the communicator is made by the first collective: make it here, where a missing peer
            # is expected
            self._run(self._bucket[:1], options.timeout_s)
        except RuntimeError as error:  # torch.OutOfMemoryError and DistBackendError are too
            self.close()
            raise TransferFailed(f"NCCL on {self._device}: {_line(error)}") from error
        except TransferFailed as error:
            self.close()
            raise TransferFailed(
                f"NCCL did not connect {size} ranks within {options.timeout_s:.1f} s: {error}"
            ) from error

    def broadcast(self, view: torch.Tensor, timeout_s: float) -> None:
        """See Transport."""
        part = self._bucket[: view.numel()]
        try:
            with torch.cuda.stream(self._stream):
                if self._rank == 0:
                    part.copy_(view, non_blocking=True)
                self._run(part, timeout_s)
                if self._rank != 0:
                    view.copy_(part)
        except RuntimeError as error:
            raise TransferFailed(f"NCCL on {self._device}: {_line(error)}") from error

    def _run(self, part: torch.Tensor, timeout_s: float) -> None:
        """One broadcast; returns when the bytes are there."""
        with self._lock:
            if self._aborted or self._group is None:
                raise TransferFailed("the transport was aborted or closed")
            group = self._group
        try:
            options = dist.BroadcastOptions()
            options.rootRank = 0
            with torch.cuda.stream(self._stream):
                work = group.broadcast([part], options)  # type: ignore[attr-defined]
                # without a watchdog it waits for the device, and looks for lost peers meanwhile
                work.wait(timedelta(seconds=timeout_s))
        except RuntimeError as error:
            why = "was aborted" if self._aborted else "failed"
            raise TransferFailed(
                f"an NCCL broadcast of {part.numel()} bytes {why}: {_line(error)}"
            ) from error
        if self._aborted:
            raise TransferFailed("an NCCL broadcast was aborted")

    def abort(self) -> None:
        """See Transport. Another thread aborts: NCCL's call may block."""
        with self._lock:
            group, self._group = self._group, None
            if group is None:
                return
            self._aborted = True
            self._ending = threading.Thread(
                target=_abort, args=(group,), name="nccl abort", daemon=True
            )
            self._ending.start()

    def close(self) -> None:
        """See Transport: aborts, since a regular shutdown waits for the peer."""
        self.abort()
        # an interpreter that ends under a thread within NCCL's abort ends with SIGABRT
        if self._ending is not None:
            self._ending.join(ABORT_S)


def _abort(group: "dist.ProcessGroupNCCL") -> None:
    """Thread: end what is under way. The group's destructor runs here too, if this
    is the last reference."""
    # an operation that was aborted before, or a communicator that never came to be, is an error of
    # NCCL's, and its lane has ended
    with suppress(RuntimeError):
        group.abort()


def _line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
