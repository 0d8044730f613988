"""Tiny models: what transformers, torchtitan and the tokenizer read from the same directory, and
the work of a sequence against a count by hand."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.rigs.tiny_model import loaded
from titan_grpo.titan import compat, flavors, tiny
from titan_grpo.titan.tiny import Kind


@pytest.mark.parametrize("kind", flavors.FLAVORS)
def test_torchtitan_and_transformers_compute_the_same_logits(kind: Kind, tmp_path: Path) -> None:
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    folder = tiny.write_tiny_model(kind, tmp_path, seed=3, std=0.1, dtype="float32")
    hf, ours = (
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32),
        loaded(kind, load_file(folder / "model.safetensors")),
    )
    ids = torch.randint(4, tiny.SHAPE.vocab, (2, 40), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected, got = hf(ids).logits, ours(ids)
    assert expected.abs().max() > 1
    torch.testing.assert_close(got, expected, atol=5e-5, rtol=0)


def test_the_same_seed_gives_the_same_weights_and_another_seed_others() -> None:
    a, b, c = (tiny.tiny_weights("qwen3", seed)["model.embed_tokens.weight"] for seed in (1, 1, 2))
    assert torch.equal(a, b)
    assert not torch.equal(a, c)


def test_every_file_of_a_model_has_the_mode_that_the_umask_says(tmp_path: Path) -> None:
    """Before, nobody else could read the weights: not a server of another user."""
    (tmp_path / "any").touch()
    folder = tiny.write_tiny_model("qwen3", tmp_path / "model")
    assert {path.stat().st_mode for path in folder.iterdir()} == {(tmp_path / "any").stat().st_mode}


def test_a_text_has_as_many_tokens_as_characters_and_comes_back(tmp_path: Path) -> None:
    from tokenizers import Tokenizer

    tiny.write_tiny_model("qwen3", tmp_path)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    text = "Count: 1 2  3\n{~}" + tiny.vocabulary()[-1]
    assert tokenizer.get_vocab_size() == len(set(tiny.vocabulary())) == tiny.SHAPE.vocab
    assert len(tokenizer.encode(text).ids) == len(text)
    assert tokenizer.decode(tokenizer.encode(text).ids) == text
    assert tokenizer.decode([tiny.BOS, *tokenizer.encode("7").ids, tiny.EOS]) == "7"


def test_transformers_and_torchtitan_agree_on_the_special_tokens(tmp_path: Path) -> None:
    from torchtitan.components.tokenizer import HuggingFaceTokenizer
    from transformers import AutoTokenizer

    tiny.write_tiny_model("llama3", tmp_path)
    hf, ours = AutoTokenizer.from_pretrained(tmp_path), HuggingFaceTokenizer(str(tmp_path))
    assert (hf.eos_token_id, hf.bos_token_id, hf.pad_token_id) == (tiny.EOS, tiny.BOS, tiny.PAD)
    assert (ours.eos_id, ours.bos_id) == (tiny.EOS, tiny.BOS)
    assert (
        json.loads((tmp_path / "config.json").read_text())["rope_scaling"]["rope_type"] == "llama3"
    )


def test_an_expert_bias_that_can_not_be_exported_is_turned_off() -> None:
    from torchtitan.models.moe import MoEArgs
    from torchtitan.models.qwen3 import Qwen3ModelArgs

    exporting = SimpleNamespace(
        from_hf_map={"model.layers.{}.mlp.gate.bias": "layers.{}.moe.expert_bias"}
    )

    def args(moe_enabled: bool) -> Qwen3ModelArgs:
        return Qwen3ModelArgs(moe_enabled=moe_enabled, moe_args=MoEArgs(load_balance_coeff=1e-3))

    for made, adapter, left in (
        (args(False), None, 1e-3),
        (args(True), exporting, 1e-3),
        (args(True), None, None),
    ):
        flavors.disable_unexported_buffers(made, adapter)
        assert made.moe_args.load_balance_coeff == left


@pytest.mark.parametrize("kind", ["qwen3", "llama3", "qwen3_moe"])
def test_the_work_of_a_sequence_is_what_the_dimensions_say(kind: Kind) -> None:
    compat.prepare()
    from titan_grpo.titan.trainer import token_cost

    spec, args = flavors.model_of(*flavors.FLAVORS[kind])
    with torch.device("meta"):
        cost = token_cost(args, spec.model_cls(args))
    s = tiny.SHAPE
    attention = s.hidden * s.head_dim * (2 * s.heads + 2 * s.kv_heads)
    mlp = (
        3 * s.hidden * s.ffn
        if kind != "qwen3_moe"
        else s.hidden * (s.experts + 3 * s.experts_per_token * s.expert_ffn)
    )
    matrices = s.layers * (attention + mlp) + s.vocab * s.hidden
    # Two operations per weight forward and four backward; norms are the small rest. qwen3 ties its
    # output to the embedding.
    tied = 6 * s.vocab * s.hidden if kind == "qwen3" else 0
    assert 6 * matrices - tied <= cost.linear <= 6 * matrices * 1.01
    # Scores and values, forward and backward, 2 operations each, and half of the square is masked.
    assert cost.quadratic == s.layers * s.heads * s.head_dim * 2 * 6 / 2
