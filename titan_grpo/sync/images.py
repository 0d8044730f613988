"""One trainer host's images of versions: their memory, and the slots with the lanes that read them.

Rank 0's host hashes its part in its sealer (sync.lanes), every other host in its own sync process
(sync.host). Lanes and the sealer take the slots' lock. The trainer's main thread never does: it
takes its next slot from a pipe. So no lock of a lane is on the training path, and lanes and main
thread may be in two processes.
"""

import os
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist

from titan_grpo.layout.image import ImageAddress, SharedImage
from titan_grpo.layout.manifest import Manifest
from titan_grpo.protocol import image_slots
from titan_grpo.protocol.image_slots import SlotTable
from titan_grpo.protocol.messages import Label, Patch, RangeSource, new_run_id
from titan_grpo.subprocesses import readable
from titan_grpo.sync.publisher import copied_key
from titan_grpo.sync.transports.broadcast import LOOPBACK, host_store, join_store, store_errors

Images = tuple[torch.Tensor, ...]


class Parts(NamedTuple):
    """An image in parts: ``image`` has part 0, ``elsewhere`` names the other hosts' sources.
    ``patches``: see Published."""

    image: torch.Tensor | SharedImage
    elsewhere: tuple[RangeSource, ...] = ()
    patches: tuple[Patch, ...] = ()


@dataclass(frozen=True, slots=True)
class ImagePool:
    """One host's part of a run's images, with the stores of their writers. The host's leader
    creates it."""

    run_id: str
    manifest: Manifest
    part: int
    images: tuple[SharedImage, ...]
    """Each has the whole image's size, and memory for this part only."""
    store: dist.TCPStore
    """Carries the notices of this host's ranks that their bytes are there. On loopback, because
    the notices have no proof."""
    hashed: dist.TCPStore | None
    """With several hosts: rank 0's store, for the other leaders' Hashed (proven by the run key)."""

    @classmethod
    def create(
        cls,
        manifest: Manifest,
        slots: int,
        run_id: str = "",
        part: int = 0,
        hashed_host: str = "",
    ) -> "ImagePool":
        """Create the pool of a new run, or of run ``run_id`` if given. ``hashed_host``: rank 0's
        address for other hosts' leaders; empty: there are none."""
        extents = manifest.parts[part].extents
        images = tuple(
            SharedImage.create(manifest.total_bytes, f"titan_grpo slot {i}", extents)
            for i in range(slots)
        )
        run_id = run_id or new_run_id(time.time())
        hashed = host_store(hashed_host) if hashed_host else None
        return cls(run_id, manifest, part, images, host_store(LOOPBACK), hashed)

    @property
    def address(self) -> "PoolAddress":
        """Address by which other processes of this host open the pool."""
        images = tuple(image.address for image in self.images)
        hashed = None if self.hashed is None else (self.hashed.host, self.hashed.port)
        manifest = self.manifest.to_json()
        return PoolAddress(self.run_id, manifest, self.part, images, self.store.port, hashed)

    def tensors(self) -> Images:
        """Return the images as bytes: uint8[total_bytes] each."""
        return tuple(image.tensor() for image in self.images)

    def close(self) -> None:
        """Free the images. Idempotent."""
        for image in self.images:
            image.close()


@dataclass(frozen=True, slots=True)
class PoolAddress:
    """Address of an ImagePool in another process of this host. ``manifest``: Manifest.to_json();
    ``store``: port on loopback; ``hashed``: host and port."""

    run_id: str
    manifest: str
    part: int
    images: tuple[ImageAddress, ...]
    store: int
    hashed: tuple[str, int] | None

    def open(self, timeout_s: float) -> ImagePool:
        """Attach the images, for serving too, and join the stores within ``timeout_s`` seconds
        each. Raises TransferFailed if a store does not answer."""
        manifest = Manifest.from_json(self.manifest)
        extents = manifest.parts[self.part].extents
        images = tuple(SharedImage.attach(image, extents, serve=True) for image in self.images)
        store = join_store(LOOPBACK, self.store, timeout_s)
        hashed = None if self.hashed is None else join_store(*self.hashed, timeout_s)
        return ImagePool(self.run_id, manifest, self.part, images, store, hashed)


