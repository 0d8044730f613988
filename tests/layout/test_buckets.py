"""Buckets and names for a stock server's own update route."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from titan_grpo.layout.manifest import ITEM_BYTES, Manifest, buckets, fused, names_problem

LAYER = "model.layers.0."
QKV = [f"{LAYER}self_attn.{x}_proj.weight" for x in "qkv"]
MLP = [f"{LAYER}mlp.{x}_proj.weight" for x in ("gate", "up", "down")]
SERVED = [
    "model.embed_tokens.weight",
    f"{LAYER}self_attn.qkv_proj.weight",
    f"{LAYER}mlp.gate_up_proj.weight",
    f"{LAYER}mlp.down_proj.weight",
]


def test_the_worked_example_of_the_docstring():
    shapes = [(128,), (128,), (15,), (256,)]
    manifest = Manifest.build(
        [(f"t{i}", "bfloat16", shape) for i, shape in enumerate(shapes)], 4096
    )
    assert [[spec.name for spec in bucket] for bucket in buckets(manifest, 1024)] == [
        ["t0", "t1", "t2"],
        ["t3"],
    ]


@given(
    st.lists(
        st.tuples(st.sampled_from(sorted(ITEM_BYTES)), st.integers(1, 700)), min_size=1, max_size=20
    ),
    st.integers(1, 5000),
)
def test_buckets_are_gapless_aligned_slices_that_hold_every_tensor_once(entries, bucket_bytes):
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
def test_tensors_find_the_parameter_that_takes_them(name, parameter):
    assert fused(name) == parameter


def test_the_right_model_has_no_problem_with_a_tied_head_on_either_side_or_none():
    sent = ["model.embed_tokens.weight", *QKV, *MLP]
    assert names_problem(sent, SERVED) == ""
    assert names_problem([*sent, "lm_head.weight"], SERVED) == ""
    assert names_problem(sent, [*SERVED, "lm_head.weight"]) == ""
    assert names_problem([*sent, "lm_head.weight"], [*SERVED, "lm_head.weight"]) == ""


def test_unknown_and_missing_names_are_named():
    problem = names_problem(["model.embed_tokens.weight", *QKV, "model.nope.weight"], SERVED)
    assert "unknown to the server: model.nope.weight" in problem
    assert (
        "missing: model.layers.0.mlp.down_proj.weight, model.layers.0.mlp.gate_up_proj.weight"
        in problem
    )


def test_a_part_of_a_fused_parameter_alone_is_not_enough():
    sent = ["model.embed_tokens.weight", *QKV[:2], *MLP]
    assert "sent in part: model.layers.0.self_attn.qkv_proj.weight" in names_problem(sent, SERVED)
