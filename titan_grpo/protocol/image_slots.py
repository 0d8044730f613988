"""Slots: where the next version image is written, and which image a lane may read. A pure table.

One slot's life::

    FREE --Reserve--> RESERVED --Write v--> WRITING v --Copied by all, Complete--> COMPLETE v --> ..
                 |                               `----Discard----> FREE
                 `--Revoke--> COMPLETE u (the version that it held before, if any) or FREE

Rules: a pinned slot is never reserved; a version is complete when every rank that writes a part of
it has copied its part; versions only grow; the newest complete image is not overwritten while an
idle lane still wants it; after ``Finish`` none is reserved, so the last image stays for the flush
at shutdown. No rank waits for a slot: without a reservation at the step boundary all ranks skip
that version. They agree because there is one reservation, rank 0's, and it travels with the batch.
"""

from collections.abc import Collection
from dataclasses import dataclass, replace
from enum import Enum

from titan_grpo.errors import ProtocolError


class Phase(Enum):
    """State of a slot."""

    FREE = "free"
    RESERVED = "reserved"
    WRITING = "writing"
    COMPLETE = "complete"


@dataclass(frozen=True, slots=True)
class Slot:
    """One image in host memory. ``pins``: the lanes that read it now; ``missing``: the ranks that
    have not copied their part yet.

    A reserved slot keeps the version that it held: its bytes stay until the trainer takes the
    reservation.
    """

    phase: Phase = Phase.FREE
    version: int | None = None
    pins: frozenset[str] = frozenset()
    missing: frozenset[int] = frozenset()

    def __repr__(self) -> str:
        version = "" if self.version is None else f" v{self.version}"
        missing = f" without {','.join(map(str, sorted(self.missing)))}" if self.missing else ""
        pins = f" <{','.join(sorted(self.pins))}>" if self.pins else ""
        return f"{self.phase.value}{version}{missing}{pins}"


@dataclass(frozen=True, slots=True)
class SlotTable:
    """All slots of one trainer host."""

    slots: tuple[Slot, ...]
    finished: bool = False

    def __repr__(self) -> str:
        return "[" + " | ".join(map(repr, self.slots)) + "]" + " finished" * self.finished

    @classmethod
    def of(cls, num_slots: int) -> "SlotTable":
        """Return a table of free slots. Raises ProtocolError for fewer than 2."""
        if num_slots < 2:
            raise ProtocolError(
                f"a boundary needs 2 or more slots, got {num_slots}: one is written while another"
                " is read"
            )
        return cls((Slot(),) * num_slots)

    @classmethod
    def left(
        cls, num_slots: int, taken: Collection[int], complete: tuple[int, int] | None
    ) -> "SlotTable":
        """Return the table of a restarted sync process. ``taken``: slots whose reservation the
        trainer has taken; ``complete``: slot and version of a complete image, if any."""
        slots = list(cls.of(num_slots).slots)
        if complete is not None:
            slots[complete[0]] = Slot(Phase.COMPLETE, complete[1])
        for index in taken:  # last: the trainer may be overwriting the complete image already
            slots[index] = Slot(Phase.RESERVED)
        return cls(tuple(slots))

    @property
    def newest(self) -> int | None:
        """Newest complete version, or None."""
        return max(
            (s.version for s in self.slots if s.phase is Phase.COMPLETE and s.version is not None),
            default=None,
        )

    def slot_of(self, version: int) -> int:
        """Return the index of the slot with ``version``. Raises ProtocolError if none has it."""
        for index, slot in enumerate(self.slots):
            if slot.version == version:
                return index
        raise ProtocolError(f"no slot holds version {version}: {self!r}")

    def revocable(self, newer_than: int | None) -> bool:
        """Return whether the reserved slot still holds a version newer than ``newer_than`` and than
        every complete one: revoking the reservation gives a waiting lane its image."""
        known = max(
            -1 if newer_than is None else newer_than, -1 if self.newest is None else self.newest
        )
        return any(
            s.phase is Phase.RESERVED and s.version is not None and s.version > known
            for s in self.slots
        )


@dataclass(frozen=True, slots=True)
class Reserve:
    """Look for a slot for the next version.

    ``waiting``: the versions that idle lanes hold, which want a newer one. While one of them has
    not read the newest complete image, that is kept: otherwise, while a slow lane pins the other
    slot, each new image would be overwritten before a healthy lane could pin it.
    """

    waiting: tuple[int | None, ...]


@dataclass(frozen=True, slots=True)
class Revoke:
    """Take back a reservation that the trainer has not seen: the slot is as before it."""

    slot: int


@dataclass(frozen=True, slots=True)
class Write:
    """The trainer copies ``version`` into the reserved slot; each of ``ranks`` writes a part."""

    slot: int
    version: int
    ranks: frozenset[int]


@dataclass(frozen=True, slots=True)
class Copied:
    """One rank's part of ``version`` is in the image."""

    version: int
    rank: int


@dataclass(frozen=True, slots=True)
class Complete:
    """The digests of ``version`` are known: lanes may read it."""

    version: int


