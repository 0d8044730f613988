"""torchtitan 0.3's configuration and models behind the same interface as ``models02``.

0.3 has no sections of its own: jobs use those of 0.2.2 (titan/sections.toml), and ``engine03``
translates them. Models are 0.3's own, with plain causal attention.
"""

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import cache, partial
from operator import attrgetter
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor

from titan_grpo.config.task import broken
from titan_grpo.layout.infer import ToHF
from titan_grpo.titan.lora import is_adapter
from titan_grpo.titan.tiny import SHAPE

TIED = {"lm_head.weight"}
"""Parameters that have no values of their own with tied embeddings."""

KNOWN = "llama3 or qwen3 with torchtitan 0.3 (no other was run with it)"
"""Rule for model.name, for error messages."""

TOKENS = 1
"""Dimension of tokens in attention inputs: [rows, tokens, heads, dim]."""

FUSED = ".qkv_linear.wqkv."
"""Part of the names of fused projections, which checkpoints and state dict adapters do not have."""


def torchtitan_sections() -> Any:
    """Return the dataclass of a job file's sections, without titan_grpo's."""
    from titan_grpo.titan.jobfile import JobConfig

    return JobConfig


def attention() -> type:
    """Return the class of plain causal attention."""
    from torchtitan.models.common.attention import ScaledDotProductAttention

    kind: type = ScaledDotProductAttention
    return kind


class Args:
    """0.3's model configuration with 0.2.2's field names. ``config`` and ``spec`` are 0.3's."""

    attn_type = "sdpa"

    def __init__(self, spec: Any) -> None:
        plain: Any = attention()
        self.spec, self.config = spec, spec.model
        first = self.config.layers[0].attention
        # sdpa, as in 0.2.2. 0.3's defaults cut a row at positions of zero or compute in bfloat16,
        # and have no backward on a CPU.
        for each in self.config.layers:
            if each.attention is not None:
                each.attention.inner_attention = plain.Config()
        self.dim, self.vocab_size = self.config.dim, self.config.vocab_size
        self.n_layers, self.n_heads = len(self.config.layers), first.n_heads
        self.n_kv_heads = first.n_kv_heads or first.n_heads
        self.head_dim = first.head_dim or self.dim // self.n_heads
        self.norm_eps = self.config.norm.eps
        self.rope_theta = first.rope.theta
        self.rope_scaling_args = None if first.rope.scaling == "none" else first.rope
        self.enable_weight_tying = self.config.enable_weight_tying
        experts = [each.moe for each in self.config.layers if getattr(each, "moe", None)]
        self.all_moe_args, self.moe_enabled = experts, bool(experts)
        self.moe_args = experts[0] if experts else None

    def update_from_config(self, job_config: Any) -> None:
        """Do nothing: no setting of a job changes a model's parameters."""

    def get_nparams_and_flops(self, model: torch.nn.Module, length: int) -> tuple[int, int]:
        """Return 0.3's own counts."""
        counted: tuple[int, int] = self.config.get_nparams_and_flops(model, length)
        return counted


class Flavors(dict[str, Any]):
    """Arguments by flavor, built anew at each access: a Trainer changes them in place."""

    def __getitem__(self, flavor: str) -> Args:
        return Args(super().__getitem__(flavor)())


def get_spec(name: str) -> Any:
    """Return the spec of model ``name``: ``model_args`` by flavor (with the tiny ones),
    ``model_cls``, ``state_dict_adapter``. Raises ValueError for an unknown name."""
    if name not in TINY:
        raise ValueError(name)
    module = importlib.import_module(f"torchtitan.models.{name}")
    table = getattr(module, f"{name}_configs")
    table |= TINY[name]

    def adapter(args: Args, path: str | None) -> Any:
        return splitting(args.spec.state_dict_adapter, args)(args.config, path)

    def build(args: Args) -> torch.nn.Module:
        model: torch.nn.Module = args.config.build()
        return model

    made = {each: partial(module.model_registry, each, attn_backend="varlen") for each in table}
    return SimpleNamespace(model_args=Flavors(made), model_cls=build, state_dict_adapter=adapter)


