"""All schedules of one server that reads patches: versions that fail after their copy, a slot that
is written anew while a patch is made of it, patches that are lost or kept no more, transfers that
end half done, and a receiver that is restarted. With two trainer hosts each makes the patches of
its part: one may have made that of a version that failed for the other, or be started again.

Which patches are kept and which are taken is production's (protocol.patches). An image has two
elements, of which each version changes one; a patch says by how much, so that it makes nonsense of
anything but its base. Of two hosts each has one element."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, TypeVar

from tests.model_check.small import Bug, Hope, Result, search_from
from tests.model_check.tables import Violation
from titan_grpo.protocol import patches as p

SLOTS = 2
ROOM = 2
"""Changed elements that all patches may have which the hosts keep."""

Image = tuple[int, int]
T = TypeVar("T")


def content(version: int) -> Image:
    """Odd versions change the first element, even ones the second."""
    odd, even = version - (version % 2 == 0), version - version % 2
    return 4 ** max(0, odd), 4**even


class Patch(NamedTuple):
    """``sound``: its base's slot was not written meanwhile."""

    base: int
    version: int
    part: int
    changes: Image
    sound: bool

    @property
    def nbytes(self) -> int:
        return 2 - self.changes.count(0)


class Host(NamedTuple):
    """``last``: version and slot of the next patch's base."""

    last: p.Place | None = None
    kept: tuple[Patch, ...] = ()


class Order(NamedTuple):
    """``slot``: pinned. ``patches``: those that are left. ``whole``: parts whose patches were all
    sound, none lost. ``patched``: one was applied."""

    version: int
    slot: int
    patches: tuple[Patch, ...]
    begun: bool = False
    whole: frozenset[int] = frozenset()
    patched: bool = False


class World(NamedTuple):
    """``slots``: what lies there. ``sealing``: (version, slot); ``racing``: the slot that the
    version after it is being copied into. ``newest``: (version, slot) that lanes may pin;
    ``chain``: what leads to it. ``lane`` and ``staged``: what lane and receiver take for staged."""

    hosts: tuple[Host, ...]
    trained: int = 0
    slots: tuple[Image, ...] = (content(0),) * SLOTS
    sealing: tuple[int, int] | None = None
    racing: int | None = None
    newest: tuple[int, int] | None = None
    chain: tuple[Patch, ...] = ()
    order: Order | None = None
    lane: int | None = None
    staged: int | None = None
    image: Image = (0, 0)
    faults: int = 0

    def elements(self, part: int) -> range:
        """Those that a host has."""
        return range(2) if len(self.hosts) == 1 else range(part, part + 1)


@dataclass(frozen=True, slots=True)
class Rules:
    """What decides, which a seeded bug replaces."""

    kept: Callable[[Patch | None, Sequence[Patch], int], tuple[Patch, ...]] = p.kept
    leading_from: Callable[[int | None, Sequence[Patch]], tuple[Patch, ...]] = p.leading_from
    clears: bool = True
    """What was staged is no base from the beginning of the next transfer on."""
    still_there: Callable[[p.Place | None, int], p.Place | None] = p.still_there
    checks: bool = True
    """The blocks of a patched image are checked, and read where they differ."""


Move = tuple[str, World]


def moves(w: World, versions: int, rules: Rules) -> Iterator[Move]:
    """Every step of training, hosts, lane, receiver and environment."""
    yield from _sealer(w, versions, rules)
    if w.order is None:
        if w.newest is not None and (w.lane is None or w.lane < w.newest[0]):
            yield _ordered(w, w.newest, rules)
    elif not w.order.begun:
        yield _begun(w, w.order, rules)
    else:
        yield from _receiver(w, w.order, rules)
    lost = w._replace(order=None, lane=None, staged=None, faults=w.faults + 1)
    yield "the epoch ends", lost
    yield "the receiver is restarted", lost._replace(image=(0, 0))
    if len(w.hosts) > 1 and w.hosts[1] != Host():
        again = w._replace(hosts=(w.hosts[0], Host()), faults=w.faults + 1)
        yield "the second host's process is started again", again


