"""The trainer's side as an explorable machine: step boundaries, the ranks' copies, and the slots of
the production table.

Every image has one part per rank, so that a part of another version shows. Nothing here looks at a
server, except for the pins that lanes set: that no move of ``moves`` needs one is what "the trainer
never waits" means."""

from typing import NamedTuple

from tests.model_check.tables import Tables, Violation
from titan_grpo.protocol import image_slots as b

WRITING = -1
"""A part that is not copied yet, or only half: whoever reads it reads torn bytes."""


class Trainer(NamedTuple):
    """``trained``: the newest version whose step is over; ``promise``: the slot in the main
    thread's queue; ``told``: per rank, the (version, slot) that it copies; ``parts``: per slot and
    rank, the version that lies there; ``notes``: the (version, rank) of copies that have ended and
    that the sealer has not noted; ``job``: the (version, slot) that it has not begun. Ranks are
    interchangeable, so they are kept in order."""

    trained: int
    table: b.SlotTable
    told: tuple[tuple[int, int] | None, ...]
    parts: tuple[tuple[int, ...], ...]
    promise: int | None = None
    notes: frozenset[tuple[int, int]] = frozenset()
    job: tuple[int, int] | None = None


class Move(NamedTuple):
    """One step of the trainer's side."""

    name: str
    after: Trainer
    fault: bool = False


def start(ranks: int, slots: int, tables: Tables, trained: int = 0) -> Trainer:
    """Before the first version is published, which is ``trained`` + 1."""
    return tidy(
        Trainer(trained, b.SlotTable.of(slots), (None,) * ranks, ((0,) * ranks,) * slots), tables
    )


def check(t: Trainer) -> None:
    """Raise Violation where a lane could read bytes that are not of its version."""
    for slot, parts in zip(t.table.slots, t.parts, strict=True):
        if slot.phase is b.Phase.COMPLETE and any(part != slot.version for part in parts):
            raise Violation(f"complete version {slot.version} has parts {parts}: {t.table!r}")
        if slot.pins and any(part != slot.version for part in parts):
            raise Violation(f"a pinned slot is written: {slot!r} has parts {parts}")


def finished(t: Trainer, versions: int) -> bool:
    """Whether the last version is complete and nothing is under way."""
    return (
        t.trained == versions and t.table.newest == versions and not any(t.told) and t.job is None
    )


def moves(t: Trainer, versions: int, tables: Tables) -> list[Move]:
    """Every step of main thread, ranks and sealer; none of them depends on what a server does."""
    out: list[Move] = []
    if t.trained < versions and not any(t.told):
        out += _boundary(t, versions, tables)
    for rank, told in enumerate(t.told):
        if told is not None:
            out.append(_copy_ends(t, rank, told))
    out += _sealer(t, versions, tables)
    if not t.table.finished and t.promise is None:
        table, actions = tables.boundary(t.table, b.Reserve(()))
        for promised in actions:
            out.append(
                Move(
                    "the newest image's slot is reserved",
                    t._replace(table=table, promise=promised.slot),
                )
            )
    if (
        t.trained == versions
        and not any(t.told)
        and t.job is None
        and not t.table.finished
        and t.table.newest == versions
    ):
        table, _ = tables.boundary(t.table, b.Finish())
        out.append(Move("finished", t._replace(table=table, promise=None)))
    return [m._replace(after=_in_order(tidy(m.after, tables))) for m in out]


def tidy(t: Trainer, tables: Tables) -> Trainer:
    """The steps that commute with all others, taken at once: the sealer begins, a slot is reserved
    that no lane wants."""
    if t.job is not None and not any(s.phase is b.Phase.WRITING for s in t.table.slots):
        version, slot = t.job
        table, _ = tables.boundary(t.table, b.Write(slot, version, frozenset(range(len(t.told)))))
        t = t._replace(table=table, job=None)
    table, actions = tables.boundary(t.table, b.Reserve((None,)))
    for promised in actions:
        t = t._replace(table=table, promise=promised.slot)
    return t