def separate_qkv(args: Args) -> None:
    """Replace each layer's fused projection by three, which LoRA adapters can be put on."""
    from torchtitan.models.common.attention import QKVLinear
    from torchtitan.models.common.linear import Linear

    start = {"weight": partial(torch.nn.init.trunc_normal_, std=0.02), "bias": torch.nn.init.zeros_}

    def projection(heads: int) -> Any:
        width = heads * args.head_dim
        return Linear.Config(in_features=args.dim, out_features=width, param_init=start)

    for layer in args.config.layers:
        layer.attention.qkv_linear = QKVLinear.Config(
            head_dim=args.head_dim, wq=projection(args.n_heads), wkv=projection(args.n_kv_heads)
        )


def splitting(kind: Any, args: Args) -> type:
    """Return a StateDictAdapter class that splits fused projections: ``kind`` would omit them
    silently."""

    def to_hf(self: Any, state_dict: Mapping[str, Any]) -> dict[str, Any]:
        whole: dict[str, Any] = {}
        for name, value in state_dict.items():
            whole |= split_qkv(name, value, args) if FUSED in name else {name: value}
        exported: dict[str, Any] = kind.to_hf(self, whole)
        return exported

    return type(kind.__name__, (kind,), {"to_hf": to_hf})


def split_qkv(name: str, fused: torch.Tensor, args: Any) -> dict[str, torch.Tensor]:
    """Split a fused projection [(heads + 2 kv_heads) * head_dim, ..], which has for each KV head
    its query heads, then K, then V. Source: 0.3's FusedQKVLinear."""
    each = args.n_heads // args.n_kv_heads
    tail = fused.shape[1:]
    heads = fused.reshape(args.n_kv_heads, each + 2, args.head_dim, *tail)
    parts = {"wq": heads[:, :each], "wk": heads[:, each], "wv": heads[:, each + 1]}
    return {name.replace("wqkv", part): x.reshape(-1, *tail) for part, x in parts.items()}


def stored_tensors(model: torch.nn.Module, to_hf: ToHF) -> list[tuple[str, torch.Tensor]]:
    """Return the tensors of a model that a checkpoint has, by name, without LoRA adapters. 0.3
    itself splits fused projections. Collective."""
    return [(name, t) for name, t in model.state_dict().items() if not is_adapter(name)]


_SIZES: dict[str, Any] = {
    "n_layers": SHAPE.layers,
    "dim": SHAPE.hidden,
    "n_heads": SHAPE.heads,
    "n_kv_heads": SHAPE.kv_heads,
}
"""Arguments common to 0.3's functions that build layers."""


def _tiny_llama3(attn_backend: str, **_: Any) -> Any:
    import torchtitan.models.llama3 as llama3

    s = SHAPE
    rope = llama3.ComplexRoPE.Config(
        dim=s.head_dim, max_seq_len=s.max_positions, theta=500000, scaling="llama"
    )
    return llama3.model.Llama3Model.Config(
        dim=s.hidden,
        vocab_size=s.vocab,
        tok_embeddings=llama3.Embedding.Config(
            num_embeddings=s.vocab, embedding_dim=s.hidden, param_init=llama3._EMBEDDING_INIT
        ),
        norm=llama3.RMSNorm.Config(normalized_shape=s.hidden, param_init=llama3._NORM_INIT),
        lm_head=llama3.Linear.Config(
            in_features=s.hidden,
            out_features=s.vocab,
            param_init=llama3._output_linear_init(s.hidden),
        ),
        layers=llama3._build_llama3_layers(
            **_SIZES,
            hidden_dim=s.ffn,
            rope=rope,
            attn_backend=attn_backend,
        ),
    )


