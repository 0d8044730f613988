"""All schedules of a version whose bytes two trainer hosts have: rank 0's host, another host's
leader, and one receiver that reads from both.

The slot table and what rank 0 thinks of a part are production's. Bytes are the number of the
version that lies there, a digest is that number too, and TORN where bytes changed meanwhile."""

import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from tests.model_check.small import Bug, Hope, Result, search_from
from tests.model_check.tables import Violation
from titan_grpo.protocol import image_slots as b
from titan_grpo.protocol.messages import Hashed, RangeSource

TORN = -1
FAILED = -2
SLOTS = 2
LANE = "1"
SOURCE = RangeSource("", 0, "", part=1)


class Reading(NamedTuple):
    """What a receiver has read of a version: per host the digest of its bytes. ``pinned``: its lane
    still waits for it."""

    version: int
    slot: int
    got: tuple[int | None, int | None] = (None, None)
    pinned: bool = True


class World(NamedTuple):
    """``bytes``: per slot, what lies there on either host. ``jobs``: of the leader, oldest first;
    ``hashing``: (version, slot, bytes when it began). ``said``: (version, digest or FAILED) in rank
    0's store. ``sealing``: (version, slot) that rank 0 waits with; ``next``: behind it.
    ``complete``: (version, its two digests). ``tickets``: per slot, what the leader serves."""

    trained: int = 0
    table: b.SlotTable = b.SlotTable.of(SLOTS)
    promise: int | None = None
    bytes: tuple[tuple[int, int], ...] = ((0, 0),) * SLOTS
    jobs: tuple[tuple[int, int], ...] = ()
    hashing: tuple[int, int, int] | None = None
    said: frozenset[tuple[int, int]] = frozenset()
    sealing: tuple[int, int] | None = None
    next: tuple[int, int] | None = None
    complete: tuple[tuple[int, int, int], ...] = ()
    tickets: tuple[int, ...] = (0,) * SLOTS
    reading: Reading | None = None
    staged: int = 0
    dead: bool = False
    faults: int = 0


@dataclass(frozen=True, slots=True)
class Rules:
    """What decides, which a seeded bug replaces."""

    problem: Callable[[Hashed, int, int], str] = Hashed.problem
    writers: frozenset[int] = frozenset({0, 1})
    matches: Callable[[tuple[int | None, int | None], tuple[int, int]], bool] = operator.eq
    leader_goes_on: bool = True
    """After a part that failed."""


Move = tuple[str, World]


def check(w: World) -> None:
    """Raise Violation where a lane is offered, or a receiver has, anything but one version."""
    digests = {version: (one, two) for version, one, two in w.complete}
    for slot, lies in zip(w.table.slots, w.bytes, strict=True):
        if slot.phase is b.Phase.COMPLETE and slot.version is not None:
            whole = slot.version, slot.version
            if lies != whole or digests[slot.version] != whole:
                raise Violation(
                    f"complete version {slot.version} has bytes {lies} and digests"
                    f" {digests[slot.version]}"
                )
        if slot.pins and lies != (slot.version, slot.version):
            raise Violation(f"a pinned slot is written on a host: {slot!r} has {lies}")


def moves(w: World, versions: int, rules: Rules) -> Iterator[Move]:
    """Every step of training, rank 0's sealer, the leader, the receiver and the environment."""
    yield from _training(w, versions)
    if not w.dead:
        yield from _leader(w, rules)
    yield from _sealer(w, versions, rules)
    yield from _receiver(w, rules)


def _training(w: World, versions: int) -> Iterator[Move]:
    if w.promise is None:
        waiting = (w.staged,) if w.reading is None else ()
        table, actions = b.step(w.table, b.Reserve(waiting))
        for promised in actions:
            assert isinstance(promised, b.Promise)
            yield "a slot is reserved", w._replace(table=table, promise=promised.slot)
    version = w.trained + 1
    if version > versions or w.next is not None:
        return
    if w.promise is None:
        if version < versions:
            yield f"version {version} is skipped", w._replace(trained=version)
        return
    slot = w.promise
    lies = tuple((version, version) if i == slot else old for i, old in enumerate(w.bytes))
    job = version, slot
    after = w._replace(trained=version, promise=None, bytes=lies, jobs=(*w.jobs, job), next=job)
    yield f"version {version} is copied on both hosts", after


def _leader(w: World, rules: Rules) -> Iterator[Move]:
    if w.hashing is None and w.jobs:
        (version, slot), *rest = w.jobs
        tickets = tuple(0 if i == slot else t for i, t in enumerate(w.tickets))
        begun = version, slot, w.bytes[slot][1]
        yield (
            f"the leader begins to hash version {version}",
            w._replace(jobs=tuple(rest), hashing=begun, tickets=tickets),
        )
    if w.hashing is not None:
        version, slot, before = w.hashing
        lies = w.bytes[slot][1]
        ok = lies == version
        said = (version, before if before == lies else TORN) if ok else (version, FAILED)
        tickets = tuple(version if ok and i == slot else t for i, t in enumerate(w.tickets))
        after = w._replace(hashing=None, said=w.said | {said}, tickets=tickets)
        if not ok and not rules.leader_goes_on:
            after = after._replace(jobs=(), hashing=(version, slot, before))
        yield f"the leader has hashed version {version}", after
    yield (
        "the other host dies",
        w._replace(dead=True, tickets=(0,) * SLOTS, faults=w.faults + 1),
    )


