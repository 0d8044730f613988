"""The pages of an image that a rank writes."""

import itertools

import torch
from hypothesis import given
from hypothesis import strategies as st

from titan_grpo.layout.plan import CopyOp, written_pages


def op(offset: int, rows: int, stride: int, cols: int, dtype: str = "bfloat16") -> CopyOp:
    return CopyOp("w", slice(0, rows, 1), offset, stride, rows, cols, dtype)


def test_rows_that_cross_a_page_take_both_pages() -> None:
    assert written_pages([op(4090, 2, 64, 4)]) == ((0, 8192),)


def test_extents_that_share_or_touch_a_page_are_one_and_others_are_not() -> None:
    ops = [op(20480, 1, 8, 4), op(0, 1, 8, 4), op(100, 1, 8192, 4096), op(8192, 1, 8, 4)]
    assert written_pages(ops) == ((0, 12288), (20480, 24576))


def test_a_part_without_rows_takes_none() -> None:
    assert written_pages([op(0, 0, 8, 4), op(0, 3, 8, 0)]) == ()


SIZES = st.tuples(
    st.integers(0, 40_000), st.integers(1, 5), st.integers(0, 9_000), st.integers(1, 600)
)


@given(st.lists(SIZES, max_size=8))
def test_every_byte_that_is_written_is_in_one_extent_and_no_page_is_in_two(
    sizes: list[tuple[int, int, int, int]],
) -> None:
    ops = [op(offset, rows, cols * 2 + gap, cols) for offset, rows, gap, cols in sizes]
    extents = written_pages(ops)
    assert all(start % 4096 == stop % 4096 == 0 and start < stop for start, stop in extents)
    assert all(a[1] < b[0] for a, b in itertools.pairwise(extents))
    for one in ops:
        first, width = one.dest_offset, one.num_cols * torch.bfloat16.itemsize
        last = first + (one.num_rows - 1) * one.dest_row_stride + width
        assert sum(start <= first and last <= stop for start, stop in extents) == 1
