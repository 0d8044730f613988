"""Copies this rank's shards into a slot of the version image, without stopping the trainer.

::

    optimizer.step()      start(shards, slot): CPU copies now; CUDA enqueues on a side stream and returns
    forward, backward     the copy runs beside them
    fence()               the current stream waits for the copy (the device, not the host)
    optimizer.step()      may now change the weights

Called by the trainer's main thread; ``Copy.wait`` by a worker thread.
"""

import logging
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import torch

from titan_grpo.errors import ProtocolError, SyncError
from titan_grpo.layout.infer import matrix_shape
from titan_grpo.layout.plan import CopyOp
from titan_grpo.sync.cuda_copy import Block, CudaRuntime

logger = logging.getLogger(__name__)

WIDEST_ITEM = 8
"""Bytes of the widest element that a shard can have (float64)."""


class Copy:
    """One snapshot under way."""

    def fence(self) -> None:
        """Let nothing that is enqueued after this on the current stream run before the copy has
        read the weights."""
        raise NotImplementedError

    def wait(self, timeout_s: float) -> float:
        """Block until the bytes are in the image; seconds the copy took. Raises SyncError past the
        deadline."""
        raise NotImplementedError


class FinishedCopy(Copy):
    """A copy that the CPU made inline."""

    def __init__(self, copy_s: float) -> None:
        """``copy_s``: seconds that it took."""
        self._copy_s = copy_s

    def fence(self) -> None:
        """Nothing is under way."""

    def wait(self, timeout_s: float) -> float:
        """Seconds that the copy took."""
        return self._copy_s


class CudaCopy(Copy):
    """A copy that the device makes between two events.

    The events belong to this copy alone: a wait binds to the newest record of an event, so a reused
    one would let the optimizer, or the sender, run into a later copy of the same slot.
    """

    def __init__(
        self, started: torch.cuda.Event, ended: torch.cuda.Event, shards: Sequence[torch.Tensor]
    ) -> None:
        """Both events are recorded on the side stream; ``shards`` are kept alive until the copy is
        done."""
        self._started = started
        self._ended = ended
        self._shards: Sequence[torch.Tensor] | None = shards

    def fence(self) -> None:
        """Make the current stream wait on the device; the host goes on."""
        torch.cuda.current_stream().wait_event(self._ended)

    def wait(self, timeout_s: float) -> float:
        """Sleep until the event is done. CUDA has no wait with a deadline: another thread waits,
        and ends when CUDA does."""
        done: Future[None] = Future()
        threading.Thread(
            target=_synchronize, args=(self._ended, done), name="device copy", daemon=True
        ).start()
        try:
            done.result(timeout_s)
        except TimeoutError:
            raise SyncError(
                f"the copy of this rank's weights must end within {timeout_s:g} s, it did not: this"
                " version is not published; a training collective may hang, or the host's memory"
                " is not pinned"
            ) from None
        self._shards = None
        milliseconds: float = self._started.elapsed_time(self._ended)
        return milliseconds / 1000.0


def _synchronize(event: torch.cuda.Event, done: "Future[None]") -> None:
    try:
        event.synchronize()
    except Exception as error:  # noqa: BLE001 - top of a thread: raised where the copy is waited for
        done.set_exception(error)
    else:
        done.set_result(None)


@dataclass(frozen=True, slots=True)
class _Task:
    """A CopyOp with its destination in one slot: ``dest`` is [num_rows, num_cols], strided, on the
    host."""

    rows: slice | torch.Tensor
    dest: torch.Tensor


def _destination(op: CopyOp, image: torch.Tensor) -> torch.Tensor:
    dtype: torch.dtype = getattr(torch, op.dtype)
    stride = op.dest_row_stride // dtype.itemsize
    start = op.dest_offset // dtype.itemsize
    whole = image.view(dtype)
    return whole.as_strided((op.num_rows, op.num_cols), (stride, 1), whole.storage_offset() + start)


