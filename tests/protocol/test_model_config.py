import pytest

from titan_grpo.protocol.model_config import difference, essential

QWEN = {
    "model_type": "qwen3",
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
def test_the_same_model_in_another_form_does_not_differ(other) -> None:
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
        ({**QWEN, "sliding_window": 4096, "use_sliding_window": True}, "sliding_window 4096"),
        (
            {**NEWER, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
            "rope.rope_theta 10000.0",
        ),
    ],
)
def test_another_model_of_the_same_shapes_is_named_by_its_fields(other, words) -> None:
    assert words in difference(essential(QWEN), essential(other))


def test_other_factors_of_one_scaling_are_told_apart() -> None:
    two, four = ({**QWEN, "rope_scaling": {**YARN, "factor": f}} for f in (2.0, 4.0))
    assert difference(essential(two), essential(four)) == "rope.factor 4.0 (the trainer: 2.0)"


def test_a_trainer_or_a_server_without_a_configuration_is_not_compared() -> None:
    assert difference({}, essential({**QWEN, "sliding_window": 4096})) == ""
    assert difference(essential(QWEN), {}) == ""
