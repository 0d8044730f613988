"""torchtitan 0.3's configuration, models and trainer behind the same interface as ``upstream02``.

0.3 has no sections of its own: jobs use those of 0.2.2 (titan/sections.toml), which
``COUNTERPARTS`` and ``translated`` map to 0.3's. ``violations`` refuses keys without a counterpart,
and settings that were never run with 0.3. Models are 0.3's own, with plain causal attention.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from operator import attrgetter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import spmd_types as spmd
import torch
import torch.nn.functional as F
import torchtitan.models.llama3 as llama3
import torchtitan.models.qwen3 as qwen3
from torch.distributed.tensor import DTensor
from torchtitan.components.checkpointer import CheckpointManager
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.optimizer import (
    LRSchedulersContainer,
    OptimizersContainer,
    ParamGroupConfig,
)
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.config.configs import (
    CommConfig,
    CompileConfig,
    DebugConfig,
    ParallelismConfig,
    TrainingConfig,
)
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC
from torchtitan.models.common.attention import QKVLinear, ScaledDotProductAttention
from torchtitan.models.common.decoder_sharding import dense_param_placement
from torchtitan.models.common.linear import Linear
from torchtitan.models.common.moe import GroupedExperts
from torchtitan.tools.profiler import Profiler
from torchtitan.trainer import Trainer

from titan_grpo.config.task import Rule, broken
from titan_grpo.titan import lora
from titan_grpo.titan.engine import Built
from titan_grpo.titan.flavors import disable_unexported_buffers
from titan_grpo.titan.jobfile import JobConfig
from titan_grpo.titan.rules import compiles_model
from titan_grpo.titan.tiny import SHAPE

SECTIONS: Any = JobConfig
"""Dataclass of a job file's sections, without titan_grpo's."""

ATTENTION: type = ScaledDotProductAttention
"""Class of plain causal attention."""

TIED = {"lm_head.weight"}
"""Parameters that have no values of their own with tied embeddings."""

KNOWN = "llama3 or qwen3 with torchtitan 0.3 (no other was run with it)"
"""Rule for model.name, for error messages."""

TOKENS = 1
"""Dimension of tokens in attention inputs: [rows, tokens, heads, dim]."""

FUSED = ".qkv_linear.wqkv."
"""Part of the names of fused projections, which checkpoints and state dict adapters do not have."""


class Args:
    """0.3's model configuration with 0.2.2's field names. ``config`` and ``spec`` are 0.3's."""

    attn_type = "sdpa"

    def __init__(self, spec: Any) -> None:
        plain: Any = ATTENTION
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
    module = {"llama3": llama3, "qwen3": qwen3}[name]
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


_SIZES: dict[str, Any] = {
    "n_layers": SHAPE.layers,
    "dim": SHAPE.hidden,
    "n_heads": SHAPE.heads,
    "n_kv_heads": SHAPE.kv_heads,
}
"""Arguments common to 0.3's functions that build layers."""


def _tiny_llama3(attn_backend: str, **_: Any) -> Any:
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
    for layer in config.layers:
        layer.moe.load_balance_coeff = None
        grouped = layer.moe.routed_experts.inner_experts
        layer.moe.routed_experts.inner_experts = ExactExperts.Config(
            **{f.name: getattr(grouped, f.name) for f in fields(grouped)}
        )
    return config


class ExactExperts(GroupedExperts):
    """Experts in a loop: the grouped product computes in bfloat16."""

    @dataclass(kw_only=True, slots=True)
    class Config(GroupedExperts.Config):
        """Configuration that builds ExactExperts."""

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


TINY: dict[str, dict[str, Callable[..., Any]]] = {
    "llama3": {"grpo_tiny": _tiny_llama3},
    "qwen3": {
        "grpo_tiny": partial(_tiny_qwen3, True),
        "grpo_tiny_untied": partial(_tiny_qwen3, False),
        "grpo_tiny_moe": _tiny_moe,
    },
}
"""Models supported with 0.3 -> our tiny flavors."""


COUNTERPARTS: dict[str, tuple[str, Any]] = {
    "profiling": ("profiler", Profiler.Config),
    "metrics": ("metrics", MetricsProcessor.Config),
    "lr_scheduler": ("lr_scheduler", LRSchedulersContainer.Config),
    "training": ("training", TrainingConfig),
    "parallelism": ("parallelism", ParallelismConfig),
    "checkpoint": ("checkpoint", CheckpointManager.Config),
    "compile": ("compile", CompileConfig),
    "comm": ("comm", CommConfig),
    "debug": ("debug", DebugConfig),
}
"""Section of a job -> (0.3's name, 0.3's class). Keys of the same name are the same setting."""