def wait_copied(pool: ImagePool, version: int, rank: int, timeout_s: float) -> None:
    """Wait until ``rank`` of this host has announced its copy. Raises TransferFailed past
    ``timeout_s`` seconds."""
    with store_errors(f"waiting for the part of rank {rank} of version {version}"):
        pool.store.wait([copied_key(version, rank)], timedelta(seconds=timeout_s))


def hashed_key(version: int, part: int) -> str:
    """Return the key in rank 0's store at which another host's leader puts a Hashed."""
    return f"hashed/{version}/{part}"


@dataclass(frozen=True, slots=True)
class Published:
    """A complete version: its slot, and the proof of its bytes."""

    label: Label
    slot: int
    digests: bytes
    """Of all blocks, in order: one object for all lanes, which send it."""
    published_s: float
    """Time of its publication, on the recorder's clock."""
    elsewhere: tuple[RangeSource, ...] = ()
    """Sources of the parts of the trainer's other hosts."""
    patches: tuple[Patch, ...] = ()
    """Patches of each part that lead to this version, oldest first. Those of part 0 have no
    address: each lane fills in its own."""

    @property
    def version(self) -> int:
        """Policy version, the number of optimizer steps behind these weights."""
        return self.label.version


class Reserved:
    """Pipe of the slots reserved for the trainer's next version. The kernel delivers each byte
    once: the main thread takes the slot, or the slot table takes it back."""

    def __init__(self, pid: int = 0, read: int = -1, write: int = -1) -> None:
        """Create a pipe, or open another process's by its descriptors."""
        self._read, self._write = (
            os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
            if not pid
            else (
                # both processes have reading ends of one pipe: each byte is read once
                os.open(f"/proc/{pid}/fd/{read}", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC),
                os.open(f"/proc/{pid}/fd/{write}", os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC),
            )
        )

    @property
    def address(self) -> tuple[int, int, int]:
        """Process id and descriptors, for another process to open it by."""
        return os.getpid(), self._read, self._write

    def put(self, slot: int) -> None:
        """Put a slot into the pipe. Never waits: a pipe holds thousands. No effect once closed."""
        if self._write >= 0:
            os.write(self._write, bytes((slot,)))

    def take(self) -> int | None:
        """Take a slot, or None. Never waits."""
        try:
            return os.read(self._read, 1)[0] if self._read >= 0 else None
        except BlockingIOError:
            return None

    def wait(self, timeout_s: float, take: Callable[[], int | None] | None = None) -> int | None:
        """Wait up to ``timeout_s`` seconds for a slot, taken by ``take`` if given, else by
        ``self.take``."""
        deadline, take = time.monotonic() + timeout_s, take or self.take
        while (slot := take()) is None and (left_s := deadline - time.monotonic()) > 0:
            readable(left_s, self._read)
        return slot

    def close(self) -> None:
        """Close both ends. Idempotent."""
        read, write, self._read, self._write = self._read, self._write, -1, -1
        for end in (read, write):
            if end >= 0:
                os.close(end)


