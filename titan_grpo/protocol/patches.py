"""Which patches (layout/delta.py) are kept, and which of them lead from what a receiver has staged
to the newest version. Pure.

A patch makes one part of one version of the same part of another one, its base, and of nothing
else. Each trainer host makes those of its own part, so one may have a patch where another has none.
That what they make is right is for the digests of the blocks to say; these rules save the bytes of
patches that cannot be."""

from collections.abc import Sequence
from typing import Protocol, TypeVar

KEPT = 32
"""Most patches of one part that are kept."""


class Leads(Protocol):
    """A patch: ``nbytes`` that make ``part`` of ``version`` of that of ``base``."""

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
"""A version that was complete, and the slot in which it lies."""


def still_there(last: Place | None, slot: int) -> Place | None:
    """The place of the next patch's base, when a version is written into ``slot``: that version is
    no base where it fails, and must not be taken for the one that lay there.

    >>> still_there((3, 0), 1), still_there((3, 0), 0)
    ((3, 0), None)
    """
    return None if last is not None and last[1] == slot else last


def kept(made: P | None, before: Sequence[P], room: int) -> tuple[P, ...]:
    """The newest version's patch of a part and those of ``before``, which lead to it, oldest first:
    KEPT at most. The oldest go first where all have more than ``room`` bytes. None is left where
    the version has no patch (``made`` is None), or one that alone has more."""
    chain: list[P] = []
    for patch in () if made is None else (made, *reversed(before[1 - KEPT :])):
        room -= patch.nbytes
        if room < 0:
            break
        chain.insert(0, patch)
    return tuple(chain)


def leading_from(staged: int | None, patches: Sequence[P]) -> tuple[P, ...]:
    """Those that make parts of their last version of the ``staged`` one, part by part, each chain
    oldest first. None of a part for which that is not known, or whose patch is kept no more."""
    out: list[P] = []
    for part in sorted({patch.part for patch in patches}):
        chain = [patch for patch in patches if patch.part == part]
        bases = [patch.base for patch in chain]
        if staged in bases:
            out += chain[bases.index(staged) :]
    return tuple(out)
