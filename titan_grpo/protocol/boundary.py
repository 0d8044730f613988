"""Which slot the next version image is written to, and which image a lane may read. A pure table.

One slot's life::

    FREE --reserve--> RESERVED --write(v)--> WRITING v --complete--> COMPLETE v --reserve--> RESERVED
                 |                               `----discard----> FREE
                 `--revoke--> COMPLETE u (what it held before, if anything) or FREE

Rules: a pinned slot is never reserved; versions only grow; the newest complete image is not taken while an idle lane
still wants it; after ``seal`` nothing is reserved any more, so the last image stays for the flush at shutdown. Nobody
waits: without a reservation at the step boundary that version is skipped, on every rank alike, because rank 0's
reservation is the only one and travels with the batch.
"""

from dataclasses import dataclass, replace
from enum import Enum

from titan_grpo.errors import ProtocolError


class Phase(Enum):
    """Life of a slot."""

    FREE = "free"
    RESERVED = "reserved"
    WRITING = "writing"
    COMPLETE = "complete"


@dataclass(frozen=True, slots=True)
class Slot:
    """One image in host memory; ``pins`` are the lanes that read it now.

    A reserved slot keeps the version that it held: until the trainer has taken the reservation, the bytes are there.
    """

    phase: Phase = Phase.FREE
    version: int | None = None
    pins: frozenset[str] = frozenset()

    def __repr__(self) -> str:
        version = "" if self.version is None else f" v{self.version}"
        pins = f" <{','.join(sorted(self.pins))}>" if self.pins else ""
        return f"{self.phase.value}{version}{pins}"


@dataclass(frozen=True, slots=True)
class Boundary:
    """All slots of one trainer host."""

    slots: tuple[Slot, ...]
    sealed: bool = False

    def __repr__(self) -> str:
        return "[" + " | ".join(map(repr, self.slots)) + "]" + (" sealed" if self.sealed else "")

    @classmethod
    def of(cls, num_slots: int) -> "Boundary":
        """A boundary with ``num_slots`` free slots (2 or more)."""
        if num_slots < 2:
            raise ProtocolError(f"a boundary needs 2 or more slots, got {num_slots}: one is written while another is read")
        return cls((Slot(),) * num_slots)

    @property
    def newest(self) -> int | None:
        """Greatest complete version, or None."""
        return max((s.version for s in self.slots if s.phase is Phase.COMPLETE and s.version is not None), default=None)

    def slot_of(self, version: int) -> int:
        """Index of the slot that holds ``version``."""
        for index, slot in enumerate(self.slots):
            if slot.version == version:
                return index
        raise ProtocolError(f"no slot holds version {version}: {self!r}")


def _put(b: Boundary, index: int, slot: Slot) -> Boundary:
    return replace(b, slots=b.slots[:index] + (slot,) + b.slots[index + 1 :])


def reserve(b: Boundary, newest_wanted: bool) -> tuple[Boundary, int | None]:
    """Reserve a slot for the next version; (unchanged, None) if there is none, or one is reserved already.

    ``newest_wanted``: an idle lane has not read the newest complete image yet. Without this, a slow lane that pins the
    other slot would make every new image vanish before a healthy lane could pin it.
    """
    if b.sealed or any(s.phase is Phase.RESERVED for s in b.slots):
        return b, None
    newest = b.newest
    candidates: list[tuple[int, int]] = []
    for index, slot in enumerate(b.slots):
        if slot.phase is Phase.FREE:
            candidates.append((-1, index))
        elif slot.phase is Phase.COMPLETE and not slot.pins and slot.version is not None:
            if slot.version == newest and newest_wanted:
                continue
            candidates.append((slot.version, index))
    if not candidates:
        return b, None
    index = min(candidates)[1]
    return _put(b, index, Slot(Phase.RESERVED, b.slots[index].version)), index


def revocable(b: Boundary, newer_than: int | None) -> bool:
    """Whether the reserved slot still holds what a lane with ``newer_than`` waits for, and no complete slot does."""
    known = max(-1 if newer_than is None else newer_than, -1 if b.newest is None else b.newest)
    return any(s.phase is Phase.RESERVED and s.version is not None and s.version > known for s in b.slots)


def revoke(b: Boundary, index: int) -> Boundary:
    """Take back a reservation that the trainer has not seen: the slot is what it was before."""
    slot = b.slots[index]
    if slot.phase is not Phase.RESERVED:
        raise ProtocolError(f"only a reservation is revoked, slot {index} is {slot!r}")
    return _put(b, index, Slot() if slot.version is None else replace(slot, phase=Phase.COMPLETE))


def write(b: Boundary, index: int, version: int) -> Boundary:
    """The trainer starts to copy ``version`` into the reserved slot ``index``."""
    slot = b.slots[index]
    if slot.phase is not Phase.RESERVED:
        raise ProtocolError(f"slot {index} must be reserved before version {version} is written, it is {slot!r}")
    seen = max((s.version for s in b.slots if s.version is not None), default=-1)
    if version <= seen:
        raise ProtocolError(f"versions only grow: version {version} after {seen}")
    return _put(b, index, Slot(Phase.WRITING, version))


def complete(b: Boundary, version: int) -> Boundary:
    """All ranks have copied ``version`` and its digests are known: lanes may read it."""
    index = b.slot_of(version)
    slot = b.slots[index]
    if slot.phase is not Phase.WRITING:
        raise ProtocolError(f"version {version} must be in writing to become complete, its slot is {slot!r}")
    return _put(b, index, replace(slot, phase=Phase.COMPLETE))


def discard(b: Boundary, version: int) -> Boundary:
    """The copy of ``version`` failed; its slot is free again and nobody has seen it."""
    index = b.slot_of(version)
    if b.slots[index].phase is not Phase.WRITING:
        raise ProtocolError(f"only a version in writing is discarded, version {version} is {b.slots[index]!r}")
    return _put(b, index, Slot())


def pin(b: Boundary, lane: str, newer_than: int | None) -> tuple[Boundary, int | None]:
    """Pin the newest complete image for ``lane`` if it is newer than ``newer_than``; (unchanged, None) otherwise."""
    if any(lane in s.pins for s in b.slots):
        raise ProtocolError(f"lane {lane} holds a pin already: {b!r}")
    newest = b.newest
    if newest is None or (newer_than is not None and newest <= newer_than):
        return b, None
    index = b.slot_of(newest)
    slot = b.slots[index]
    return _put(b, index, replace(slot, pins=slot.pins | {lane})), newest


def unpin(b: Boundary, lane: str) -> Boundary:
    """Drop the pin of ``lane``. A lane without a pin is an error of ours."""
    for index, slot in enumerate(b.slots):
        if lane in slot.pins:
            return _put(b, index, replace(slot, pins=slot.pins - {lane}))
    raise ProtocolError(f"lane {lane} holds no pin: {b!r}")


def seal(b: Boundary) -> Boundary:
    """No more versions follow: what is reserved is given back and the newest image stays readable."""
    slots = tuple(Slot() if s.phase is Phase.RESERVED else s for s in b.slots)
    return Boundary(slots, sealed=True)