TRANSLATED = {
    "optimizer": ("name", "lr", "beta1", "beta2", "eps", "weight_decay", "implementation"),
    "activation_checkpoint": ("mode", "preserve_rng_state", "determinism_check", "debug"),
    "experimental": (),
}
"""Supported keys of other sections; the rest of these sections has no counterpart."""

OURS = {
    "training.dataset",
    "training.dataset_path",
    "training.dataloader",
    "activation_checkpoint.selective_ac_option",  # 0.3 has only "op": see violations
    "checkpoint.enable_ft_dataloader_checkpoints",
    "parallelism.disable_loss_parallel",
    "parallelism.pipeline_parallel_expert_parallel_overlap",
}
"""Keys without a counterpart that have no effect on supported GRPO jobs."""


def translated(config: Any) -> dict[str, Any]:
    """Return a job's keyword arguments of Trainer.Config, without the model and the loader. Raises
    ValueError for values that 0.3's sections do not take."""
    out = {}
    for section, (name, kind) in COUNTERPARTS.items():
        known = {f.name for f in fields(kind)}
        values = {k: v for k, v in vars(getattr(config, section)).items() if k in known}
        if start := values.get("initial_load_path"):
            values["initial_load_path"] = str(Path(start).absolute())  # 0.3 takes no other
        out[name] = kind(**values)
    # Our loss has shapes that change from step to step.
    out["training"].disable_cuda_graphs = True
    # The sync needs sharded weights as DTensors; 0.3's default leaves tensor-parallel ones plain.
    out["parallelism"].spmd_backend = "partial_dtensor"
    out["debug"].print_config = config.job.print_config
    out["debug"].save_config_file = config.job.save_config_file
    out["debug"].enable_structured_logging = False
    o = config.optimizer
    options = {
        "lr": o.lr,
        "betas": (o.beta1, o.beta2),
        "eps": o.eps,
        "weight_decay": o.weight_decay,
    }
    out["optimizer"] = OptimizersContainer.Config(
        param_groups=[
            ParamGroupConfig(pattern=".*", optimizer_name=o.name, optimizer_kwargs=options)
        ],
        implementation=o.implementation,
    )
    a = config.activation_checkpoint
    shared = {key: getattr(a, key) for key in ("preserve_rng_state", "determinism_check", "debug")}
    kinds = {"full": FullAC.Config, "selective": SelectiveAC.Config}
    out["activation_checkpoint"] = None if a.mode == "none" else kinds[a.mode](**shared)
    out["dump_folder"] = config.job.dump_folder
    out["hf_assets_path"] = config.model.hf_assets_path
    return out


@dataclass(kw_only=True, slots=True)
class _Loader(BaseDataLoader.Config):
    """Configuration that builds our loader; 0.3's other arguments are for text loaders."""

    make: Any

    def build(self, *, dp_rank: int, **_: Any) -> Any:
        """Return the loader of a data-parallel rank."""
        return self.make(dp_rank)

    def to_dict(self) -> dict[str, Any]:
        """Return an empty table: nothing to log."""
        return {}


@dataclass(kw_only=True, slots=True)
class _NoTokenizer(BaseTokenizer.Config):
    """Configuration without a tokenizer: only the rollouts need one."""

    def build(self, **_: Any) -> None:
        """Return None."""


def _init_and_shard_adapter(layer: Any) -> None:
    """Give an adapter's parameters the initialisers that 0.3 requires (``lora.start_values`` sets
    the values later) and their tensor-parallel sharding: B like the weight's rows, A whole."""
    layer._param_init = {**layer._param_init, "lora_a": torch.nn.init.zeros_}
    layer._param_init["lora_b"] = torch.nn.init.zeros_
    sharding = layer._sharding_config
    if sharding is None or "weight" not in sharding.state_shardings:
        return
    cut = sharding.state_shardings
    rows = cut["weight"] == dense_param_placement(tp=spmd.S(0))
    whole = dense_param_placement(tp=spmd.R)
    added = {"lora_a": whole, "lora_b": cut["weight"] if rows else whole}
    layer._sharding_config = replace(sharding, state_shardings={**cut, **added})


@dataclass(kw_only=True, slots=True)
class _Config(Trainer.Config):
    """Configuration of 0.3's trainer that shows the job which it was made of."""

    job: Any

    def to_dict(self) -> dict[str, Any]:
        """Return the job's sections: 0.3's lack ours, in W&B and job.save_config_file."""
        return asdict(self.job)