def _sealer(w: World, versions: int, rules: Rules) -> Iterator[Move]:
    pinned = w.order.slot if w.order is not None else None
    if w.sealing is None and w.trained < versions:
        version = w.trained + 1
        for slot in range(SLOTS) if w.racing is None else (w.racing,):
            if slot == pinned:
                continue
            slots = _put(w.slots, slot, content(version))
            after = w._replace(trained=version, slots=slots, sealing=(version, slot), racing=None)
            newest = None if w.newest is not None and w.newest[1] == slot else w.newest
            hosts = tuple(h._replace(last=rules.still_there(h.last, slot)) for h in w.hosts)
            after = after._replace(newest=newest, hosts=hosts)
            yield f"version {version} is copied into slot {slot}", after
    if w.sealing is None:
        return
    version, slot = w.sealing
    made = tuple(_patched(w, part, version, slot, rules) for part in range(len(w.hosts)))
    chain = tuple(patch for host in made for patch in host.kept)
    if sum(patch.nbytes for patch in chain) > ROOM:
        raise Violation(f"patches of more than {ROOM} bytes are kept")
    done = w._replace(sealing=None, hosts=made, newest=w.sealing, chain=chain)
    yield f"version {version} is complete", done
    if version < versions:
        yield f"version {version} fails", w._replace(sealing=None)
        for part in range(len(made)) if len(made) > 1 else ():
            after = w._replace(sealing=None, hosts=_put(w.hosts, part, made[part]))
            yield f"version {version} fails after host {part} made its patch", after
        for other in range(SLOTS):
            if w.racing is None and other not in (slot, pinned):
                element = content(version + 1)[0], w.slots[other][1]
                newest = None if w.newest is not None and w.newest[1] == other else w.newest
                slots = _put(w.slots, other, element)
                racing = w._replace(racing=other, slots=slots, newest=newest)
                yield f"version {version + 1} begins in slot {other}", racing


def _put(old: tuple[T, ...], at: int, new: T) -> tuple[T, ...]:
    return (*old[:at], new, *old[at + 1 :])


