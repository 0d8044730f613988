"""One trainer host's images of versions: their memory and how its blocks are hashed; the slots
where finished ones stand, and who reads which.

Rank 0's host hashes its part in its sealer (sync.lanes), every other host in its own sync process
(sync.host). The slots' lock is used by lanes and the sealer, and never by the trainer's main
thread: that one takes its next slot from a pipe, so no lock that a lane holds is ever on the
training path, and lanes and main thread may be in two processes.
"""

import os
import select
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist

from titan_grpo.config import WeightSync
from titan_grpo.errors import ConfigError
from titan_grpo.layout.image import ImageAddress, SharedImage
from titan_grpo.layout.manifest import Manifest
from titan_grpo.protocol import image_slots
from titan_grpo.protocol.image_slots import SlotTable
from titan_grpo.protocol.messages import Label, Patch, RangeSource, new_run_id
from titan_grpo.runkey import Key
from titan_grpo.sync.publisher import copied_key
from titan_grpo.sync.transports.broadcast import LOOPBACK, host_store, join_store, store_errors
from titan_grpo.sync.transports.channel import open_listener
from titan_grpo.sync.transports.tls import Certificate

Images = tuple[torch.Tensor, ...]


class Parts(NamedTuple):
    """An image that several trainer hosts have: this one has part 0, ``elsewhere`` the others.
    ``patches``: see Published."""

    image: torch.Tensor | SharedImage
    elsewhere: tuple[RangeSource, ...] = ()
    patches: tuple[Patch, ...] = ()


@dataclass(frozen=True, slots=True)
class ImagePool:
    """One host's part of a run's version images, and what their writers share. Its leader, rank 0
    on rank 0's host, creates it."""

    run_id: str
    manifest: Manifest
    part: int
    images: tuple[SharedImage, ...]
    """Of the whole image's size; they have memory for this part only."""
    store: dist.TCPStore
    """Carries the notices of this host's other ranks that their bytes are there: on loopback, since
    nothing proves them."""
    hashed: dist.TCPStore | None
    """On rank 0 of several hosts: carries what the others' leaders say, which a run key proves."""

    @classmethod
    def create(
        cls,
        manifest: Manifest,
        slots: int,
        run_id: str = "",
        part: int = 0,
        hashed_host: str = "",
    ) -> "ImagePool":
        """Of a new run, unless it has a ``run_id`` already. ``hashed_host``: the address of rank
        0's host where other hosts' leaders reach it; empty: there are none."""
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
        """What other processes of this host open it by."""
        images = tuple(image.address for image in self.images)
        hashed = None if self.hashed is None else (self.hashed.host, self.hashed.port)
        manifest = self.manifest.to_json()
        return PoolAddress(self.run_id, manifest, self.part, images, self.store.port, hashed)

    def tensors(self) -> Images:
        """The images as bytes: uint8[total_bytes] each."""
        return tuple(image.tensor() for image in self.images)

    def close(self) -> None:
        """Free the images. Idempotent."""
        for image in self.images:
            image.close()


@dataclass(frozen=True, slots=True)
class PoolAddress:
    """An ImagePool of another process of this host. ``manifest``: Manifest.to_json(); ``store``:
    a port; ``hashed``: host and port, also of another host's leader."""

    run_id: str
    manifest: str
    part: int
    images: tuple[ImageAddress, ...]
    store: int
    hashed: tuple[str, int] | None

    def open(self, timeout_s: float) -> ImagePool:
        """Attach the images, to be served too, and join the stores within ``timeout_s`` seconds
        each."""
        manifest = Manifest.from_json(self.manifest)
        extents = manifest.parts[self.part].extents
        images = tuple(SharedImage.attach(image, extents, serve=True) for image in self.images)
        store = join_store(LOOPBACK, self.store, timeout_s)
        hashed = None if self.hashed is None else join_store(*self.hashed, timeout_s)
        return ImagePool(self.run_id, manifest, self.part, images, store, hashed)


def own_certificate(config: WeightSync) -> Certificate | None:
    """What this host of the trainer shows to servers. ConfigError: see Certificate.load."""
    names = "weight_sync.tls_certificate", "weight_sync.tls_key"
    return Certificate.load(config.tls_certificate, config.tls_key, names)


