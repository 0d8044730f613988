"""Which slot the next version image is written to, and which image a lane may read. A pure table.

One slot's life::

    FREE --Reserve--> RESERVED --Write v--> WRITING v --Copied by all, Complete--> COMPLETE v --> ..
                 |                               `----Discard----> FREE
                 `--Revoke--> COMPLETE u (what it held before, if anything) or FREE

Rules: a pinned slot is never reserved; a version is complete when every rank that writes a part of
it has copied its part; versions only grow; the newest complete image is not taken while an idle
lane still wants it; after ``Seal`` nothing is reserved any more, so the last image stays for the
flush at shutdown. No rank waits: without a reservation at the step boundary that version is
skipped, on every rank alike, because rank 0's reservation is the only one and travels with the
batch.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from titan_grpo.errors import ProtocolError


class Phase(Enum):
    """Life of a slot."""

    FREE = "free"
    RESERVED = "reserved"
    WRITING = "writing"
    COMPLETE = "complete"


@dataclass(frozen=True, slots=True)
class Slot:
    """One image in host memory. ``pins``: the lanes that read it now; ``missing``: the ranks whose
    part is not there yet.

    A reserved slot keeps the version that it held: until the trainer has taken the reservation, the
    bytes are there.
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
    sealed: bool = False

    def __repr__(self) -> str:
        return "[" + " | ".join(map(repr, self.slots)) + "]" + (" sealed" if self.sealed else "")

    @classmethod
    def of(cls, num_slots: int) -> "SlotTable":
        """A boundary with ``num_slots`` free slots (2 or more)."""
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
        """What a process has left that kept this table: the slots that the trainer has ``taken``,
        and slot and version of an image that is still ``complete``. No lane reads any."""
        slots = list(cls.of(num_slots).slots)
        if complete is not None:
            slots[complete[0]] = Slot(Phase.COMPLETE, complete[1])
        for index in taken:
            slots[index] = Slot(Phase.RESERVED)
        return cls(tuple(slots))

    @property
    def newest(self) -> int | None:
        """Greatest complete version, or None."""
        return max(
            (s.version for s in self.slots if s.phase is Phase.COMPLETE and s.version is not None),
            default=None,
        )

    def slot_of(self, version: int) -> int:
        """Index of the slot that holds ``version``."""
        for index, slot in enumerate(self.slots):
            if slot.version == version:
                return index
        raise ProtocolError(f"no slot holds version {version}: {self!r}")

    def revocable(self, newer_than: int | None) -> bool:
        """Whether the reserved slot still holds what a lane with ``newer_than`` waits for, and no
        complete slot does."""
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

    ``newest_wanted``: an idle lane has not read the newest complete image yet. Without this, a slow
    lane that pins the other slot would make every new image vanish before a healthy lane could pin
    it.
    """

    newest_wanted: bool


@dataclass(frozen=True, slots=True)
class Revoke:
    """Take back a reservation that the trainer has not seen: the slot is what it was before."""

    slot: int


@dataclass(frozen=True, slots=True)
class Write:
    """The trainer starts to copy ``version`` into the reserved slot; ``ranks`` write a part of it
    each."""

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
    """The copy of ``version`` failed; its slot is free again; no lane has seen it."""

    version: int


@dataclass(frozen=True, slots=True)
class Pin:
    """``lane`` wants the newest complete image, if it is newer than ``newer_than``."""

    lane: str
    newer_than: int | None


@dataclass(frozen=True, slots=True)
class Unpin:
    """``lane`` reads its image no more. A lane without a pin is an error of ours."""

    lane: str


@dataclass(frozen=True, slots=True)
class Seal:
    """No more versions follow: what is reserved is given back and the newest image stays
    readable."""


Event = Reserve | Revoke | Write | Copied | Complete | Discard | Pin | Unpin | Seal


@dataclass(frozen=True, slots=True)
class Promise:
    """The next version goes to ``slot``: hand the number to the trainer."""

    slot: int


@dataclass(frozen=True, slots=True)
class Read:
    """The lane that asked may read ``version`` in ``slot`` until it unpins."""

    version: int
    slot: int


@dataclass(frozen=True, slots=True)
class Hash:
    """Every part of ``version`` is there: compute its digests."""

    version: int


Action = Promise | Read | Hash
_Result = tuple[SlotTable, tuple[Action, ...]]


def _put(b: SlotTable, index: int, slot: Slot) -> SlotTable:
    return SlotTable(b.slots[:index] + (slot,) + b.slots[index + 1 :], b.sealed)


def _reserve(b: SlotTable, e: Reserve) -> _Result:
    if b.sealed or any(s.phase is Phase.RESERVED for s in b.slots):
        return b, ()
    newest = b.newest
    candidates: list[tuple[int, int]] = []
    for index, slot in enumerate(b.slots):
        if slot.phase is Phase.FREE:
            candidates.append((-1, index))
        elif slot.phase is Phase.COMPLETE and not slot.pins and slot.version is not None:
            if slot.version == newest and e.newest_wanted:
                continue
            candidates.append((slot.version, index))
    if not candidates:
        return b, ()
    index = min(candidates)[1]
    return _put(b, index, Slot(Phase.RESERVED, b.slots[index].version)), (Promise(index),)


def _revoke(b: SlotTable, e: Revoke) -> _Result:
    slot = b.slots[e.slot]
    if slot.phase is not Phase.RESERVED:
        raise ProtocolError(f"only a reservation is revoked, slot {e.slot} is {slot!r}")
    return (
        _put(b, e.slot, Slot() if slot.version is None else replace(slot, phase=Phase.COMPLETE)),
        (),
    )


def _write(b: SlotTable, e: Write) -> _Result:
    slot = b.slots[e.slot]
    if slot.phase is not Phase.RESERVED:
        raise ProtocolError(
            f"slot {e.slot} must be reserved before version {e.version} is written, it is {slot!r}"
        )
    seen = max((s.version for s in b.slots if s.version is not None), default=-1)
    if e.version <= seen:
        raise ProtocolError(f"versions only grow: version {e.version} after {seen}")
    if not e.ranks:
        raise ProtocolError(f"version {e.version} is written by no rank")
    return _put(b, e.slot, Slot(Phase.WRITING, e.version, missing=e.ranks)), ()


def _copied(b: SlotTable, e: Copied) -> _Result:
    index, slot = _writing(b, e.version, "copied")
    if e.rank not in slot.missing:
        raise ProtocolError(f"rank {e.rank} owes no part of version {e.version}: {slot!r}")
    missing = slot.missing - {e.rank}
    return _put(b, index, replace(slot, missing=missing)), () if missing else (Hash(e.version),)


def _complete(b: SlotTable, e: Complete) -> _Result:
    index, slot = _writing(b, e.version, "completed")
    if slot.missing:
        raise ProtocolError(f"version {e.version} is not whole: {slot!r}")
    return _put(b, index, replace(slot, phase=Phase.COMPLETE)), ()


def _discard(b: SlotTable, e: Discard) -> _Result:
    return _put(b, _writing(b, e.version, "discarded")[0], Slot()), ()


def _pin(b: SlotTable, e: Pin) -> _Result:
    if any(e.lane in s.pins for s in b.slots):
        raise ProtocolError(f"lane {e.lane} holds a pin already: {b!r}")
    newest = b.newest
    if newest is None or (e.newer_than is not None and newest <= e.newer_than):
        return b, ()
    index = b.slot_of(newest)
    slot = b.slots[index]
    return _put(b, index, replace(slot, pins=slot.pins | {e.lane})), (Read(newest, index),)


def _unpin(b: SlotTable, e: Unpin) -> _Result:
    for index, slot in enumerate(b.slots):
        if e.lane in slot.pins:
            return _put(b, index, replace(slot, pins=slot.pins - {e.lane})), ()
    raise ProtocolError(f"lane {e.lane} holds no pin: {b!r}")


def _seal(b: SlotTable, _: Any) -> _Result:
    slots = tuple(Slot() if s.phase is Phase.RESERVED else s for s in b.slots)
    return SlotTable(slots, sealed=True), ()


def _writing(b: SlotTable, version: int, what: str) -> tuple[int, Slot]:
    index = b.slot_of(version)
    if b.slots[index].phase is not Phase.WRITING:
        raise ProtocolError(
            f"only a version in writing is {what}, version {version} is {b.slots[index]!r}"
        )
    return index, b.slots[index]


TRANSITIONS: dict[type, Callable[[SlotTable, Any], _Result]] = {
    Reserve: _reserve,
    Revoke: _revoke,
    Write: _write,
    Copied: _copied,
    Complete: _complete,
    Discard: _discard,
    Pin: _pin,
    Unpin: _unpin,
    Seal: _seal,
}


def step(b: SlotTable, event: Event) -> _Result:
    """The next slots and what follows from it. A request that finds nothing has no action.

    An event that a slot's phase does not list raises ProtocolError and changes nothing.
    """
    return TRANSITIONS[type(event)](b, event)
