"""Which patches are kept, and which are taken."""

from typing import NamedTuple

from titan_grpo.protocol.patches import KEPT, kept, leading_from


class Made(NamedTuple):
    """A patch."""

    base: int
    version: int
    nbytes: int = 1
    part: int = 0


def test_the_last_patches_are_kept() -> None:
    chain: tuple[Made, ...] = ()
    for version in range(1, 2 * KEPT):
        chain = kept(Made(version - 1, version), chain, room=1000)
    assert [made.version for made in chain] == [*range(KEPT, 2 * KEPT)]


def test_those_that_are_kept_have_their_room_and_no_more() -> None:
    before = Made(0, 1, 3), Made(1, 2, 3)
    assert kept(Made(2, 3, 4), before, 7) == (before[1], Made(2, 3, 4))
    assert kept(Made(2, 3, 4), before, 6) == (Made(2, 3, 4),)
    assert kept(Made(2, 3, 4), before, 3) == ()
    assert kept(None, before, 7) == ()


def test_each_part_is_patched_from_the_staged_version_or_not_at_all() -> None:
    first, second = (Made(1, 2), Made(2, 4)), (Made(3, 4, part=1),)
    assert leading_from(2, (*first, *second)) == first[1:]
    assert leading_from(1, (*second, *first)) == first
    assert leading_from(3, (*first, *second)) == second
    assert leading_from(1, first) == first
    assert leading_from(None, first) == ()