def check_certificate(config: WeightSync, run_key: Key | None) -> None:
    """ConfigError for a certificate that cannot be shown, or that protects nothing."""
    if own_certificate(config) is not None and run_key is None:
        raise ConfigError(
            "weight_sync.tls_certificate needs a run key (weight_sync.run_key_file), there is none:"
            " who reads the calls to a server could take its weights in its place"
        )


def check_address(config: WeightSync) -> None:
    """ConfigError for a bind_host that is no address of this host."""
    if config.bind_host:
        open_listener(config.bind_host).close()


def wait_copied(pool: ImagePool, version: int, rank: int, timeout_s: float) -> str:
    """Wait until another ``rank`` of this host has announced its copy; the key that says so, for
    the caller to delete. TransferFailed if it does not within ``timeout_s`` seconds."""
    key = copied_key(version, rank)
    with store_errors(f"waiting for the part of rank {rank} of version {version}"):
        pool.store.wait([key], timedelta(seconds=timeout_s))
    return key


def hashed_key(version: int, part: int) -> str:
    """Key in rank 0's store that another host's leader sets to a Hashed."""
    return f"hashed/{version}/{part}"


@dataclass(frozen=True, slots=True)
class Published:
    """A complete version: which slot holds it, and what proves its bytes."""

    label: Label
    slot: int
    digests: tuple[bytes, ...]
    published_s: float
    """When the trainer published it, on the recorder's clock."""
    elsewhere: tuple[RangeSource, ...] = ()
    """Where the parts of the trainer's other hosts are served."""
    patches: tuple[Patch, ...] = ()
    """Of each part those that lead to this version, oldest first. Of part 0 without an address: a
    lane has its own."""

    @property
    def version(self) -> int:
        """Policy version, the number of optimizer steps behind these weights."""
        return self.label.version