class Engine(Built, Trainer):
    """torchtitan 0.3's trainer, built from a job."""

    def __init__(self, job_config: Any, make_loader: Callable[[int], Any]) -> None:
        self.job_config, self.pipeline = job_config, None
        spec = self.own_spec = get_spec(job_config.model.name)
        self.model_args = spec.model_args[job_config.model.flavor]
        disable_unexported_buffers(self.model_args, spec.state_dict_adapter(self.model_args, None))

        def adapter(model_config: Any, path: str | None) -> Any:
            return lora.of_base(spec.state_dict_adapter(self.model_args, path))

        model_spec = replace(self.model_args.spec, state_dict_adapter=adapter)
        self._parallelize = model_spec.parallelize_fn
        if job_config.lora.rank:
            separate_qkv(self.model_args)
            model_spec = replace(model_spec, parallelize_fn=self._with_adapters)
        super().__init__(
            _Config(
                **translated(job_config),
                job=job_config,
                model_spec=model_spec,
                # Required by Trainer, never called.
                loss=CrossEntropyLoss.Config(),
                dataloader=_Loader(make=make_loader),
                tokenizer=_NoTokenizer(),
            )
        )
        self._complete()

    def _with_adapters(self, model: torch.nn.Module, **arguments: Any) -> torch.nn.Module:
        """Parallelize the model with adapters; only these are trained."""

        def parallelize(model: torch.nn.Module) -> torch.nn.Module:
            for _, layer in lora.adapted(model):
                _init_and_shard_adapter(layer)
            made: torch.nn.Module = self._parallelize(model, **arguments)
            return made

        to_hf = self.own_spec.state_dict_adapter(self.model_args, None).to_hf
        return lora.sharded(model, to_hf, self.job_config.lora, parallelize)

    def computing(self) -> AbstractContextManager[Any]:
        """Return the context of forward and backward. No autocast: FSDP2 casts, even on one
        rank."""
        context: AbstractContextManager[Any] = self.train_context()
        return context

    def batch_generator(self, data_iterable: Any) -> Iterator[Any]:
        """Yield batches as torchtitan does, and count their tokens (see ``logits``)."""
        for batch in super().batch_generator(data_iterable):
            self.ntokens_seen += batch[1].numel()
            yield batch

    def _parallelized(self, model: torch.nn.Module) -> torch.nn.Module:
        c = self.config
        made: torch.nn.Module = self._parallelize(
            model,
            parallel_dims=self.parallel_dims,
            training=c.training,
            parallelism=c.parallelism,
            compile_config=c.compile,
            ac_config=c.activation_checkpoint,
            dump_folder=c.dump_folder,
        )
        return made


def violations(config: Any, on_cpu: bool) -> list[str]:
    """Return a job's settings that 0.3 cannot run, as "key must be rule (why), got value"."""
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
    rules += _of_model(config)
    if found := broken("", config, rules) + _without_counterpart(config):
        return found
    try:
        translated(config)
    except ValueError as error:  # from the checks of 0.3's own sections
        return [f"torchtitan 0.3 does not take this job: {error} Change that, or take 0.2.2"]
    return []


def _of_model(config: Any) -> list[Rule]:
    """Return the rules over the job's model, none if 0.3 does not have it: ``model_of`` says so."""
    name, flavor = config.model.name, config.model.flavor
    if name not in TINY or flavor not in (known := get_spec(name).model_args):
        return []
    args, split = known[flavor], config.parallelism.tensor_parallel_degree
    longest = args.config.max_seq_len
    shared = args.moe_enabled and split > 1
    return [
        (
            config.training.seq_len > longest,
            "training.seq_len",
            f"at most {longest}, the longest row that 0.3's {flavor} has positions for",
        ),
        (
            shared and config.parallelism.expert_parallel_degree == 1,
            "parallelism.expert_parallel_degree",
            f"greater than 1 where {flavor} has experts and parallelism.tensor_parallel_degree is"
            f" {split} (0.3 cuts a micro-batch's rows among these ranks, and its backward fails"
            " where they do not come out)",
        ),
        (
            shared and compiles_model(config),
            "compile.enable",
            f"false, or compile.components without model, where {flavor} has experts and"
            f" parallelism.tensor_parallel_degree is {split} (torch 2.13 fails to compile 0.3's"
            " router for rows of changing lengths)",
        ),
    ]


def _without_counterpart(config: Any) -> list[str]:
    """Return a line for each key of a job that differs from its default and has no counterpart in
    0.3."""
    plain = JobConfig()
    out = []
    known: dict[str, Collection[str]] = {**TRANSLATED}
    known |= {
        section: {f.name for f in fields(kind)} for section, (_, kind) in COUNTERPARTS.items()
    }
    for section, names in known.items():
        for f in fields(getattr(plain, section)):
            key, value = f"{section}.{f.name}", getattr(getattr(config, section), f.name)
            default = getattr(getattr(plain, section), f.name)
            if f.name not in names and key not in OURS and value != default:
                out.append(
                    f"{key} must be left out with torchtitan 0.3, which has no such setting, got"
                    f" {value!r}"
                )
    return out