def _on_device(op: CopyOp, device: torch.device) -> slice | torch.Tensor:
    return op.rows if isinstance(op.rows, slice) else op.rows.to(device)


class Snapshotter:
    """Holds the plan of this rank (``ops`` by parameter name) and the slots' images, and makes the
    copies.

    On CUDA it owns one stream of the lowest priority and one staging buffer of ``chunk_bytes`` (or
    one row, if that is more) on the device, and pins the images (``cudaHostRegister``) until
    ``close``.
    """

    def __init__(
        self,
        ops: Mapping[str, Sequence[CopyOp]],
        images: Sequence[torch.Tensor],
        device: torch.device,
        chunk_bytes: int,
    ) -> None:
        """``images``: uint8[total_bytes] per slot, on the CPU. ``chunk_bytes``: device memory for
        casts and gathers."""
        self._device = torch.device(device)
        self._chunk_bytes = chunk_bytes
        moved = {
            fqn: [(op, _on_device(op, self._device)) for op in group]
            for fqn, group in ops.items()
            if group
        }
        self._plans = [
            {
                fqn: [_Task(rows, _destination(op, image)) for op, rows in group]
                for fqn, group in moved.items()
            }
            for image in images
        ]
        widest = max((op.num_cols for group in ops.values() for op in group), default=0)
        staging = max(chunk_bytes, widest * WIDEST_ITEM)
        self._cuda = (
            _CudaSide(images, self._device, staging) if self._device.type == "cuda" else None
        )

    def start(self, shards: Mapping[str, torch.Tensor], slot: int) -> Copy:
        """Copy the local ``shards`` (plain tensors by parameter name; others than the plan's are
        ignored) into ``slot``.

        The caller keeps them unchanged until ``fence``. Raises ProtocolError if a planned shard is
        missing or has another shape than at planning time.
        """
        plan = self._plans[slot]
        missing = plan.keys() - shards.keys()
        if missing:
            raise ProtocolError(
                f"shards must hold every planned parameter, missing are {sorted(missing)[:3]} of"
                f" {len(missing)}"
            )
        with torch.no_grad():
            if self._cuda is not None:
                return self._cuda.start(plan, shards)
            began = time.perf_counter()
            for fqn, tasks in plan.items():
                source = _as_matrix(shards[fqn])
                for task in tasks:
                    for dest, rows in _pieces(task, source, self._chunk_bytes):
                        dest.copy_(_checked(fqn, source[rows], dest))
            return FinishedCopy(time.perf_counter() - began)

    def close(self) -> None:
        """Wait for the device and unpin the images; idempotent."""
        if self._cuda is not None:
            self._cuda.close()
            self._cuda = None


def _as_matrix(shard: torch.Tensor) -> torch.Tensor:
    return shard.detach().reshape(matrix_shape(shard.shape))


def _checked(fqn: str, source: torch.Tensor, dest: torch.Tensor) -> torch.Tensor:
    """``source``, if it has ``dest``'s shape: copy_ would broadcast a single row over all of them
    in silence."""
    if source.shape != dest.shape:
        raise ProtocolError(
            f"the shard of {fqn} must give rows {tuple(dest.shape)} as planned, got"
            f" {tuple(source.shape)}"
        )
    return source


