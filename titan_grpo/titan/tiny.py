"""Tiny random models in the Hugging Face layout, for machines without a model hub: quickstart,
verify, tests.

Needs torch, safetensors and tokenizers, not torchtitan. upstream02 and upstream03 define torchtitan
flavors of the same shapes.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

Kind = Literal["qwen3", "qwen3_untied", "llama3", "qwen3_moe"]

PAD, BOS, EOS, UNK = 0, 1, 2, 3
"""Ids of the special tokens."""

SPECIAL_TOKENS = ("<pad>", "<bos>", "<eos>", "<unk>")


@dataclass(frozen=True, slots=True)
class TinyShape:
    """Sizes that all kinds share, chosen so that a model learns to emit digits in 20 steps at
    learning rate 3e-3."""

    vocab: int = 128
    hidden: int = 128
    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    ffn: int = 512
    experts: int = 8
    experts_per_token: int = 2
    expert_ffn: int = 128
    max_positions: int = 16384


SHAPE = TinyShape()

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ message.role }}: {{ message.content }}\n"
    "{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)
"""Chat template with the parts of a real one: a special token, roles, a generation prompt."""

LLAMA3_ROPE: dict[str, Any] = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
"""Rope scaling of torchtitan's llama3, which cannot be off: without it in config.json an engine
would serve another model."""


def _common_config(s: TinyShape) -> dict[str, Any]:
    return {
        "vocab_size": s.vocab,
        "hidden_size": s.hidden,
        "intermediate_size": s.ffn,
        "num_hidden_layers": s.layers,
        "num_attention_heads": s.heads,
        "num_key_value_heads": s.kv_heads,
        "head_dim": s.head_dim,
        "max_position_embeddings": s.max_positions,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "use_cache": True,
        "pad_token_id": PAD,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
    }


def hf_config(kind: Kind, dtype: str, shape: TinyShape) -> dict[str, Any]:
    """Return the content of config.json for a kind. ``dtype``: the engines' default type for the
    model."""
    config = _common_config(shape) | {"torch_dtype": dtype, "tie_word_embeddings": kind == "qwen3"}
    if kind == "llama3":
        family = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "mlp_bias": False}
        # Scaled rotary frequencies imply more positions than the original model had.
        positions = {"max_position_embeddings": 2 * LLAMA3_ROPE["original_max_position_embeddings"]}
        rope = {"rope_theta": 500000.0, "rope_scaling": LLAMA3_ROPE}
        return config | family | positions | rope | {"rms_norm_eps": 1e-5}
    config |= {
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "rope_scaling": None,
        "use_sliding_window": False,
    }
    if kind != "qwen3_moe":
        return config | {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}
    return config | {
        "model_type": "qwen3_moe",
        "architectures": ["Qwen3MoeForCausalLM"],
        "num_experts": shape.experts,
        "num_experts_per_tok": shape.experts_per_token,
        "moe_intermediate_size": shape.expert_ffn,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "router_aux_loss_coef": 0.0,
    }


def _mlp_shapes(prefix: str, hidden: int, ffn: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"{prefix}.gate_proj.weight", (ffn, hidden)
    yield f"{prefix}.up_proj.weight", (ffn, hidden)
    yield f"{prefix}.down_proj.weight", (hidden, ffn)


def _layer_shapes(kind: Kind, prefix: str, s: TinyShape) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"{prefix}.self_attn.q_proj.weight", (s.heads * s.head_dim, s.hidden)
    yield f"{prefix}.self_attn.k_proj.weight", (s.kv_heads * s.head_dim, s.hidden)
    yield f"{prefix}.self_attn.v_proj.weight", (s.kv_heads * s.head_dim, s.hidden)
    yield f"{prefix}.self_attn.o_proj.weight", (s.hidden, s.heads * s.head_dim)
    if kind != "llama3":
        yield f"{prefix}.self_attn.q_norm.weight", (s.head_dim,)
        yield f"{prefix}.self_attn.k_norm.weight", (s.head_dim,)
    if kind == "qwen3_moe":
        yield f"{prefix}.mlp.gate.weight", (s.experts, s.hidden)
        for expert in range(s.experts):
            yield from _mlp_shapes(f"{prefix}.mlp.experts.{expert}", s.hidden, s.expert_ffn)
    else:
        yield from _mlp_shapes(f"{prefix}.mlp", s.hidden, s.ffn)
    yield f"{prefix}.input_layernorm.weight", (s.hidden,)
    yield f"{prefix}.post_attention_layernorm.weight", (s.hidden,)


def hf_shapes(kind: Kind, shape: TinyShape = SHAPE) -> dict[str, tuple[int, ...]]:
    """Return the shape of each tensor of model.safetensors by name; no lm_head.weight if tied."""
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (shape.vocab, shape.hidden)}
    for layer in range(shape.layers):
        shapes.update(_layer_shapes(kind, f"model.layers.{layer}", shape))
    shapes["model.norm.weight"] = (shape.hidden,)
    if kind != "qwen3":
        shapes["lm_head.weight"] = (shape.vocab, shape.hidden)
    return shapes


def tiny_weights(
    kind: Kind,
    seed: int,
    std: float = 0.02,
    dtype: torch.dtype = torch.float32,
    shape: TinyShape = SHAPE,
) -> dict[str, Tensor]:
    """Return random weights by HF name: matrices normal(0, std), norms normal(1, std).

    A seed gives the same weights on every machine. Norms differ from ones, so that a test notices
    one loaded in the place of another. A larger ``std`` (such as 0.1) makes models differ clearly
    in their log-probabilities.
    """
    generator = torch.Generator().manual_seed(seed)
    out = {}
    for name, size in hf_shapes(kind, shape).items():
        value = torch.randn(size, generator=generator) * std
        out[name] = (value + 1.0 if name.endswith("norm.weight") else value).to(dtype)
    return out


def vocabulary() -> list[str]:
    """Return 128 tokens by id: four specials, newline, the 95 printable ASCII characters, and 28
    characters from U+00C0 on. One character per token: a text has as many tokens as characters."""
    ascii_characters = [chr(code) for code in range(32, 127)]
    tokens = [*SPECIAL_TOKENS, "\n", *ascii_characters]
    return tokens + [chr(0xC0 + i) for i in range(SHAPE.vocab - len(tokens))]


def _write_tokenizer(path: Path) -> None:
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

    vocab = {token: index for index, token in enumerate(vocabulary())}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token=SPECIAL_TOKENS[UNK]))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL_TOKENS])
    tokenizer.save(str(path / "tokenizer.json"))
    names = dict(
        zip(("pad_token", "bos_token", "eos_token", "unk_token"), SPECIAL_TOKENS, strict=True)
    )
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    limits = {"model_max_length": SHAPE.max_positions, "chat_template": CHAT_TEMPLATE}
    _write_json(path / "tokenizer_config.json", settings | names | limits)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def write_tiny_model(
    kind: Kind,
    path: str | Path,
    seed: int = 0,
    *,
    std: float = 0.02,
    dtype: str = "bfloat16",
    shape: TinyShape = SHAPE,
) -> Path:
    """Write config.json, model.safetensors, the tokenizer and generation_config.json; return the
    directory. ``dtype`` ("bfloat16" or "float32") is the type on disk and in config.json."""
    from safetensors.torch import save

    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    weights = tiny_weights(kind, seed, std, getattr(torch, dtype), shape)
    # One file without an index: torchtitan cannot read an index of file names without numbers.
    # Not save_file: a server of another user could not read its file.
    (folder / "model.safetensors").write_bytes(save(weights, metadata={"format": "pt"}))
    _write_json(folder / "config.json", hf_config(kind, dtype, shape))
    _write_json(
        folder / "generation_config.json",
        {"pad_token_id": PAD, "bos_token_id": BOS, "eos_token_id": EOS},
    )
    _write_tokenizer(folder)
    return folder
