"""Where finished version images stand, and who reads which: the slot table behind one lock.

Lanes and the sealer use the lock. The trainer's main thread never does: it takes its next slot
from a pipe, so no lock that a lane holds is ever on the training path, and lanes and main thread
may be in two processes.
"""

import os
import select
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass

from titan_grpo.protocol import image_slots
from titan_grpo.protocol.image_slots import SlotTable
from titan_grpo.protocol.messages import Label, RangeSource
from titan_grpo.sync.patches import Made


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
    patches: tuple[Made, ...] = ()
    """Up to this version, oldest first."""

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

    def wait(self, timeout_s: float) -> int | None:
        """``take`` that waits."""
        deadline = time.monotonic() + timeout_s
        while (slot := self.take()) is None and (left_s := deadline - time.monotonic()) > 0:
            self.poll(left_s)
        return slot

    def poll(self, timeout_s: float) -> None:
        """Wait until there may be a slot."""
        poll = select.poll()
        poll.register(self._read, select.POLLIN)
        poll.poll(timeout_s * 1000.0)

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
        self._reserved = reserved or Reserved()
        with self._lock:
            self._reserve()

    def __repr__(self) -> str:
        return f"<ImageSlots {self._table!r}>"

    # Main thread.

    def take_reserved(self) -> int | None:
        """The slot for the next version, or None: every slot is in use, so the version is skipped.
        Never waits."""
        return self._reserved.take()

    def put_back(self, slot: int) -> None:
        """Return a slot that was taken and not written: it is the next one again. Never waits."""
        self._reserved.put(slot)

    def wait_reserved(self, timeout_s: float) -> int | None:
        """``take_reserved`` that waits. For shutdown only."""
        return self._reserved.wait(timeout_s)

    def close(self) -> None:
        """Close the pipe. Idempotent."""
        self._reserved.close()

    # Sealer.

    def writing(self, version: int, slot: int, ranks: frozenset[int]) -> None:
        """``ranks`` copy their parts of ``version`` into ``slot``; the next slot is reserved at
        once."""
        with self._lock:
            self._step(image_slots.Write(slot, version, ranks))
            self._published = {v: p for v, p in self._published.items() if p.slot != slot}
            self._reserve()

    def copied(self, version: int, rank: int) -> bool:
        """The part of ``rank`` is in the image; whether that was the last one."""
        with self._lock:
            return bool(self._step(image_slots.Copied(version, rank)))

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
                self._reserved.put(action.slot)

    def _revoke(self) -> None:
        """Cancel the reservation if it is still in the queue: a lane wants what the slot holds.

        While a lane was stuck, no lane wanted the newest version, so its slot was reserved for the
        next one. But the next one may need rollouts from that very lane's server, and would never
        come.
        """
        slot = self.take_reserved()
        if slot is not None:
            self._step(image_slots.Revoke(slot))

    def _step(self, event: image_slots.Event) -> tuple[image_slots.Action, ...]:
        self._table, actions = image_slots.step(self._table, event)
        return actions