def _pieces(
    task: _Task, source: torch.Tensor, chunk_bytes: int
) -> list[tuple[torch.Tensor, slice | torch.Tensor]]:
    """The task cut into (destination, source rows), so that a temporary of either dtype fits into
    ``chunk_bytes``.

    A slice on the CPU, and one without a cast, makes no temporary; cutting it costs nothing that
    can be measured.
    """
    num_rows, num_cols = task.dest.shape
    item = max(task.dest.element_size(), source.element_size())
    step = max(1, chunk_bytes // (num_cols * item))
    if step >= num_rows:
        return [(task.dest, task.rows)]
    return [
        (task.dest[i : i + step], _part(task.rows, i, min(i + step, num_rows)))
        for i in range(0, num_rows, step)
    ]


def _part(rows: slice | torch.Tensor, first: int, last: int) -> slice | torch.Tensor:
    """Entries ``first`` to ``last`` of a row selection: ``_part(slice(4, 20, 2), 1, 3) == slice(6,
    10, 2)``."""
    if isinstance(rows, slice):
        return slice(rows.start + first * rows.step, rows.start + last * rows.step, rows.step)
    return rows[first:last]


class _CudaSide:
    """The device half: stream, staging buffer, pinned images. Nothing here waits on the host,
    except close()."""

    def __init__(
        self, images: Sequence[torch.Tensor], device: torch.device, staging_bytes: int
    ) -> None:
        self._device = device
        self._runtime = CudaRuntime()
        with torch.cuda.device(device):
            # 0 is CUDA's lowest priority: training kernels launched on a higher one overtake the
            # casts
            self._stream = torch.cuda.Stream(device, priority=0)
            self._staging = torch.empty(staging_bytes, dtype=torch.uint8, device=device)
            self._pinned = [image for image in images if self._pin(image)]

    def _pin(self, image: torch.Tensor) -> bool:
        refusal = self._runtime.register(image.data_ptr(), image.numel())
        if refusal is not None:
            logger.warning(
                "a weight image of %d bytes could not be pinned (%s): each snapshot will block the"
                " trainer for the whole copy, at a fraction of the bus's speed; raise the limit on"
                " locked memory",
                image.numel(),
                refusal,
            )
        return refusal is None

    def start(
        self, plan: Mapping[str, Sequence[_Task]], shards: Mapping[str, torch.Tensor]
    ) -> CudaCopy:
        # blocking: whoever waits for the end sleeps, where CUDA would spin on a core
        started, ended = (
            torch.cuda.Event(enable_timing=True),
            torch.cuda.Event(enable_timing=True, blocking=True),
        )
        with torch.cuda.device(self._device):
            # the optimizer's kernels are still queued on the current stream: read the weights after
            # them
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
            with torch.cuda.stream(self._stream):
                started.record(self._stream)
                for fqn, tasks in plan.items():
                    source = _as_matrix(shards[fqn])
                    for task in tasks:
                        self._copy(fqn, task, source)
                ended.record(self._stream)
        return CudaCopy(started, ended, [shards[fqn] for fqn in plan])

    def _copy(self, fqn: str, task: _Task, source: torch.Tensor) -> None:
        as_it_is = (
            isinstance(task.rows, slice)
            and source.dtype == task.dest.dtype
            and source.stride(1) == 1
        )
        if as_it_is:
            self._send(_checked(fqn, source[task.rows], task.dest), task.dest)
            return
        for dest, rows in _pieces(task, source, self._staging.numel()):
            picked = _checked(fqn, source[rows], dest)
            # one buffer for all pieces: the stream runs cast, copy, cast, copy in that order
            staged = (
                self._staging[: dest.numel() * dest.element_size()]
                .view(dest.dtype)
                .view(dest.shape)
            )
            staged.copy_(picked)
            self._send(staged, dest)

    def _send(self, source: torch.Tensor, dest: torch.Tensor) -> None:
        rows, width = dest.shape[0], dest.shape[1] * dest.element_size()
        pitches = source.stride(0) * source.element_size(), dest.stride(0) * dest.element_size()
        if rows == 1 or pitches == (width, width):
            rows, width = (
                1,
                rows * width,
            )  # adjacent on both sides: a vector's 2-byte rows would crawl one by one
            pitches = width, width
        device, host = Block(source.data_ptr(), pitches[0]), Block(dest.data_ptr(), pitches[1])
        self._runtime.copy_to_host(host, device, width, rows, self._stream.cuda_stream)

    def close(self) -> None:
        self._stream.synchronize()
        for image in self._pinned:
            self._runtime.unregister(image.data_ptr())
        self._pinned = []
