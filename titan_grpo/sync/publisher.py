"""One rank's part of a version: its shards are copied into a slot of the image while the trainer
continues, and announced when the bytes are there.

::

    optimizer.step()      publish(version, slot): CPU copies now; CUDA enqueues on a side stream
    forward, backward     the copy runs beside them; the announcer's thread waits for its end
    fence()               the current stream waits for the copy (the device, not the host)
    optimizer.step()      may now change the weights
"""

import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from titan_grpo.errors import PeerError, ProtocolError, SyncError
from titan_grpo.layout.cuda_runtime import Block, CudaRuntime
from titan_grpo.layout.infer import matrix_shape
from titan_grpo.layout.peft import MergedRows
from titan_grpo.layout.plan import CopyOp, written_pages
from titan_grpo.sync.transports.broadcast import LOOPBACK, beside, join_store, store_errors

logger = logging.getLogger(__name__)

WIDEST_ITEM = 8
"""Bytes of the widest element that a shard can have (float64)."""


class Copy:
    """One snapshot. This class: made by the CPU, already complete."""

    def __init__(self, copy_s: float) -> None:
        self._copy_s = copy_s

    @property
    def fenced_s(self) -> float:
        """Seconds that the device waited at the fence; 0 until it has passed it."""
        return 0.0

    def fence(self) -> None:
        """Make all later work on the current stream wait until the copy has read the weights."""

    def wait(self, timeout_s: float) -> float:
        """Block until the bytes are in the image; return the seconds that the copy took. Raises
        SyncError past ``timeout_s`` seconds."""
        return self._copy_s


class CudaCopy(Copy):
    """A copy by the device, between two events.

    The events belong to this copy alone. A wait binds to an event's newest record: with a reused
    event the optimizer, or the lane, would wait for a later copy of the same slot.
    """

    def __init__(
        self,
        started: torch.cuda.Event,
        ended: torch.cuda.Event,
        shards: Sequence[torch.Tensor | MergedRows],
        device: torch.device,
    ) -> None:
        """Both events are recorded on the side stream of ``device``. Keeps ``shards`` alive until
        the copy is done."""
        self._started, self._ended, self._device = started, ended, device
        self._shards: Sequence[torch.Tensor | MergedRows] | None = shards
        self._fence: tuple[torch.cuda.Event, torch.cuda.Event] | None = None

    def fence(self) -> None:
        """Make the current stream wait on the device; the host continues."""
        stream = torch.cuda.current_stream(self._device)
        with torch.cuda.device(self._device):
            arrived, past = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            arrived.record(stream)
            stream.wait_event(self._ended)
            past.record(stream)
        self._fence = arrived, past

    @property
    def fenced_s(self) -> float:
        if self._fence is None or not self._fence[1].query():
            return 0.0
        milliseconds: float = self._fence[0].elapsed_time(self._fence[1])
        return milliseconds / 1000.0

    def wait(self, timeout_s: float) -> float:
        """See Copy. CUDA has no wait with a deadline: another thread waits, and ends when CUDA
        does."""

        def synchronize() -> None:
            # A new thread's device is GPU 0, where CUDA would create another context.
            with torch.cuda.device(self._device):
                self._ended.synchronize()

        try:
            beside(synchronize, "device copy").result(timeout_s)
        except TimeoutError:
            raise SyncError(
                f"the copy of this rank's weights must end within {timeout_s:g} s, it did not: this"
                " version is not published; a training collective may hang, or the host's memory"
                " is not pinned"
            ) from None
        self._shards = None
        milliseconds: float = self._started.elapsed_time(self._ended)
        return milliseconds / 1000.0