class Reserved:
    """The slots that are reserved for the trainer's next version: a pipe. Each is read once, by the
    main thread or by what takes it back; the kernel decides which."""

    def __init__(self, pid: int = 0, read: int = -1, write: int = -1) -> None:
        """A new pipe, or another process's, by its descriptors."""
        self._read, self._write = (
            os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
            if not pid
            else (
                # reading ends in both processes, of one pipe: each byte is read once
                os.open(f"/proc/{pid}/fd/{read}", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC),
                os.open(f"/proc/{pid}/fd/{write}", os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC),
            )
        )

    @property
    def address(self) -> tuple[int, int, int]:
        """Process and descriptors: what another process opens it by."""
        return os.getpid(), self._read, self._write

    def put(self, slot: int) -> None:
        """Offer a slot. Never waits: a pipe holds thousands. Nothing once it is closed."""
        if self._write >= 0:
            os.write(self._write, bytes((slot,)))

    def take(self) -> int | None:
        """A slot, or None. Never waits."""
        try:
            return os.read(self._read, 1)[0] if self._read >= 0 else None
        except BlockingIOError:
            return None

    def wait(self, timeout_s: float, take: Callable[[], int | None] | None = None) -> int | None:
        """``take``, or another one, that waits: for the end of a run only."""
        deadline, take = time.monotonic() + timeout_s, take or self.take
        poll = select.poll()
        poll.register(self._read, select.POLLIN)
        while (slot := take()) is None and (left_s := deadline - time.monotonic()) > 0:
            poll.poll(left_s * 1000.0)
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
        """``taken`` and ``complete``: what an earlier process has left, see SlotTable.left."""
        whole = None if complete is None else (complete.slot, complete.version)
        self._table = SlotTable.left(num_slots, taken, whole)
        self._lock = threading.Lock()
        self._published = {} if complete is None else {complete.version: complete}
        self._idle: dict[str, Callable[[], object]] = {}
        """Who wakes each lane that found nothing to pin."""
        self._waiting: dict[str, int | None] = {}
        """What the lanes hold that want a newer version."""
        self._stopping: set[str] = set()
        self._kept: set[str] = set()
        """Lanes that get no newer version for now."""
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
        """``ranks`` copy their parts of ``version`` into ``slot``; the next slot is reserved at
        once."""
        with self._lock:
            self._step(image_slots.Write(slot, version, ranks))
            self._published = {v: p for v, p in self._published.items() if p.slot != slot}
            self._reserve()

    def copied(self, version: int, rank: int) -> None:
        """The part of ``rank`` is in the image."""
        with self._lock:
            self._step(image_slots.Copied(version, rank))

    def complete(self, published: Published) -> None:
        """All bytes and digests of a version are there: lanes may pin it."""
        with self._lock:
            self._step(image_slots.Complete(published.version))
            self._published[published.version] = published
            self._reserve()
            self._wake(*self._idle)

    def discard(self, version: int) -> None:
        """The copy of ``version`` failed; no lane will see it."""
        with self._lock:
            self._step(image_slots.Discard(version))
            self._reserve()

    def seal(self) -> None:
        """No more versions follow; the newest image stays for the lanes that still need it."""
        with self._lock:
            self._revoke()
            self._step(image_slots.Seal())
            self._wake(*self._idle)

    # Lanes.

    def pin_newer(
        self, lane: str, held: int | None, wake: Callable[[], object]
    ) -> Published | None:
        """Pin a complete version newer than ``held``. None if there is none, the lane is kept on
        its version, or it stops.

        After None the lane is idle until it pins or leaves: ``wake`` is called, under the lock,
        when it should ask again, and a version that it wants is not written over.
        """
        with self._lock:
            found = None if lane in self._stopping else self._pin(lane, held)
            if found is None:
                self._idle[lane] = wake
            else:
                self._leave(lane)
            return found

    def leave(self, lane: str) -> None:
        """The lane asks for no version for now. Idempotent."""
        with self._lock:
            self._leave(lane)

    def _leave(self, lane: str) -> None:
        self._idle.pop(lane, None)
        self._waiting.pop(lane, None)
        self._reserve()

    def _pin(self, lane: str, held: int | None) -> Published | None:
        if lane in self._kept:
            return None
        self._waiting[lane] = held
        if self._table.revocable(held):
            self._revoke()
        for action in self._step(image_slots.Pin(lane, held)):
            if isinstance(action, image_slots.Read):
                return self._published[action.version]
        return None

    def keep(self, lane: str) -> None:
        """The lane gets no newer version until ``go_on``: its server stays on what it holds. One
        that it reads already is committed all the same."""
        with self._lock:
            self._kept.add(lane)
            # It wants no slot: the newest version's may be written again.
            self._waiting.pop(lane, None)
            self._reserve()

    def go_on(self, lane: str) -> None:
        """The opposite of ``keep``. Idempotent."""
        with self._lock:
            self._kept.discard(lane)
            self._wake(lane)

    def unpin(self, lane: str) -> None:
        """The lane no longer reads its image."""
        with self._lock:
            self._step(image_slots.Unpin(lane))
            self._reserve()

    def stop(self, lane: str) -> None:
        """The lane pins nothing any more."""
        with self._lock:
            self._stopping.add(lane)
            self._leave(lane)

    def forget(self, lane: str) -> None:
        """The lane has ended; one of the same name may come later."""
        with self._lock:
            self._stopping.discard(lane)
            self._leave(lane)

    def newest(self) -> Published | None:
        """The newest complete version."""
        with self._lock:
            version = self._table.newest
            return None if version is None else self._published[version]

    # Under the lock.

    def _wake(self, *lanes: str) -> None:
        for lane in lanes:
            if lane in self._idle:
                self._idle[lane]()

    def _reserve(self) -> None:
        newest = self._table.newest
        wanted = newest is not None and any(
            held is None or held < newest for held in self._waiting.values()
        )
        for action in self._step(image_slots.Reserve(wanted)):
            if isinstance(action, image_slots.Promise):
                self.reserved.put(action.slot)

    def _revoke(self) -> None:
        """Cancel the reservation if it is still in the queue: a lane wants what the slot holds.

        While a lane was stuck, no lane wanted the newest version, so its slot was reserved for the
        next one. But the next one may need rollouts from that very lane's server, and would never
        come.
        """
        # The kernel decides: the main thread has read it by now, or never will.
        slot = self.reserved.take()
        if slot is not None:
            self._step(image_slots.Revoke(slot))

    def _step(self, event: image_slots.Event) -> tuple[image_slots.Action, ...]:
        self._table, actions = image_slots.step(self._table, event)
        return actions
