"""Which patches (layout/delta.py) are kept, and which of them lead from what a receiver has staged
to the newest version. Pure.

A patch makes one version of another one, its base, and of nothing else. That what it makes is right
is for the digests of the blocks to say; these rules save the bytes of patches that cannot be."""

from collections.abc import Sequence
from typing import Protocol, TypeVar


class Leads(Protocol):
    """A patch, or the offer of one: ``nbytes`` that make ``version`` of ``base``."""

    @property
    def base(self) -> int: ...
    @property
    def version(self) -> int: ...
    @property
    def nbytes(self) -> int: ...


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


def kept(made: P, before: Sequence[P], room: int) -> tuple[P, ...]:
    """The newest patch and those of ``before`` that lead to it without a gap, oldest first. The
    oldest go first where all have more than ``room`` bytes; none is left where it alone has."""
    chain: list[P] = []
    for patch in (made, *reversed(before)):
        room -= patch.nbytes
        if room < 0 or (chain and chain[0].base != patch.version):
            break
        chain.insert(0, patch)
    return tuple(chain)


def leading_from(staged: int | None, chain: Sequence[P]) -> tuple[P, ...]:
    """Those of a chain that make its last version of the ``staged`` one; none where it is not
    known, or where its patch is kept no more."""
    bases = [patch.base for patch in chain]
    return tuple(chain[bases.index(staged) :]) if staged in bases else ()
