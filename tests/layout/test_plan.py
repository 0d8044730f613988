"""Boxes to copies, and who writes what."""

import itertools
import time
from mmap import PAGESIZE
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from titan_grpo.errors import ConfigError
from titan_grpo.layout import plan as module
from titan_grpo.layout.infer import Layout, infer_layout
from titan_grpo.layout.plan import (
    Chunk,
    CopyOp,
    assign_writers,
    chunk_of,
    copy_ops,
    written_extents,
    written_pages,
)


def permuted(shape: tuple[int, ...], order: list[int]) -> Layout:
    """A model of one parameter whose rows an adapter reorders."""

    def to_hf(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        value = state["w"]
        return {"hf": value.reshape(len(order), -1)[torch.tensor(order)].reshape(value.shape)}

    return infer_layout(to_hf, {"w": shape})


def test_the_docstrings_example_holds() -> None:
    layout = infer_layout(
        lambda s: {f"hf.{k}": v if k == "pad" else v[[0, 2, 1, 3]] for k, v in s.items()},
        {"pad": (8,), "w": (4, 8)},
    )
    ops = copy_ops(layout, layout.manifest("bfloat16", 4096), "w", (0, 0), (2, 8))
    assert ops == [
        CopyOp("w", slice(0, 1, 1), 256, 16, 1, 8, "bfloat16"),
        CopyOp("w", slice(1, 2, 1), 256 + 2 * 16, 16, 1, 8, "bfloat16"),
    ]


def test_a_whole_parameter_is_one_copy() -> None:
    layout = infer_layout(lambda s: s, {"w": (4, 8)})
    (op,) = copy_ops(layout, layout.manifest("float32", 4096), "w", (0, 0), (4, 8))
    assert (op.rows, op.dest_offset, op.dest_row_stride, op.num_rows, op.num_cols) == (
        slice(0, 4, 1),
        0,
        32,
        4,
        8,
    )


def test_columns_of_a_tensor_parallel_shard_keep_the_full_row_stride() -> None:
    layout = infer_layout(lambda s: s, {"w": (4, 8)})
    (op,) = copy_ops(layout, layout.manifest("float32", 4096), "w", (0, 6), (4, 2))
    assert (op.dest_offset, op.dest_row_stride, op.num_cols) == (24, 32, 2)


def experts(width: int) -> Layout:
    """Eight experts of (4, ``width``) in one parameter, each an HF tensor."""
    return infer_layout(
        lambda s: {f"{n}.hf": each for n, each in enumerate(s["w"])}, {"w": (8, 4, width)}
    )


def test_the_whole_experts_of_a_rank_are_one_copy_and_parts_of_them_one_each() -> None:
    layout = experts(64)
    manifest = layout.manifest("bfloat16", 4096)
    each = 4 * 64 * 2
    (op,) = copy_ops(layout, manifest, "w", (2, 0, 0), (3, 4, 64))
    assert op == CopyOp("w", slice(0, 12, 1), 2 * each, 128, 12, 64, "bfloat16")
    (op,) = copy_ops(layout, manifest, "w", (2, 0, 16), (3, 4, 8))
    assert op == CopyOp("w", slice(0, 12, 1), 2 * each + 32, 128, 12, 8, "bfloat16")
    parts = copy_ops(layout, manifest, "w", (2, 1, 0), (3, 2, 64))
    assert [part.dest_offset for part in parts] == [n * each + 128 for n in (2, 3, 4)]


def test_experts_with_padding_between_them_are_a_copy_each() -> None:
    layout = experts(16)
    assert len(copy_ops(layout, layout.manifest("bfloat16", 4096), "w", (0, 0, 0), (8, 4, 16))) == 8


def test_rows_that_do_not_follow_each_other_are_no_part_of_one_copy() -> None:
    # The rows of "b" begin where the range of those of "a" ends, in the shard and in the image.
    parts = {"a": [0, 2], "b": [3, 5], "c": [1, 4]}
    layout = infer_layout(lambda s: {n: s["w"][rows] for n, rows in parts.items()}, {"w": (6, 64)})
    ops = copy_ops(layout, layout.manifest("bfloat16", 4096), "w", (0, 0), (6, 64))
    assert [op.rows for op in ops] == [slice(0, 3, 2), slice(3, 6, 2), slice(1, 5, 3)]


def test_an_empty_shard_copies_nothing() -> None:
    layout = infer_layout(lambda s: s, {"w": (4, 8)})
    assert copy_ops(layout, layout.manifest("float32", 4096), "w", (4, 0), (0, 8)) == []


def test_a_plain_tensor_is_one_whole_chunk() -> None:
    assert chunk_of(torch.empty(3, 4)) == ((0, 0), (3, 4))
    assert chunk_of(torch.empty(())) == ((), ())


def test_a_shard_of_two_boxes_is_refused() -> None:
    boxes: Any = {"__create_chunk_list__": lambda: [object(), object()]}
    shard: Any = SimpleNamespace(**boxes)
    with pytest.raises(ConfigError, match="local shard must be one box, got 2"):
        chunk_of(shard)


def execute(op: CopyOp, shard: torch.Tensor, image: bytearray) -> None:
    """Element by element, independent of the snapshot code."""
    matrix = shard.reshape(-1, shard.shape[-1] if shard.dim() > 1 else 1)
    for i, row in enumerate(matrix[op.rows].tolist()):
        for j, value in enumerate(row):
            at = op.dest_offset + i * op.dest_row_stride + 4 * j
            assert image[at : at + 4] == b"\xff" * 4, "written twice"
            image[at : at + 4] = int(value).to_bytes(4, "little")


def split(size: int, cuts: list[int]) -> list[tuple[int, int]]:
    edges = [0, *sorted(min(cut, size) for cut in cuts), size]
    return [(a, b - a) for a, b in itertools.pairwise(edges)]


@st.composite
def tilings(draw: st.DrawFn) -> tuple[tuple[int, ...], list[int], list[Chunk]]:
    """A shape, an order of its rows, and a grid of boxes (empty ones too) that tile it."""
    shape = tuple(draw(st.lists(st.integers(1, 6), min_size=1, max_size=3)))
    rows = 1
    for size in shape[:-1] if len(shape) > 1 else shape:
        rows *= size
    order = draw(st.permutations(range(rows)))
    spans = [split(size, draw(st.lists(st.integers(0, 6), max_size=2))) for size in shape]
    boxes = [tuple(zip(*box, strict=True)) for box in itertools.product(*spans)]
    return shape, list(order), boxes  # type: ignore[return-value]


@given(tilings())
@settings(deadline=None)
def test_any_tiling_of_any_permutation_writes_every_element_once(
    case: tuple[tuple[int, ...], list[int], list[Chunk]],
) -> None:
    shape, order, boxes = case
    full = torch.arange(1, torch.Size(shape).numel() + 1, dtype=torch.int32).view(shape)
    layout = permuted(shape, order)
    manifest = layout.manifest("int32", 4096)
    image = bytearray(b"\xff" * manifest.total_bytes)
    writers = assign_writers([{"w": box} for box in boxes], {"w": shape})
    for box, written in zip(boxes, writers, strict=True):
        if "w" in written:
            shard = full[tuple(slice(o, o + n) for o, n in zip(*box, strict=True))]
            for op in copy_ops(layout, manifest, "w", *box):
                execute(op, shard, image)
    expected = full.reshape(len(order), -1)[torch.tensor(order)].contiguous()
    assert image[: full.numel() * 4] == bytes(expected.view(-1).view(torch.uint8).tolist())


def test_a_replica_is_written_by_the_lowest_rank() -> None:
    half = [((0, 0), (2, 8)), ((2, 0), (2, 8))]
    ranks = [{"w": half[1], "n": ((0,), (8,))}, {"w": half[0], "n": ((0,), (8,))}] * 2
    assert assign_writers(ranks, {"w": (4, 8), "n": (8,)}) == [{"w", "n"}, {"w"}, set(), set()]


def test_weights_of_which_no_rank_holds_a_part_are_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"of w \(4, 8\), they hold 16 of 32: its placement cannot be synced"
    ):
        assign_writers([{"w": ((0, 0), (2, 8))}], {"w": (4, 8)})
    with pytest.raises(ConfigError, match="they hold 0 of 32"):
        assign_writers([{}], {"w": (4, 8)})