def pin(t: Trainer, lane: str, held: int | None, tables: Tables) -> tuple[Trainer, int | None]:
    """A lane asks for an image newer than ``held``; the version that is pinned for it, if any.

    A promise that the trainer has not taken is taken back if its slot still holds what the lane
    came for.
    """
    if t.promise is not None and t.table.revocable(held):
        t = t._replace(table=tables.boundary(t.table, b.Revoke(t.promise))[0], promise=None)
    table, actions = tables.boundary(t.table, b.Pin(lane, held))
    return tidy(t._replace(table=table), tables), next((read.version for read in actions), None)


def unpin(t: Trainer, lane: str, tables: Tables) -> Trainer:
    """A lane reads its image no more."""
    return tidy(t._replace(table=tables.boundary(t.table, b.Unpin(lane))[0]), tables)


def _boundary(t: Trainer, versions: int, tables: Tables) -> list[Move]:
    """One step is over: rank 0 takes what is promised, and the number travels to all ranks with the
    batch."""
    version = t.trained + 1
    if t.promise is None:
        # the first and the last version are waited for; every other one is skipped
        free = version not in (1, versions)
        return [Move(f"version {version} is skipped", t._replace(trained=version))] if free else []
    slots = [t.promise] * len(t.told)
    if not tables.same_slot:
        slots[-1] = (t.promise + 1) % len(t.table.slots)
    told = tuple((version, slot) for slot in slots)
    if len(set(told)) > 1:
        raise Violation(f"version {version} is published differently by the ranks: {told}")
    # the copies begin at once, which is the worst that they can do: from here on the slot holds
    # nothing whole
    parts = tuple(
        (WRITING,) * len(told) if slot == t.promise else row for slot, row in enumerate(t.parts)
    )
    after = t._replace(trained=version, told=told, job=told[0], promise=None, parts=parts)
    return [Move(f"version {version} is published", after)]


def _copy_ends(t: Trainer, rank: int, told: tuple[int, int]) -> Move:
    """It is over before the parameters change again: that is the fence."""
    version, slot = told
    row = t.parts[slot]
    parts = t.parts[:slot] + (row[:rank] + (version,) + row[rank + 1 :],) + t.parts[slot + 1 :]
    rest = t.told[:rank] + (None,) + t.told[rank + 1 :]
    return Move(
        f"rank {rank} ends its copy",
        t._replace(parts=parts, told=rest, notes=t.notes | {(version, rank)}),
    )


def _sealer(t: Trainer, versions: int, tables: Tables) -> list[Move]:
    out: list[Move] = []
    for written in t.table.slots:
        if written.phase is not b.Phase.WRITING or written.version is None:
            continue
        for version, rank in sorted(t.notes):
            if version == written.version:
                out.append(_note(t, version, rank, tables))
        if written.version not in (1, versions) and not any(t.told):
            table, _ = tables.boundary(t.table, b.Discard(written.version))
            notes = frozenset(n for n in t.notes if n[0] != written.version)
            out.append(Move("copy fails", t._replace(table=table, notes=notes), fault=True))
    return out


def _note(t: Trainer, version: int, rank: int, tables: Tables) -> Move:
    table, _ = tables.boundary(t.table, b.Copied(version, rank))
    if not table.slots[table.slot_of(version)].missing:
        table, _ = tables.boundary(table, b.Complete(version))
    return Move(
        f"rank {rank}'s part is noted", t._replace(table=table, notes=t.notes - {(version, rank)})
    )


def _in_order(t: Trainer) -> Trainer:
    """The same state with its ranks in order."""
    ranks = range(len(t.told))
    owed = [tuple(rank in s.missing for s in t.table.slots) for rank in ranks]
    noted = [tuple(sorted(v for v, r in t.notes if r == rank)) for rank in ranks]
    keys = [
        (t.told[rank] or (), tuple(row[rank] for row in t.parts), noted[rank], owed[rank])
        for rank in ranks
    ]
    order = sorted(ranks, key=keys.__getitem__)
    if order == list(ranks):
        return t
    new = {old: rank for rank, old in enumerate(order)}
    slots = tuple(
        b.Slot(s.phase, s.version, s.pins, frozenset(new[r] for r in s.missing)) if s.missing else s
        for s in t.table.slots
    )
    return t._replace(
        table=b.SlotTable(slots, t.table.finished),
        told=tuple(t.told[rank] for rank in order),
        parts=tuple(tuple(row[rank] for rank in order) for row in t.parts),
        notes=frozenset((version, new[rank]) for version, rank in t.notes),
    )
