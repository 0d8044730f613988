"""One rank's part of publishing a version: start the copy, fence it, announce that the bytes are
there."""

import queue
import threading
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist

from titan_grpo.errors import PeerError, SyncError
from titan_grpo.layout.peft import MergedRows
from titan_grpo.sync.snapshot import Copy, Snapshotter
from titan_grpo.sync.transports.store import join_store, store_errors

Announce = Callable[[int, int, Copy], None]
"""Called by the main thread with (version, slot, copy). Must not wait."""


def copied_key(version: int, rank: int) -> str:
    """Store key that a rank sets when its part of ``version`` is in the image."""
    return f"copied/{version}/{rank}"


def local_shards(
    named: Sequence[tuple[str, torch.Tensor]], wanted: set[str]
) -> dict[str, torch.Tensor]:
    """This rank's local tensors of the wanted parameters, detached. Call it between two steps,
    while FSDP2 has them sharded."""
    return {
        fqn: (tensor.to_local() if hasattr(tensor, "to_local") else tensor).detach()
        for fqn, tensor in named
        if fqn in wanted
    }


class Publisher:
    """Used by a trainer rank's main thread, which waits for nothing here but its own device copy.

    ::

        optimizer.step  publish(v) .. forward and backward over the copy .. fence()  optimizer.step
    """

    def __init__(self, snapshotter: Snapshotter, announce: Announce) -> None:
        self._snapshotter = snapshotter
        self._announce = announce
        self._copy: Copy | None = None
        self._fenced: Copy | None = None

    def publish(
        self, version: int, slot: int, shards: Mapping[str, torch.Tensor | MergedRows]
    ) -> None:
        """Start the copy of this rank's ``shards`` by parameter name into ``slot``.

        Returns when the copy is enqueued on a CUDA device, or done on the CPU: that is the whole
        price of a version.
        """
        self._copy = self._snapshotter.start(shards, slot)
        self._announce(version, slot, self._copy)

    def fence(self) -> None:
        """Before the parameters change: the current stream waits for the last copy, the host does
        not."""
        if self._copy is not None:
            self._copy.fence()
            self._fenced, self._copy = self._copy, None

    def take_fenced_s(self) -> float:
        """Seconds that the device stood still at the fences since the last call. Call it when the
        device is past them."""
        fenced, self._fenced = self._fenced, None
        return 0.0 if fenced is None else fenced.fenced_s

    def close(self) -> None:
        """Unpin the images."""
        self._snapshotter.close()


class Announcer:
    """Announces a rank's copies to the process that seals versions: a thread waits for each copy
    and sets a key in rank 0's store."""

    def __init__(
        self,
        rank: int,
        host: str,
        port: int,
        timeout_s: float,
        copied: Callable[[float], object] = float,
    ) -> None:
        """``copied`` is called with the seconds of each copy."""
        self._rank, self._copied = rank, copied
        self._timeout_s = timeout_s
        self._store: dist.Store = join_store(host, port, timeout_s)
        self._error: SyncError | None = None
        self._jobs: queue.SimpleQueue[tuple[int, Copy] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="announcer", daemon=True)
        self._thread.start()

    def __call__(self, version: int, slot: int, copy: Copy) -> None:
        """Hand over; never waits."""
        self._jobs.put((version, copy))

    def take_error(self) -> SyncError | None:
        """The first error since the last call."""
        error, self._error = self._error, None
        return error

    def close(self, timeout_s: float) -> None:
        """End the thread."""
        self._jobs.put(None)
        self._thread.join(timeout_s)

    def _run(self) -> None:
        # no deadline: close() puts None into the queue; the thread is a daemon
        while (job := self._jobs.get()) is not None:
            version, copy = job
            try:
                copy_s = copy.wait(self._timeout_s)
                self._copied(copy_s)
                with store_errors(f"announcing version {version}"):
                    self._store.set(copied_key(version, self._rank), repr(copy_s))
            # RuntimeError: from CUDA's copy or a store that closes. It must not end the thread:
            # rank 0 would wait for every later version until its deadline.
            except (SyncError, PeerError, RuntimeError) as error:
                self._error = self._error or SyncError(f"rank {self._rank}: {error}")