def test_shards_that_overlap_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"shards of w \(4, 8\) must not overlap"):
        assign_writers([{"w": ((0, 0), (3, 8))}, {"w": ((2, 0), (2, 8))}], {"w": (4, 8)})
    with pytest.raises(ConfigError, match="must not overlap"):
        assign_writers([{"w": ((0, 0), (2, 8))}, {"w": ((0, 4), (2, 8))}], {"w": (4, 8)})
    with pytest.raises(ConfigError, match="must not overlap"):  # more rows than it has
        assign_writers([{"w": ((0, 0), (5, 8))}], {"w": (4, 8)})
    with pytest.raises(ConfigError, match="must not overlap"):
        assign_writers([{"w": ((0, 0), (4, 3))}, {"w": ((0, 2), (4, 5))}], {"w": (4, 8)})
    # As many elements as the parameter has: column 2 twice, column 3 not at all.
    boxes = [((0, 0), (8, 3)), ((0, 4), (8, 2)), ((0, 2), (8, 1))]
    with pytest.raises(ConfigError, match="must not overlap"):
        assign_writers([{"w": box} for box in boxes], {"w": (8, 6)})


def test_shards_of_columns_are_checked_as_fast_as_shards_of_rows() -> None:
    def seconds(axis: int) -> float:
        """To check 1,000 shards along one of two dimensions."""
        shards = [((n, 0), (1, 1000)) if axis == 0 else ((0, n), (1000, 1)) for n in range(1000)]
        began = time.perf_counter()
        assign_writers([{"w": shard} for shard in shards], {"w": (1000, 1000)})
        return time.perf_counter() - began

    assert min(seconds(1) for _ in range(3)) < 20 * min(seconds(0) for _ in range(3))


