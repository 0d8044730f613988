"""The reference computation takes exactly a model's tensors, and its values are log-probabilities
of the prompts' tokens."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from titan_grpo.titan.tiny import Kind, write_tiny_model
from titan_grpo.verify.prober import PROMPTS, TOKENS, ReferenceModel, fixed_prompts


@pytest.mark.parametrize("kind", ["qwen3", "llama3"])
def test_it_follows_the_weights_it_is_given(kind: Kind, tmp_path: Path) -> None:
    prompts = fixed_prompts()
    model = ReferenceModel(write_tiny_model(kind, tmp_path / "model", seed=1), prompts)
    other = write_tiny_model(kind, tmp_path / "other", seed=2)
    rows = model.logprobs(other / "model.safetensors")
    assert [len(row) for row in rows] == [TOKENS - 1] * PROMPTS
    loaded = AutoModelForCausalLM.from_pretrained(other, dtype=torch.float32)
    logprobs = loaded(torch.tensor([prompts[1]])).logits.detach().log_softmax(-1)[0]
    assert rows[1][4] == pytest.approx(float(logprobs[4, prompts[1][5]]), abs=1e-5)
    assert rows != model.logprobs(tmp_path / "model" / "model.safetensors")


def test_weights_with_a_tensor_missing_are_refused(tmp_path: Path) -> None:
    folder = write_tiny_model("qwen3", tmp_path / "model", seed=1)
    weights = load_file(folder / "model.safetensors")
    weights.pop("model.norm.weight")
    save_file(weights, tmp_path / "short.safetensors")
    with pytest.raises(ValueError, match=r"model\.norm\.weight"):
        ReferenceModel(folder, fixed_prompts()).logprobs(tmp_path / "short.safetensors")
