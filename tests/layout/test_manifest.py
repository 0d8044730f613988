"""Manifests: alignment, blocks, canonical JSON, refusals."""

import itertools
import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from titan_grpo.errors import ConfigError, DataError
from titan_grpo.layout.image import Hashing
from titan_grpo.layout.manifest import (
    ALIGNMENT,
    ITEM_BYTES,
    MOST_IN_ALL,
    Manifest,
    Part,
    buckets,
    extents_of,
    fused,
    names_problem,
    parts_of,
)
from titan_grpo.layout.plan import merged

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


def test_an_element_has_as_many_bytes_as_torchs() -> None:
    assert {name: getattr(torch, name).itemsize for name in ITEM_BYTES} == ITEM_BYTES


def test_an_unknown_tensor_or_block_is_an_error() -> None:
    manifest = Manifest.build(ENTRIES, 512)
    with pytest.raises(KeyError):
        manifest.spec("d")
    with pytest.raises(IndexError, match=r"\[0, 2\), got 2"):
        manifest.block(2)


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


def broken(**changes: object) -> str:
    return json.dumps(json.loads(Manifest.build(ENTRIES, 512).to_json()) | changes)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("not json", "JSON is malformed"),
        (b'{"bl\xe5": 1}', "can't decode byte 0xe5|Invalid UTF-8"),
        ("[]", "got `array`"),
        ("{}", "missing required field"),
        (broken(extra=1), "unknown field `extra`"),
        (broken(format=1), "format must be 4, got 1"),
        (broken(tensors=[]), "at least one tensor"),
        (broken(tensors=[["a", "bfloat16"]]), "array` of length 3"),
        (broken(tensors=[["a", "bfloat16", 3]]), r"got `int` - at `\$\.tensors"),
        (broken(tensors=None), "got `null`"),
        (broken(block_bytes=0), "`int` >= 1"),
        (broken(block_bytes="x"), r"got `str` - at `\$\.block_bytes"),
        (broken(parts=[]), "the first byte"),
        (broken(parts=[[[0, 256, 0, 1]]]), "bytes 0 to 256 .* begins at 768"),
        (broken(parts=[[[0, 512, 0, 1]], [[256, 512, 0, 1]]]), "bytes 0 to 512 .* begins at 256"),
        (broken(parts=[[[256, 512, 0, 1], [0, 256, 0, 1]]]), "runs of extents in order"),
        (broken(parts=[[["a", 768, 0, 1]]]), r"got `str` - at `\$\.parts"),
        (broken(parts=[[[0, 256, 256, 3]]]), "runs of extents in order"),
        (broken(parts=[[[0, 256, 512, 2]], [[256, 256, 7, 1]]]), "runs of extents in order"),
        (broken(parts=[[[0, 256, 0, 2], [256, 512, 0, 1]]]), "bytes 0 to 256 .* begins at 0"),
        (broken(parts=[[[0, 768, 0, 1], [768, 1, 1, 0]]]), "`int` >= 1"),
        (broken(parts=[[[0, 768, 0, 1], [0, 1, 2, 1 << 60]]]), f"at most {MOST_IN_ALL} pieces"),
    ],
)
def test_a_manifest_from_the_network_is_checked(text: str | bytes, message: str) -> None:
    with pytest.raises(DataError, match=message):
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


LAYER = "model.layers.0."
QKV = [f"{LAYER}self_attn.{x}_proj.weight" for x in "qkv"]
MLP = [f"{LAYER}mlp.{x}_proj.weight" for x in ("gate", "up", "down")]
SERVED = [
    "model.embed_tokens.weight",
    f"{LAYER}self_attn.qkv_proj.weight",
    f"{LAYER}mlp.gate_up_proj.weight",
    f"{LAYER}mlp.down_proj.weight",
]


def test_the_worked_example_of_the_docstring() -> None:
    shapes = [(128,), (128,), (15,), (256,)]
    manifest = Manifest.build(
        [(f"t{i}", "bfloat16", shape) for i, shape in enumerate(shapes)], 4096
    )
    found = [[[spec.name for spec in b] for b in buckets(manifest, most)] for most in (1024, 512)]
    assert found == [[["t0", "t1", "t2"], ["t3"]], [["t0", "t1"], ["t2"], ["t3"]]]


@given(
    st.lists(
        st.tuples(st.sampled_from(sorted(ITEM_BYTES)), st.integers(1, 700)), min_size=1, max_size=20
    ),
    st.integers(1, 5000),
)
def test_buckets_are_gapless_aligned_slices_that_hold_every_tensor_once(
    entries: list[tuple[str, int]], bucket_bytes: int
) -> None:
    manifest = Manifest.build(
        [(f"t{i}", dtype, (n,)) for i, (dtype, n) in enumerate(entries)], 4096
    )
    found = buckets(manifest, bucket_bytes)
    assert [spec for bucket in found for spec in bucket] == list(manifest.tensors)
    for bucket in found:
        end = bucket[0].offset
        for spec in bucket:
            assert spec.offset == end
            assert (spec.offset - bucket[0].offset) % ITEM_BYTES[spec.dtype] == 0
            end += spec.nbytes
        assert len(bucket) == 1 or end - bucket[0].offset <= bucket_bytes