@dataclass(frozen=True, slots=True)
class _Task:
    """A CopyOp with its destination in one slot: ``dest`` [num_rows, num_cols], strided, on CPU."""

    rows: slice | torch.Tensor
    dest: torch.Tensor

    @classmethod
    def of(cls, op: CopyOp, image: torch.Tensor, device: torch.device) -> "_Task":
        dtype: torch.dtype = getattr(torch, op.dtype)
        whole = image.view(dtype)
        dest = whole.as_strided(
            (op.num_rows, op.num_cols),
            (op.dest_row_stride // dtype.itemsize, 1),
            whole.storage_offset() + op.dest_offset // dtype.itemsize,
        )
        return cls(op.rows if isinstance(op.rows, slice) else op.rows.to(device), dest)

    def pieces(
        self, source: torch.Tensor | MergedRows, chunk_bytes: int
    ) -> list[tuple[torch.Tensor, slice | torch.Tensor]]:
        """Cut the copy into (destination, source rows) whose temporary, in either dtype, fits into
        ``chunk_bytes``.

        A slice on the CPU, or one without a cast, makes no temporary; cutting it has no measurable
        cost.
        """
        num_rows, num_cols = self.dest.shape
        item = max(self.dest.element_size(), source.element_size())
        step = max(1, chunk_bytes // (num_cols * item))
        if step >= num_rows:
            return [(self.dest, self.rows)]
        return [
            (self.dest[i : i + step], _part(self.rows, i, min(i + step, num_rows)))
            for i in range(0, num_rows, step)
        ]


def _part(rows: slice | torch.Tensor, first: int, last: int) -> slice | torch.Tensor:
    """Return entries ``first`` to ``last`` of a row selection: ``_part(slice(4, 20, 2), 1, 3) ==
    slice(6, 10, 2)``."""
    if isinstance(rows, slice):
        return slice(rows.start + first * rows.step, rows.start + last * rows.step, rows.step)
    return rows[first:last]


def _as_matrix(shard: torch.Tensor | MergedRows) -> torch.Tensor | MergedRows:
    if isinstance(shard, MergedRows):
        return shard
    return shard.detach().reshape(matrix_shape(shard.shape))


def _checked(fqn: str, source: torch.Tensor, dest: torch.Tensor) -> torch.Tensor:
    """Return ``source`` if it has ``dest``'s shape: copy_ would silently broadcast a single row to
    all. Raises ProtocolError otherwise."""
    if source.shape != dest.shape:
        raise ProtocolError(
            f"the shard of {fqn} must give rows {tuple(dest.shape)} as planned, got"
            f" {tuple(source.shape)}"
        )
    return source


class Snapshotter:
    """Copies this rank's shards into the slots' images, by its plan (``ops`` by parameter name).

    On CUDA it owns one stream and one staging buffer of ``chunk_bytes`` (or one row, if larger) on
    the device. It pins the pages of the images that this rank writes (``cudaHostRegister``) until
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
        self._chunk_bytes = chunk_bytes
        planned = {fqn: group for fqn, group in ops.items() if group}
        self._plans = [
            {fqn: [_Task.of(op, image, device) for op in group] for fqn, group in planned.items()}
            for image in images
        ]
        self._cuda: _CudaSide | None = None
        if device.type == "cuda":
            widest = max((op.num_cols for group in ops.values() for op in group), default=0)
            pages = written_pages(op for group in planned.values() for op in group)
            parts = [image[start:stop] for image in images for start, stop in pages]
            self._cuda = _CudaSide(parts, device, max(chunk_bytes, widest * WIDEST_ITEM))

    def start(self, shards: Mapping[str, torch.Tensor | MergedRows], slot: int) -> Copy:
        """Copy the local ``shards`` (plain tensors or merged rows by parameter name; unplanned ones
        are ignored) into ``slot``.

        The caller keeps them unchanged until ``fence``. Raises ProtocolError if a planned shard is
        missing or has another shape than planned.
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
                    for dest, rows in task.pieces(source, self._chunk_bytes):
                        dest.copy_(_checked(fqn, source[rows], dest))
            return Copy(time.perf_counter() - began)

    def close(self) -> None:
        """Wait for the device and unpin the images; idempotent."""
        if self._cuda is not None:
            self._cuda.close()
            self._cuda = None


class _CudaSide:
    """Device half of a Snapshotter: stream, staging buffer, pinned parts of images. Only ``close``
    blocks the host."""

    def __init__(
        self, parts: Sequence[torch.Tensor], device: torch.device, staging_bytes: int
    ) -> None:
        self._device = device
        self._runtime = CudaRuntime()
        with torch.cuda.device(device):
            # default priority: the lowest that CUDA has, as training's streams
            self._stream = torch.cuda.Stream(device)
            self._staging = torch.empty(staging_bytes, dtype=torch.uint8, device=device)
            found = [
                (part, self._runtime.register(part.data_ptr(), part.numel())) for part in parts
            ]
        self._pinned = [part for part, refusal in found if refusal is None]
        if refused := [(part.numel(), refusal) for part, refusal in found if refusal is not None]:
            # One line: a rank has a thousand parts, and all are refused for one reason.
            logger.warning(
                "%d bytes of the weight images could not be pinned (%s): each snapshot will block"
                " the trainer for the whole copy, at a fraction of the bus's speed; dmesg may say"
                " why the driver refuses (ulimit -l does not limit it)",
                sum(nbytes for nbytes, _ in refused),
                refused[0][1],
            )

    def start(
        self, plan: Mapping[str, Sequence[_Task]], shards: Mapping[str, torch.Tensor | MergedRows]
    ) -> CudaCopy:
        started = torch.cuda.Event(enable_timing=True)
        # blocking: a waiting thread sleeps; by default CUDA spins on a core
        ended = torch.cuda.Event(enable_timing=True, blocking=True)
        with torch.cuda.device(self._device):
            # The optimizer's kernels are still queued on the current stream: read the weights after
            # them.
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
            with torch.cuda.stream(self._stream):
                started.record(self._stream)
                for fqn, tasks in plan.items():
                    source = _as_matrix(shards[fqn])
                    for task in tasks:
                        self._copy(fqn, task, source)
                ended.record(self._stream)
        return CudaCopy(started, ended, [shards[fqn] for fqn in plan], self._device)

    def _copy(self, fqn: str, task: _Task, source: torch.Tensor | MergedRows) -> None:
        plain = isinstance(task.rows, slice) and source.dtype == task.dest.dtype
        if plain and isinstance(source, torch.Tensor) and source.stride(1) == 1:
            self._send(_checked(fqn, source[task.rows], task.dest), task.dest)
            return
        for dest, rows in task.pieces(source, self._staging.numel()):
            picked = _checked(fqn, source[rows], dest)
            # One buffer serves all pieces: the stream runs cast, copy, cast, copy in this order.
            raw = self._staging[: dest.numel() * dest.element_size()]
            staged = raw.view(dest.dtype).view(dest.shape)
            staged.copy_(picked)
            self._send(staged, dest)

    def _send(self, source: torch.Tensor, dest: torch.Tensor) -> None:
        rows, width = dest.shape[0], dest.shape[1] * dest.element_size()
        pitches = source.stride(0) * source.element_size(), dest.stride(0) * dest.element_size()
        if rows == 1 or pitches == (width, width):
            # contiguous on both sides: one long row, as a vector's 2-byte rows one by one are slow
            rows, width = 1, rows * width
            pitches = width, width
        device, host = Block(source.data_ptr(), pitches[0]), Block(dest.data_ptr(), pitches[1])
        self._runtime.copy_to_host(host, device, width, rows, self._stream.cuda_stream)

    def close(self) -> None:
        # Before the pages are unpinned: a copy in flight still writes them.
        self._stream.synchronize()
        for part in self._pinned:
            self._runtime.unregister(part.data_ptr())
        self._pinned = []


Announce = Callable[[int, int, Copy], None]
"""Callback with (version, slot, copy), called by the main thread. Must not wait."""


def copied_key(version: int, rank: int) -> str:
    """Return the store key that a rank sets when its part of ``version`` is in the image."""
    return f"copied/{version}/{rank}"


def local_shards(
    named: Sequence[tuple[str, torch.Tensor]], wanted: set[str]
) -> dict[str, torch.Tensor]:
    """Return this rank's local tensors of the wanted parameters, detached. Call it between two
    steps, while FSDP2 has them sharded."""
    return {
        fqn: (tensor.to_local() if hasattr(tensor, "to_local") else tensor).detach()
        for fqn, tensor in named
        if fqn in wanted
    }


class Publisher:
    """Publishes a rank's shards. Used by the main thread; only ``close`` waits."""

    def __init__(
        self, snapshotter: Snapshotter | None = None, announce: Announce = lambda *_: None
    ) -> None:
        """``snapshotter``: None for a rank that writes nothing."""
        self._snapshotter = snapshotter
        self._announce = announce
        self._copy: Copy | None = None
        self._fenced: Copy | None = None

    def publish(
        self, version: int, slot: int, shards: Mapping[str, torch.Tensor | MergedRows]
    ) -> None:
        """Start the copy of this rank's ``shards`` (by parameter name) into ``slot``.

        Returns when the copy is enqueued on a CUDA device, or done on the CPU: the whole cost of a
        version. Raises as Snapshotter.start.
        """
        if self._snapshotter is not None:
            self._copy = self._snapshotter.start(shards, slot)
            self._announce(version, slot, self._copy)

    def fence(self) -> None:
        """Make the current stream, not the host, wait for the last copy. Call it before the
        parameters change."""
        if self._copy is not None:
            self._copy.fence()
            self._fenced, self._copy = self._copy, None

    def take_fenced_s(self) -> float:
        """Return the seconds that the device waited at the last fence, once. Call it when the
        device is past the fence."""
        fenced, self._fenced = self._fenced, None
        return 0.0 if fenced is None else fenced.fenced_s

    def close(self) -> None:
        """Unpin the images."""
        if self._snapshotter is not None:
            self._snapshotter.close()


class Announcer:
    """Announces a rank's copies to the sealing process of its host: a thread waits for each copy
    and sets a key in the pool's store."""

    def __init__(
        self,
        rank: int,
        port: int,
        join_s: float,
        copy_s: float,
        copied: Callable[[float], object] = float,
    ) -> None:
        """``port``: of ImagePool.store, joined within ``join_s`` seconds. ``copy_s``: deadline of
        each copy, in seconds. ``copied`` is called with the seconds of each copy.
        """
        self._rank, self._copied = rank, copied
        self._copy_s = copy_s
        self._store: dist.Store = join_store(LOOPBACK, port, join_s)
        self._error: SyncError | None = None
        self._jobs: queue.SimpleQueue[tuple[int, Copy] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="announcer", daemon=True)
        self._thread.start()

    def __call__(self, version: int, slot: int, copy: Copy) -> None:
        """Queue a copy. Never waits."""
        self._jobs.put((version, copy))

    def take_error(self) -> SyncError | None:
        """Return the first error since the last call."""
        error, self._error = self._error, None
        return error

    def close(self, timeout_s: float) -> None:
        """End the thread after the queued copies; wait up to ``timeout_s`` seconds for it."""
        self._jobs.put(None)
        self._thread.join(timeout_s)

    def _run(self) -> None:
        # no deadline: close() puts None into the queue; the thread is a daemon
        while (job := self._jobs.get()) is not None:
            version, copy = job
            try:
                self._copied(copy.wait(self._copy_s))
                with store_errors(f"announcing version {version}"):
                    self._store.set(copied_key(version, self._rank), "")
            # RuntimeError: from CUDA, or from a store that closes. The thread must go on: without
            # it every later version fails at its deadline.
            except (SyncError, PeerError, RuntimeError) as error:
                # take_error returns the first one only.
                logger.warning("weight sync: version %d: %s", version, error)
                self._error = self._error or SyncError(f"rank {self._rank}: {error}")