@dataclass(frozen=True, slots=True)
class Discard:
    """The copy of ``version`` failed: its slot is free again. No lane has read it."""

    version: int


@dataclass(frozen=True, slots=True)
class Pin:
    """``lane`` wants the newest complete image, if it is newer than ``newer_than``."""

    lane: str
    newer_than: int | None


@dataclass(frozen=True, slots=True)
class Unpin:
    """``lane`` does not read its image any more. A lane without a pin is a programming error."""

    lane: str


@dataclass(frozen=True, slots=True)
class Finish:
    """No more versions follow: a reserved slot becomes free, the newest image stays readable."""


Event = Reserve | Revoke | Write | Copied | Complete | Discard | Pin | Unpin | Finish


@dataclass(frozen=True, slots=True)
class Promise:
    """The next version goes to ``slot``: pass the number to the trainer."""

    slot: int


@dataclass(frozen=True, slots=True)
class Read:
    """The lane of the Pin may read ``version`` in ``slot`` until it unpins."""

    version: int
    slot: int


Action = Promise | Read
_Result = tuple[SlotTable, tuple[Action, ...]]


def _put(b: SlotTable, index: int, slot: Slot) -> SlotTable:
    return SlotTable(b.slots[:index] + (slot,) + b.slots[index + 1 :], b.finished)


def _reserve(b: SlotTable, waiting: tuple[int | None, ...]) -> _Result:
    if b.finished or any(s.phase is Phase.RESERVED for s in b.slots):
        return b, ()
    newest = b.newest
    wanted = newest is not None and any(held is None or held < newest for held in waiting)
    candidates: list[tuple[int, int]] = []
    for index, slot in enumerate(b.slots):
        if slot.phase is Phase.FREE:
            candidates.append((-1, index))
        elif slot.phase is Phase.COMPLETE and not slot.pins and slot.version is not None:
            if slot.version == newest and wanted:
                continue
            candidates.append((slot.version, index))
    if not candidates:
        return b, ()
    index = min(candidates)[1]
    return _put(b, index, Slot(Phase.RESERVED, b.slots[index].version)), (Promise(index),)


def _reserved(b: SlotTable, index: int, what: str) -> Slot:
    slot = b.slots[index]
    if slot.phase is not Phase.RESERVED:
        raise ProtocolError(f"slot {index} must be reserved {what}, it is {slot!r}")
    return slot


def _writing(b: SlotTable, version: int, what: str) -> tuple[int, Slot]:
    index = b.slot_of(version)
    if b.slots[index].phase is not Phase.WRITING:
        raise ProtocolError(
            f"only a version in writing is {what}, version {version} is {b.slots[index]!r}"
        )
    return index, b.slots[index]


def step(b: SlotTable, event: Event) -> _Result:
    """Return the next table and the actions: none for a Reserve or Pin that finds no slot.

    Raises ProtocolError, and changes nothing, for an event that the slot's phase does not list.
    """
    match event:
        case Reserve(waiting):
            return _reserve(b, waiting)
        case Revoke(index):
            slot = _reserved(b, index, "to be revoked")
            before = Slot() if slot.version is None else replace(slot, phase=Phase.COMPLETE)
            return _put(b, index, before), ()
        case Write(index, version, ranks):
            _reserved(b, index, f"before version {version} is written")
            seen = max((s.version for s in b.slots if s.version is not None), default=-1)
            if version <= seen:
                raise ProtocolError(f"versions only grow: version {version} after {seen}")
            if not ranks:
                raise ProtocolError(f"version {version} is written by no rank")
            return _put(b, index, Slot(Phase.WRITING, version, missing=ranks)), ()
        case Copied(version, rank):
            index, slot = _writing(b, version, "copied")
            if rank not in slot.missing:
                raise ProtocolError(f"rank {rank} owes no part of version {version}: {slot!r}")
            return _put(b, index, replace(slot, missing=slot.missing - {rank})), ()
        case Complete(version):
            index, slot = _writing(b, version, "completed")
            if slot.missing:
                raise ProtocolError(f"version {version} is not whole: {slot!r}")
            return _put(b, index, replace(slot, phase=Phase.COMPLETE)), ()
        case Discard(version):
            return _put(b, _writing(b, version, "discarded")[0], Slot()), ()
        case Pin(lane, newer_than):
            if any(lane in s.pins for s in b.slots):
                raise ProtocolError(f"lane {lane} holds a pin already: {b!r}")
            newest = b.newest
            if newest is None or (newer_than is not None and newest <= newer_than):
                return b, ()
            index = b.slot_of(newest)
            slot = b.slots[index]
            after = _put(b, index, replace(slot, pins=slot.pins | {lane}))
            return after, (Read(newest, index),)
        case Unpin(lane):
            for index, slot in enumerate(b.slots):
                if lane in slot.pins:
                    return _put(b, index, replace(slot, pins=slot.pins - {lane})), ()
            raise ProtocolError(f"lane {lane} holds no pin: {b!r}")
        case Finish():
            slots = tuple(Slot() if s.phase is Phase.RESERVED else s for s in b.slots)
            return SlotTable(slots, finished=True), ()