def _tiny_qwen3(tied: bool, attn_backend: str, **_: Any) -> Any:
    import torchtitan.models.qwen3 as qwen3

    s = SHAPE
    start = qwen3._EMBEDDING_SKIP_INIT if tied else qwen3._EMBEDDING_INIT
    return qwen3.Qwen3Model.Config(
        vocab_size=s.vocab,
        dim=s.hidden,
        norm=qwen3._qwen3_norm(s.hidden),
        enable_weight_tying=tied,
        tok_embeddings=qwen3.Embedding.Config(
            num_embeddings=s.vocab, embedding_dim=s.hidden, param_init=start
        ),
        lm_head=qwen3.Linear.Config(
            in_features=s.hidden, out_features=s.vocab, param_init=qwen3._LINEAR_INIT
        ),
        layers=qwen3._build_qwen3_layers(
            **_SIZES,
            head_dim=s.head_dim,
            hidden_dim=s.ffn,
            attn_backend=attn_backend,
            rope=qwen3.CosSinRoPE.Config(
                dim=s.head_dim, max_seq_len=s.max_positions, theta=1000000.0
            ),
        ),
    )


def _tiny_moe(attn_backend: str, **_: Any) -> Any:
    import torchtitan.models.qwen3 as qwen3

    s = SHAPE
    config = _tiny_qwen3(False, attn_backend)
    rope = config.layers[0].attention.rope
    config.layers = qwen3._build_qwen3_moe_layers(
        **_SIZES,
        head_dim=s.head_dim,
        moe_hidden_dim=s.expert_ffn,
        num_experts=s.experts,
        top_k=s.experts_per_token,
        attn_backend=attn_backend,
        moe_comm_backend="standard",
        rope=rope,
    )
    exact: Any = _exact_experts()
    for layer in config.layers:
        layer.moe.load_balance_coeff = None
        grouped = layer.moe.routed_experts.inner_experts
        layer.moe.routed_experts.inner_experts = exact.Config(
            **{f.name: getattr(grouped, f.name) for f in fields(grouped)}
        )
    return config


@cache
def _exact_experts() -> type:
    """Return a class of experts in a loop: the grouped product computes in bfloat16."""
    from torchtitan.models.common.moe import GroupedExperts

    class ExactExperts(GroupedExperts):  # type: ignore[misc]
        @dataclass(kw_only=True, slots=True)
        class Config(GroupedExperts.Config):  # type: ignore[misc]
            pass

        def forward(self, x: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
            """[tokens, dim], ordered by expert with ``counts`` each -> the same shape."""
            cut = (self.w1_EFD, self.w2_EDF, self.w3_EFD)
            w1, w2, w3 = (w.to_local() if isinstance(w, DTensor) else w for w in cut)
            sizes = counts.tolist()
            parts = [
                (F.silu(rows @ up.T) * (rows @ gate.T)) @ down.T
                for rows, up, down, gate in zip(x.split(sizes), w1, w2, w3, strict=True)
            ]
            return torch.cat(parts)

    return ExactExperts


TINY: dict[str, dict[str, Callable[..., Any]]] = {
    "llama3": {"grpo_tiny": _tiny_llama3},
    "qwen3": {
        "grpo_tiny": partial(_tiny_qwen3, True),
        "grpo_tiny_untied": partial(_tiny_qwen3, False),
        "grpo_tiny_moe": _tiny_moe,
    },
}
"""Models supported with 0.3 -> our tiny flavors."""


def violations(config: Any) -> list[str]:
    """Return a job's settings that 0.3 cannot run, as "key must be rule (why), got value"."""
    from titan_grpo.titan.engine03 import without_counterpart

    never = "never run with torchtitan 0.3; take 0.2.2"
    allowed: tuple[tuple[str, tuple[Any, ...], str], ...] = (
        ("parallelism.pipeline_parallel_degree", (1,), f" ({never})"),
        ("grpo.ptx_mixin_batchsize", (0,), f" ({never})"),
        ("activation_checkpoint.mode", ("none", "selective", "full"), f" ({never})"),
        # "2" is 0.2.2's default: not set by the job
        ("activation_checkpoint.selective_ac_option", ("op", "2"), " (0.3 selects operations)"),
    )
    rules = [
        (attrgetter(key)(config) not in values, key, f"{' or '.join(map(repr, values))}{why}")
        for key, values, why in allowed
    ]
    return broken("", config, rules) + without_counterpart(config)