def op(offset: int, rows: int, stride: int, cols: int, dtype: str = "bfloat16") -> CopyOp:
    return CopyOp("w", slice(0, rows, 1), offset, stride, rows, cols, dtype)


def test_rows_that_cross_a_page_take_both_pages() -> None:
    assert written_pages([op(PAGESIZE - 6, 2, 64, 4)]) == ((0, 2 * PAGESIZE),)


def test_rows_that_end_with_a_page_take_no_other() -> None:
    assert written_pages([op(PAGESIZE - 72, 2, 64, 4)]) == ((0, PAGESIZE),)


def test_extents_that_share_or_touch_a_page_are_one_and_others_are_not() -> None:
    page = PAGESIZE
    ops = [op(5 * page, 1, 8, 4), op(0, 1, 8, 4), op(100, 1, 8, page), op(2 * page, 1, 8, 4)]
    assert written_pages(ops) == ((0, 3 * page), (5 * page, 6 * page))


def test_pages_are_those_of_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """With pages of 64 KiB, two extents in one of them could not both be pinned."""
    monkeypatch.setattr("mmap.PAGESIZE", 1 << 16)
    assert written_pages([op(0, 1, 8, 4), op(20480, 1, 8, 4)]) == ((0, 1 << 16),)


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
    assert all(start % PAGESIZE == stop % PAGESIZE == 0 and start < stop for start, stop in extents)
    assert all(a[1] < b[0] for a, b in itertools.pairwise(extents))
    for one in ops:
        first, width = one.dest_offset, one.num_cols * torch.bfloat16.itemsize
        last = first + (one.num_rows - 1) * one.dest_row_stride + width
        assert sum(start <= first and last <= stop for start, stop in extents) == 1


SMALL = st.tuples(st.integers(0, 300), st.integers(0, 5), st.integers(0, 40), st.integers(0, 20))


@given(st.lists(SMALL, max_size=6))
def test_the_extents_of_a_part_are_its_bytes_and_no_others(
    sizes: list[tuple[int, int, int, int]],
) -> None:
    ops = [op(offset, rows, cols * 2 + gap, cols) for offset, rows, gap, cols in sizes]
    extents = written_extents(ops)
    starts = [
        (o.dest_offset + row * o.dest_row_stride, o) for o in ops for row in range(o.num_rows)
    ]
    written = {start + byte for start, one in starts for byte in range(2 * one.num_cols)}
    assert {byte for extent in extents for byte in range(*extent)} == written
    assert all(a[1] < b[0] for a, b in itertools.pairwise(extents))


def test_a_host_whose_part_is_in_too_many_pieces_is_refused_with_the_remedy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "MOST_EXTENTS", 3)
    assert len(written_extents([op(0, 3, 64, 4)])) == 3
    assert written_extents([op(0, 4, 8, 4)]) == ((0, 32),), "whole rows are one"
    with pytest.raises(ConfigError, match=r"at most 3 pieces .*\(at w\): .* group on one host"):
        written_extents([op(0, 4, 64, 4)])
