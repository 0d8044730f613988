"""Whether to make patches (layout/delta.py), which to keep, and which of them lead from a staged
version to the newest one. Pure.

A patch turns one part of its base version into the same part of a newer one. It applies to no other
base. Each trainer host makes the patches of its own part, so one host may have a patch where
another has none. The block digests verify the result; these rules only avoid sending patches that
cannot apply."""

from collections.abc import Sequence
from typing import Protocol, TypeVar

KEPT = 32
"""Most patches of one part that are kept."""

SHARE = 1 / 4
"""Most bytes of the patches kept for the next version, as a share of the part's."""

ENCODE_RATE = 1 << 30
"""Bytes of a part per second that one thread encodes into a patch (scripts/bench_delta.py)."""

WORTH = 4.0
"""Least ratio of the slowest server's time for a whole version to the time to make a patch, for
weight_sync.delta = "auto"."""


def worth_making(mode: str, whole_s: float, part_bytes: float, link_share: float = 0.0) -> bool:
    """Return whether to make a patch of the next version. ``mode``: weight_sync.delta; ``whole_s``:
    the slowest server's seconds for a whole version, 0: unknown; ``part_bytes``: of the largest
    part, as all hosts encode at the same time. ``link_share``: where servers read from each other,
    the bytes of a patch for each server over those of the version, which the trainer's link carries
    about once.

    >>> [worth_making("auto", s, ENCODE_RATE) for s in (4.0, 5.0)]
    [False, True]
    >>> [worth_making("auto", 5.0, ENCODE_RATE, share) for share in (1.0, 1.2)]
    [True, False]
    >>> worth_making("on", 0.0, ENCODE_RATE), worth_making("off", 5.0, ENCODE_RATE)
    (True, False)
    """
    pays_off = whole_s > WORTH * part_bytes / ENCODE_RATE and link_share <= 1
    return mode == "on" or (mode == "auto" and pays_off)


class Leads(Protocol):
    """A patch: ``nbytes`` that turn ``part`` of ``base`` into that of ``version``."""

    @property
    def base(self) -> int: ...
    @property
    def version(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def part(self) -> int: ...


P = TypeVar("P", bound=Leads)

Place = tuple[int, int]
"""A version that was complete, and its slot."""


def still_there(last: Place | None, slot: int) -> Place | None:
    """Return the place of the next patch's base when a version is written into ``slot``; None if
    that overwrites the base. If the write fails, the slot has neither version.

    >>> still_there((3, 0), 1), still_there((3, 0), 0)
    ((3, 0), None)
    """
    return None if last is not None and last[1] == slot else last


def kept(made: P | None, before: Sequence[P], room: int) -> tuple[P, ...]:
    """Return the patches of a part to keep, oldest first, KEPT at most: those of ``before``, which
    lead to ``made``, and ``made``, the newest version's. The oldest are dropped until all fit into
    ``room`` bytes. Empty if the version has no patch (``made`` is None), or one larger than
    ``room``."""
    chain: list[P] = []
    for patch in () if made is None else (made, *reversed(before[1 - KEPT :])):
        room -= patch.nbytes
        if room < 0:
            break
        chain.insert(0, patch)
    return tuple(chain)


def leading_from(staged: int | None, patches: Sequence[P]) -> tuple[P, ...]:
    """Return the patches that lead from the ``staged`` version to the last one, part by part, each
    chain oldest first. A part without a kept patch of that base has none."""
    out: list[P] = []
    for part in sorted({patch.part for patch in patches}):
        chain = [patch for patch in patches if patch.part == part]
        bases = [patch.base for patch in chain]
        if staged in bases:
            out += chain[bases.index(staged) :]
    return tuple(out)
