"""Names, shapes, and what of config.json no shape shows, are compared before weights change."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from titan_grpo.errors import DataError
from titan_grpo.layout.manifest import Manifest
from titan_grpo.receive.checkpoint import (
    INDEX,
    CheckpointNames,
    checkpoint_shapes,
    coverage_problem,
    difference,
    essential,
)


def manifest(**shapes: tuple[int, ...]) -> Manifest:
    return Manifest.build([(n.replace("__", "."), "bfloat16", s) for n, s in shapes.items()], 4096)


def test_the_same_tensors_in_another_order_are_no_problem() -> None:
    assert coverage_problem(manifest(b=(3,), a=(2,)), {"a": (2,), "b": (3,)}, tied=False) == ""


def test_unknown_missing_and_misshapen_tensors_are_each_named() -> None:
    problem = coverage_problem(manifest(a=(2,), c=(1,)), {"a": (5,), "b": (3,)}, tied=False)
    assert "unknown to the server: c" in problem
    assert "missing: b" in problem
    assert "a (2,) instead of (5,)" in problem


def test_a_long_list_of_names_is_cut() -> None:
    problem = coverage_problem(
        manifest(**{f"t{i}": (1,) for i in range(9)}), {"t0": (1,)}, tied=False
    )
    assert "t1, t2, t3, t4 and 4 more" in problem


@pytest.mark.parametrize("sent", [True, False])
def test_a_tied_head_may_be_sent_or_not(sent: bool) -> None:
    shapes = {"lm_head__weight": (4, 2)} if sent else {}
    wanted = {"a": (1,)} | ({} if sent else {"lm_head.weight": (4, 2)})
    assert coverage_problem(manifest(a=(1,), **shapes), wanted, tied=True) == ""
    assert "lm_head.weight" in coverage_problem(manifest(a=(1,), **shapes), wanted, tied=False)


def test_what_engines_compute_themselves_need_not_be_sent() -> None:
    assert (
        coverage_problem(
            manifest(a=(1,)), {"a": (1,), "model.rotary_emb.inv_freq": (8,)}, tied=False
        )
        == ""
    )


def test_names_and_shapes_are_read_from_one_file(tmp_path: Path) -> None:
    save_file(
        {"x": torch.zeros(2, 3), "y": torch.zeros(1)},
        tmp_path / "model.safetensors",
        metadata={"format": "pt"},
    )
    assert checkpoint_shapes(tmp_path) == {"x": (2, 3), "y": (1,)}


def test_only_the_files_of_the_index_are_read(tmp_path: Path) -> None:
    save_file({"x": torch.zeros(2)}, tmp_path / "model-1.safetensors")
    save_file({"y": torch.zeros(3)}, tmp_path / "model-2.safetensors")
    save_file({"z": torch.zeros(4)}, tmp_path / "consolidated.safetensors")
    index = {"weight_map": {"x": "model-1.safetensors", "y": "model-2.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert checkpoint_shapes(tmp_path) == {"x": (2,), "y": (3,)}


def test_a_directory_without_safetensors_gives_nothing(tmp_path: Path) -> None:
    assert checkpoint_shapes(tmp_path) == {}


DAMAGED = {
    "empty": "{}",
    "list": "[]",
    "list of names": '{"weight_map": []}',
    "number": '{"weight_map": {"a": 3}}',
    "no json": "no json",
    "too deep": "[" * 10**5,
    "no text": r'{"weight_map": {"a": "\ud800"}}',
}


def test_an_engines_own_shards_say_nothing_about_a_checkpoints_names(tmp_path: Path) -> None:
    """--load-format sharded_state: an index is copied beside them, without its files."""
    save_file({"qkv_proj": torch.zeros(1)}, tmp_path / "model-rank-0-part-0.safetensors")
    (tmp_path / INDEX).write_text('{"weight_map": {"q_proj": "model-00001-of-00002.safetensors"}}')
    names = CheckpointNames(str(tmp_path), None, tied=False)
    assert names.absent
    assert names.shapes == {}


@pytest.mark.parametrize(
    ("name", "text"),
    [("model.safetensors", "abc"), *((INDEX, text) for text in DAMAGED.values())],
    ids=["shard", *DAMAGED],
)
def test_a_file_that_is_damaged_is_refused_by_its_name_in_words_that_can_be_sent(
    tmp_path: Path, name: str, text: str
) -> None:
    (tmp_path / name).write_text(text)
    named = f"{name}|ud800"
    with pytest.raises(DataError, match=f"({named})' must be a file of a safetensors") as refused:
        checkpoint_shapes(tmp_path)
    assert str(refused.value).encode()


QWEN = {
    "model_type": "qwen3",
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000,
    "rope_scaling": None,
    "sliding_window": None,
    "use_sliding_window": False,
    "torch_dtype": "bfloat16",
}
NEWER = {k: v for k, v in QWEN.items() if not k.startswith("rope")} | {
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
    "dtype": "bfloat16",
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}


@pytest.mark.parametrize(
    "other",
    [
        QWEN,
        NEWER,
        {**QWEN, "sliding_window": 4096},
        {**QWEN, "vocab_size": 7, "torch_dtype": "float32", "architectures": ["X"]},
        {"model_type": "composite", "text_config": NEWER},
        {k: v for k, v in QWEN.items() if k != "rms_norm_eps"},
    ],
)
def test_the_same_model_in_another_form_does_not_differ(other: dict[str, object]) -> None:
    assert difference(essential(QWEN), essential(other)) == ""


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ({**QWEN, "rope_theta": 10000}, "rope.rope_theta 10000 (the trainer: 1000000)"),
        ({**QWEN, "rope_scaling": YARN}, "rope.rope_type 'yarn' (the trainer: 'default')"),
        ({**QWEN, "rope_scaling": {"type": "linear", "factor": 2.0}}, "rope.rope_type 'linear'"),
        (
            {**QWEN, "rope_scaling": {"type": "default", "rope_type": "yarn"}},
            "rope.rope_type 'yarn'",
        ),
        ({**QWEN, "rms_norm_eps": 1e-5}, "rms_norm_eps 1e-05 (the trainer: 1e-06)"),
        ({**QWEN, "num_attention_heads": 8}, "num_attention_heads 8"),
        ({**QWEN, "num_hidden_layers": 27}, "num_hidden_layers 27 (the trainer: 28)"),
        ({**QWEN, "sliding_window": 4096, "use_sliding_window": True}, "sliding_window 4096"),
        (
            {**NEWER, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
            "rope.rope_theta 10000.0",
        ),
    ],
)
def test_another_model_of_the_same_shapes_is_named_by_its_fields(
    other: dict[str, object], words: str
) -> None:
    assert words in difference(essential(QWEN), essential(other))


def test_other_factors_of_one_scaling_are_told_apart() -> None:
    two, four = ({**QWEN, "rope_scaling": {**YARN, "factor": f}} for f in (2.0, 4.0))
    assert difference(essential(two), essential(four)) == "rope.factor 4.0 (the trainer: 2.0)"


def test_a_trainer_or_a_server_without_a_configuration_is_not_compared() -> None:
    assert difference({}, essential({**QWEN, "sliding_window": 4096})) == ""
    assert difference(essential(QWEN), {}) == ""