@pytest.mark.parametrize(
    ("name", "parameter"),
    [
        (QKV[0], SERVED[1]),
        (f"{LAYER}self_attn.k_proj.bias", f"{LAYER}self_attn.qkv_proj.bias"),
        (f"{LAYER}self_attn.o_proj.weight", f"{LAYER}self_attn.o_proj.weight"),
        (MLP[1], SERVED[2]),
        (f"{LAYER}mlp.experts.7.up_proj.weight", f"{LAYER}mlp.experts.w13_weight"),
        (f"{LAYER}mlp.experts.7.down_proj.weight", f"{LAYER}mlp.experts.w2_weight"),
        (f"{LAYER}mlp.gate.weight", f"{LAYER}mlp.gate.weight"),
    ],
)
def test_tensors_find_the_parameter_that_takes_them(name: str, parameter: str) -> None:
    assert fused(name) == parameter


def test_the_right_model_has_no_problem_with_a_tied_head_on_either_side_or_none() -> None:
    sent = ["model.embed_tokens.weight", *QKV, *MLP]
    assert names_problem(sent, SERVED) == ""
    assert names_problem([*sent, "lm_head.weight"], SERVED) == ""
    assert names_problem(sent, [*SERVED, "lm_head.weight"]) == ""
    assert names_problem([*sent, "lm_head.weight"], [*SERVED, "lm_head.weight"]) == ""


def test_unknown_and_missing_names_are_named() -> None:
    problem = names_problem(["model.embed_tokens.weight", *QKV, "model.nope.weight"], SERVED)
    assert "unknown to the server: model.nope.weight" in problem
    assert (
        "missing: model.layers.0.mlp.down_proj.weight, model.layers.0.mlp.gate_up_proj.weight"
        in problem
    )


def test_a_part_of_a_fused_parameter_alone_is_not_enough() -> None:
    sent = ["model.embed_tokens.weight", *QKV[:2], *MLP]
    assert "sent in part: model.layers.0.self_attn.qkv_proj.weight" in names_problem(sent, SERVED)


def test_padding_belongs_to_the_bytes_before_it() -> None:
    written = [[(0, 500), (1024, 1524)], [(500, 1000), (1524, 2024)]]
    assert [part.extents for part in parts_of(written, 2048, 256)] == [
        ((0, 500), (1024, 1524)),
        ((500, 1024), (1524, 2048)),
    ]


@pytest.mark.parametrize(
    ("written", "message"),
    [
        ([[(0, 500)], [(400, 1024)]], "host 0 writes bytes 0 to 500 .* begins at 400"),
        ([[(0, 500)], [(500, 1024), (500, 1024)]], "host 1 writes bytes 500 to 1024 .* at 500"),
        ([[(0, 500)], [(756, 1024)]], "host 0 writes bytes 0 to 500 .* begins at 756"),
        ([[(0, 500)], [(500, 768)]], "host 1 writes bytes 500 to 768 .* begins at 1024"),
        ([[(1, 1024)], []], "the first byte"),
        ([[], []], "the first byte"),
    ],
)
def test_bytes_that_no_host_or_two_write_are_refused(
    written: list[list[tuple[int, int]]], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        parts_of(written, 1024, 256)


@given(st.lists(st.integers(0, 2), min_size=1, max_size=40), st.integers(1, 700))
def test_the_blocks_of_all_parts_are_every_byte_once(owners: list[int], block_bytes: int) -> None:
    total = 64 * len(owners)
    manifest = Manifest.build([("a", "uint8", (total,))], block_bytes)
    written = [
        [(64 * i, 64 * i + 64) for i, owner in enumerate(owners) if owner == host]
        for host in range(3)
    ]
    cut = manifest.with_parts(parts_of(written, manifest.total_bytes, 256))
    pieces = [piece for index in range(cut.num_blocks) for piece in cut.block(index)]
    assert sum(stop - start for start, stop in pieces) == manifest.total_bytes
    assert {b for start, stop in pieces for b in range(start, stop)} == set(range(cut.total_bytes))
    assert Manifest.from_json(cut.to_json()) == cut
    image = memoryview(bytes(i % 251 for i in range(cut.total_bytes)))
    each = [Hashing("xxh3").blocks(image, cut, part) for part in range(3)]
    assert sum(each, ()) == Hashing("xxh3").blocks(image, cut)


def test_a_manifest_is_small_though_every_host_has_a_piece_of_every_tensor() -> None:
    """As of an MoE model whose experts are cut by columns."""
    hosts, piece = 64, 256
    manifest = Manifest.build(
        [(f"experts.{i}.weight", "uint8", (hosts, piece)) for i in range(1000)], 4 << 20
    )
    written = [
        [
            (start, start + piece)
            for start in range(piece * host, manifest.total_bytes, hosts * piece)
        ]
        for host in range(hosts)
    ]
    cut = manifest.with_parts(parts_of(written, manifest.total_bytes, ALIGNMENT))
    assert len(cut.to_json()) < 1_000_000
    assert Manifest.from_json(cut.to_json()) == cut


def test_more_extents_than_a_process_can_read_are_refused_with_the_remedy() -> None:
    half = MOST_IN_ALL // 2
    hosts = [[(0, 1, 2, half)], [(1, 1, 2, half + 1)]]
    with pytest.raises(ConfigError, match=f"{MOST_IN_ALL} .* are {MOST_IN_ALL + 1}: .*replicate"):
        extents_of(hosts)


def test_a_range_of_a_part_is_in_several_places() -> None:
    part = Part(((0, 500), (1024, 1524)))
    assert list(part.pieces(400, 600)) == [(400, 500), (1024, 1124)]
    with pytest.raises(IndexError):
        list(part.pieces(900, 1001))


def test_boxes_that_make_up_one_are_one() -> None:
    quarters = [((r, c), (2, 2)) for r in (0, 2) for c in (0, 2)]
    assert merged(quarters) == [((0, 0), (4, 4))]
    assert merged([((0, 0), (2, 2)), ((2, 2), (2, 2))]) == [((0, 0), (2, 2)), ((2, 2), (2, 2))]