def _patched(w: World, part: int, version: int, slot: int, rules: Rules) -> Host:
    """A host once it has made its patch."""
    host, place = w.hosts[part], (version, slot)
    if host.last is None:
        return Host(place, rules.kept(None, host.kept, ROOM // len(w.hosts)))
    base, at = host.last
    first, second = (
        w.slots[slot][e] - w.slots[at][e] if e in w.elements(part) else 0 for e in range(2)
    )
    # the next version's copy has come to the first element
    sound = w.racing != at or 0 not in w.elements(part)
    patch = Patch(base, version, part, (first, second), sound)
    return Host(place, rules.kept(patch, host.kept, ROOM // len(w.hosts)))


def _ordered(w: World, newest: tuple[int, int], rules: Rules) -> Move:
    version, slot = newest
    order = Order(version, slot, rules.leading_from(w.lane, w.chain))
    lane = None if rules.clears else w.lane
    return f"the lane orders version {version}", w._replace(order=order, lane=lane)


def _begun(w: World, order: Order, rules: Rules) -> Move:
    patches = rules.leading_from(w.staged, order.patches)
    unsound = {patch.part for patch in patches if not patch.sound}
    whole = frozenset({patch.part for patch in patches} - unsound)
    after = order._replace(patches=patches, begun=True, whole=whole)
    staged = None if rules.clears else w.staged
    return f"the receiver begins with {len(patches)} patches", w._replace(
        order=after, staged=staged
    )


def _receiver(w: World, order: Order, rules: Rules) -> Iterator[Move]:
    failed = w._replace(order=None, faults=w.faults + 1)
    yield "the transfer fails, the epoch goes on", failed
    # the parts at the same time; the patches of one in their order
    for part in sorted({patch.part for patch in order.patches}):
        patch = next(patch for patch in order.patches if patch.part == part)
        left = tuple(other for other in order.patches if other is not patch)
        image = w.image[0] + patch.changes[0], w.image[1] + patch.changes[1]
        after = order._replace(patches=left, patched=True)
        yield f"patch {patch.base} of part {part} is applied", w._replace(image=image, order=after)
        rest = tuple(other for other in order.patches if other.part != part)
        stops = order._replace(patches=rest, whole=order.whole - {part})
        yield f"a patch of part {part} is lost", w._replace(order=stops, faults=w.faults + 1)
    if order.patches:
        return
    right = content(order.version)
    wrong = [e for part in order.whole for e in w.elements(part) if w.image[e] != right[e]]
    if wrong:
        raise Violation(f"sound patches to version {order.version} make {w.image}, not {right}")
    image = right if rules.checks or not order.patched else w.image
    if image != right:
        raise Violation(f"version {order.version} is staged as {image}, not {right}")
    staged = w._replace(order=None, image=image, staged=order.version, lane=order.version)
    yield f"version {order.version} is staged", staged


def _check(w: World) -> None:
    """Raise Violation where a server has, or may get, anything but one version."""
    if w.staged is not None and w.order is None and w.image != content(w.staged):
        raise Violation(f"version {w.staged} is staged as {w.image}")
    if w.newest is not None and w.slots[w.newest[1]] != content(w.newest[0]):
        raise Violation(f"lanes may pin {w.slots[w.newest[1]]} as version {w.newest[0]}")


def explore_patches(
    versions: int, rules: Rules | None = None, faults: int = 1, hosts: int = 1
) -> Result:
    """All states with at most ``faults`` faults; from each the server gets the last version once
    faults stop."""
    decides = rules or Rules()
    return search_from(
        World((Host(),) * hosts),
        lambda w: moves(w, versions, decides),
        _check,
        faults,
        Hope(
            lambda w: w.staged == versions,
            lambda w: True,
            "the server never gets the last version although faults stop",
        ),
    )


def _any_before(made: Patch | None, before: Sequence[Patch], room: int) -> tuple[Patch, ...]:
    """Whatever version they lead to."""
    chain = (*before, made) if made is not None else tuple(before)
    while sum(patch.nbytes for patch in chain) > room:
        chain = chain[1:]
    return chain


def _all(made: Patch | None, before: Sequence[Patch], room: int) -> tuple[Patch, ...]:
    return p.kept(made, before, 100)


def _whole_chain(staged: int | None, chain: Sequence[Patch]) -> tuple[Patch, ...]:
    return () if staged is None else tuple(chain)


def _one_chain(staged: int | None, chain: Sequence[Patch]) -> tuple[Patch, ...]:
    """As if one host had made all."""
    bases = [patch.base for patch in chain]
    return tuple(chain[bases.index(staged) :]) if staged in bases else ()


def _bug(name: str, breaks: str, rules: Rules, hosts: int = 1) -> Bug:
    """Four versions are enough for each."""
    return Bug(name, breaks, partial(explore_patches, 4, rules, hosts=hosts))


PATCH_BUGS = (
    _bug(
        "patches are kept over a version that has none",
        "patches that are kept lead to the newest version without a gap",
        Rules(kept=_any_before),
    ),
    _bug(
        "all patches are kept",
        "patches have a share of an image at most",
        Rules(kept=_all),
    ),
    _bug(
        "all patches are taken though that of the staged version is kept no more",
        "patches are taken from the staged version on, or none",
        Rules(leading_from=_whole_chain),
    ),
    _bug(
        "the patches of all parts are taken for one chain",
        "each part has patches of its own, from the staged version on, or none",
        Rules(leading_from=_one_chain),
        hosts=2,
    ),
    _bug(
        "a transfer that failed leaves its base",
        "a patch is applied once, and nothing is one's base that was changed by half",
        Rules(clears=False),
    ),
    _bug(
        "a version that failed lies in the slot of the next patch's base",
        "a patch has the changes of versions that were made and never published",
        Rules(still_there=lambda last, slot: last),
    ),
    _bug(
        "a patched image is not checked",
        "a patch is never trusted",
        Rules(checks=False),
    ),
)