class ImageSlots:
    """The slots of one trainer host, shared by main thread (the pipe only), sealer and lanes."""

    def __init__(
        self,
        num_slots: int,
        reserved: Reserved | None = None,
        taken: Collection[int] = (),
        complete: Published | None = None,
    ) -> None:
        """``taken``, ``complete``: state left by an earlier process, see SlotTable.left."""
        whole = None if complete is None else (complete.slot, complete.version)
        self._table = SlotTable.left(num_slots, taken, whole)
        self._lock = threading.Lock()
        self._published = {} if complete is None else {complete.version: complete}
        self._idle: dict[str, tuple[Callable[[], object], int | None]] = {}
        """Idle lane -> its wake callback, and the version that it holds."""
        self._stopping: set[str] = set()
        self._kept: set[str] = set()
        """Lanes kept on their version for now."""
        self.reserved = reserved or Reserved()
        with self._lock:
            self._reserve()

    def __repr__(self) -> str:
        return f"<ImageSlots {self._table!r}>"

    def close(self) -> None:
        """Close the pipe. Idempotent."""
        self.reserved.close()

    # Sealer.

    def writing(self, version: int, slot: int, ranks: frozenset[int]) -> None:
        """Note that ``ranks`` copy their parts of ``version`` into ``slot``; reserve the next
        slot."""
        with self._lock:
            self._step(image_slots.Write(slot, version, ranks))
            self._published = {v: p for v, p in self._published.items() if p.slot != slot}
            self._reserve()

    def copied(self, version: int, rank: int) -> None:
        """Note that the part of ``rank`` is in the image."""
        with self._lock:
            self._step(image_slots.Copied(version, rank))

    def complete(self, published: Published) -> None:
        """Let lanes pin a version, whose bytes and digests are complete; wake the idle ones."""
        with self._lock:
            self._step(image_slots.Complete(published.version))
            self._published[published.version] = published
            self._reserve()
            self._wake(*self._idle)

    def discard(self, version: int) -> None:
        """Free the slot of ``version``, whose copy failed."""
        with self._lock:
            self._step(image_slots.Discard(version))
            self._reserve()

    def finish(self) -> None:
        """Reserve no more slots: no version follows, and the newest image stays for the lanes that
        still need it."""
        with self._lock:
            self._revoke()
            self._step(image_slots.Finish())
            self._wake(*self._idle)

    # Lanes.

    def pin_newer(
        self, lane: str, held: int | None, wake: Callable[[], object]
    ) -> Published | None:
        """Pin the newest complete version if it is newer than ``held``. Return None if it is not,
        if the lane is kept on its version, or if it stops.

        After None the lane is idle until it pins or leaves: ``wake`` is called, under the lock,
        when it should retry, and a version that it wants is not overwritten.
        """
        with self._lock:
            found = None if lane in self._stopping else self._pin(lane, held)
            if found is None:
                self._idle[lane] = wake, held
            else:
                self._leave(lane)
            return found

    def leave(self, lane: str) -> None:
        """End the idle state of a lane: it wants no version for now. Idempotent."""
        with self._lock:
            self._leave(lane)

    def _leave(self, lane: str) -> None:
        self._idle.pop(lane, None)
        self._reserve()

    def _pin(self, lane: str, held: int | None) -> Published | None:
        if lane in self._kept:
            return None
        if self._table.revocable(held):
            self._revoke()
        for action in self._step(image_slots.Pin(lane, held)):
            if isinstance(action, image_slots.Read):
                return self._published[action.version]
        return None

    def keep(self, lane: str) -> None:
        """Give the lane no newer version until ``go_on``: its server stays on its version. One that
        the lane has pinned is still committed."""
        with self._lock:
            self._kept.add(lane)
            self._reserve()

    def go_on(self, lane: str) -> None:
        """Undo ``keep``. Idempotent."""
        with self._lock:
            self._kept.discard(lane)
            self._wake(lane)

    def unpin(self, lane: str) -> None:
        """End the lane's read of its image."""
        with self._lock:
            self._step(image_slots.Unpin(lane))
            self._reserve()

    def stop(self, lane: str) -> None:
        """Let the lane pin nothing until ``forget``."""
        with self._lock:
            self._stopping.add(lane)
            self._leave(lane)

    def forget(self, lane: str) -> None:
        """Forget a lane that was stopped: a later one of the same name may pin."""
        with self._lock:
            self._stopping.discard(lane)

    # Under the lock.

    def _wake(self, *lanes: str) -> None:
        for lane in lanes:
            if lane in self._idle:
                self._idle[lane][0]()

    def _reserve(self) -> None:
        # A kept or stopping lane must not hold the newest version's slot.
        wants_none = self._kept | self._stopping
        waiting = tuple(held for url, (_, held) in self._idle.items() if url not in wants_none)
        for action in self._step(image_slots.Reserve(waiting)):
            if isinstance(action, image_slots.Promise):
                self.reserved.put(action.slot)

    def _revoke(self) -> None:
        """Cancel the reservation if it is still in the pipe: a lane wants the slot's version.

        The slot was reserved while that lane was stuck and no other wanted the version. The next
        version may need rollouts from that lane's server: without this it might never come.
        """
        # The kernel decides: the main thread has taken it before, or never will.
        slot = self.reserved.take()
        if slot is not None:
            self._step(image_slots.Revoke(slot))

    def _step(self, event: image_slots.Event) -> tuple[image_slots.Action, ...]:
        self._table, actions = image_slots.step(self._table, event)
        return actions
