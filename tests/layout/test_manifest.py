"""Manifests: alignment, blocks, canonical JSON, refusals."""

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from titan_grpo.errors import ConfigError, DataError
from titan_grpo.layout.manifest import ALIGNMENT, ITEM_BYTES, Manifest

ENTRIES = [("a", "bfloat16", (3, 5)), ("b", "float32", (2,)), ("c", "int64", ())]


def test_tensors_lie_one_after_the_other_at_aligned_offsets() -> None:
    manifest = Manifest.build(ENTRIES, 512)
    assert [(t.name, t.offset, t.nbytes) for t in manifest.tensors] == [
        ("a", 0, 30),
        ("b", 256, 8),
        ("c", 512, 8),
    ]
    assert manifest.total_bytes == 768
    assert [manifest.block(i) for i in range(manifest.num_blocks)] == [
        [(0, 512)],
        [(512, 768)],
    ]
    assert manifest.spec("b").shape == (2,)


def test_an_unknown_tensor_or_block_is_an_error() -> None:
    manifest = Manifest.build(ENTRIES, 512)
    with pytest.raises(KeyError):
        manifest.spec("d")
    with pytest.raises(IndexError, match=r"\[0, 2\), got 2"):
        manifest.block(2)


def test_json_brings_the_same_manifest_back() -> None:
    manifest = Manifest.build(ENTRIES, 512)
    again = Manifest.from_json(manifest.to_json())
    assert again == manifest
    assert again.digest == manifest.digest
    assert len(manifest.digest) == 32


@pytest.mark.parametrize(
    "changed",
    [
        [("A", "bfloat16", (3, 5)), *ENTRIES[1:]],
        [("a", "float16", (3, 5)), *ENTRIES[1:]],
        [("a", "bfloat16", (5, 3)), *ENTRIES[1:]],
        [ENTRIES[1], ENTRIES[0], ENTRIES[2]],
    ],
)
def test_every_difference_changes_the_digest(
    changed: list[tuple[str, str, tuple[int, ...]]],
) -> None:
    assert Manifest.build(changed, 512).digest != Manifest.build(ENTRIES, 512).digest
    assert Manifest.build(ENTRIES, 256).digest != Manifest.build(ENTRIES, 512).digest


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ([], "at least one tensor"),
        ([ENTRIES[0], ENTRIES[0]], "'a' twice"),
        ([("a", "complex64", (1,))], "got 'complex64'"),
        ([("a", "bfloat16", (0, 4))], r"got \(0, 4\)"),
    ],
)
def test_a_layout_that_can_not_be_synced_is_refused(
    entries: list[tuple[str, str, tuple[int, ...]]], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        Manifest.build(entries, 512)


def test_a_block_size_below_one_is_refused() -> None:
    with pytest.raises(ConfigError, match="block_bytes must be 1 or greater, got 0"):
        Manifest.build(ENTRIES, 0)


def broken(**changes: object) -> str:
    return json.dumps(json.loads(Manifest.build(ENTRIES, 512).to_json()) | changes)


@pytest.mark.parametrize(
    "text",
    [
        "not json",
        "[]",
        "{}",
        broken(extra=1),
        broken(format=1),
        broken(tensors=[]),
        broken(tensors=[["a", "bfloat16", [3, 5], 64]]),
        broken(tensors=[["a", "bfloat16", [3, 5]]]),
        broken(tensors=[["a", "bfloat16", 3, 0]]),
        broken(tensors=None),
        broken(block_bytes="x"),
        broken(parts=[]),
        broken(parts=[[[0, 256]]]),
        broken(parts=[[[0, 512]], [[256, 768]]]),
        broken(parts=[[[256, 768], [0, 256]]]),
        broken(parts=[[["a", 768]]]),
    ],
)
def test_a_manifest_from_the_network_is_checked(text: str) -> None:
    with pytest.raises(DataError):
        Manifest.from_json(text)


shapes = st.lists(st.integers(1, 9), max_size=3).map(tuple)
layouts = st.lists(st.tuples(st.sampled_from(sorted(ITEM_BYTES)), shapes), min_size=1, max_size=12)


@given(layouts, st.integers(1, 3000))
def test_extents_never_overlap_and_blocks_tile_the_image(
    rows: list[tuple[str, tuple[int, ...]]], block_bytes: int
) -> None:
    manifest = Manifest.build(
        [(f"t{i}", dtype, shape) for i, (dtype, shape) in enumerate(rows)], block_bytes
    )
    ends = [t.offset + t.nbytes for t in manifest.tensors]
    starts = [t.offset for t in manifest.tensors[1:]] + [manifest.total_bytes]
    assert all(end <= start < end + ALIGNMENT for end, start in zip(ends, starts, strict=True))
    assert all(start % ALIGNMENT == 0 for start in starts)
    blocks = [manifest.block(i)[0] for i in range(manifest.num_blocks)]
    assert blocks[0][0] == 0
    assert blocks[-1][1] == manifest.total_bytes
    assert all(a[1] == b[0] for a, b in itertools.pairwise(blocks))
    assert Manifest.from_json(manifest.to_json()) == manifest