def _sealer(w: World, versions: int, rules: Rules) -> Iterator[Move]:
    if w.sealing is None and w.next is not None:
        version, slot = w.next
        table, _ = b.step(w.table, b.Write(slot, version, rules.writers))
        table, _ = b.step(table, b.Copied(version, 0))
        yield f"rank 0 hashes version {version}", w._replace(table=table, sealing=w.next, next=None)
    if w.sealing is None:
        return
    version, slot = w.sealing
    if rules.writers == frozenset({0}):
        yield _completed(w, version, 0)
        return
    for told in sorted(w.said):
        error = "it failed" if told[1] == FAILED else ""
        why = rules.problem(Hashed(told[0], SOURCE, "", error), version, 1)
        left = w._replace(said=w.said - {told})
        if not why:
            table, _ = b.step(left.table, b.Copied(version, 1))
            yield _completed(left._replace(table=table), version, told[1])
        elif told[0] == version:
            table, _ = b.step(left.table, b.Discard(version))
            yield f"version {version} failed", left._replace(table=table, sealing=None)
    if version < versions:
        table, _ = b.step(w.table, b.Discard(version))
        late = w._replace(table=table, sealing=None, faults=w.faults + 1)
        yield f"the other part of version {version} is late", late


def _completed(w: World, version: int, digest: int) -> Move:
    table, _ = b.step(w.table, b.Complete(version))
    complete = (*w.complete, (version, version, digest))
    after = w._replace(table=table, sealing=None, complete=complete)
    return f"version {version} is complete", after


def _receiver(w: World, rules: Rules) -> Iterator[Move]:
    reading = w.reading
    if reading is None:
        table, promise = w.table, w.promise
        if promise is not None and table.revocable(w.staged):
            table, promise = b.step(table, b.Revoke(promise))[0], None
        table, actions = b.step(table, b.Pin(LANE, w.staged))
        for found in actions:
            assert isinstance(found, b.Read)
            begun = Reading(found.version, found.slot)
            yield (
                f"the lane pins version {found.version}",
                w._replace(table=table, promise=promise, reading=begun),
            )
        return
    unpinned = b.step(w.table, b.Unpin(LANE))[0] if reading.pinned else w.table
    over = w._replace(table=unpinned, reading=None)
    for host in (0, 1):
        if reading.got[host] is not None:
            continue
        # rank 0's ticket ends with the pin; a byte that was on its way comes all the same
        if host == 1 and w.tickets[reading.slot] == 0:
            yield "the other host serves no more", over
            continue
        lies = w.bytes[reading.slot][host]
        got = (lies, reading.got[1]) if host == 0 else (reading.got[0], lies)
        yield f"host {host}'s part is read", w._replace(reading=reading._replace(got=got))
    if None not in reading.got:
        wanted = next((one, two) for version, one, two in w.complete if version == reading.version)
        if not rules.matches(reading.got, wanted):
            yield "a block differs", over
        elif reading.got != (reading.version, reading.version):
            raise Violation(f"version {reading.version} is staged with bytes {reading.got}")
        else:
            staged = max(w.staged, reading.version)
            yield f"version {reading.version} is staged", over._replace(staged=staged)
    if reading.pinned:
        alone = reading._replace(pinned=False)
        yield (
            "the lane gives the transfer up, the receiver reads on",
            w._replace(table=unpinned, reading=alone, faults=w.faults + 1),
        )


def explore_hosts(versions: int, rules: Rules | None = None, faults: int = 2) -> Result:
    """All states with at most ``faults`` faults; and from each in which the other host lives, the
    receiver gets the last version once faults stop."""
    decides = rules or Rules()
    return search_from(
        World(),
        lambda w: moves(w, versions, decides),
        check,
        faults,
        Hope(
            lambda w: w.staged == versions,
            lambda w: not w.dead,
            "the receiver never gets the last version although faults stop",
        ),
    )


def _bug(name: str, breaks: str, rules: Rules) -> Bug:
    """Three versions are enough for each."""
    return Bug(name, breaks, partial(explore_hosts, 3, rules))


HOST_BUGS = (
    _bug(
        "a part of an older version is taken for the one that is waited for",
        "a version is whole when every host has hashed that version",
        Rules(problem=lambda hashed, version, part: hashed.error),
    ),
    _bug(
        "rank 0's host alone completes a version",
        "a version is whole when every host has hashed that version",
        Rules(writers=frozenset({0})),
    ),
    _bug(
        "a receiver does not check what a host sends",
        "a slot that is reused under a late reader is noticed and never staged",
        Rules(matches=lambda got, wanted: True),
    ),
    _bug(
        "a leader stops at a version that failed",
        "what a host does not hash in time costs that version and no other",
        Rules(leader_goes_on=False),
    ),
)
