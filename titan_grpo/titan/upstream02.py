"""torchtitan 0.2.2's configuration, models and trainer behind the same interface as ``upstream03``.

``titan.compat.upstream`` returns the module for the installed torchtitan. Both import it: call
``titan.compat.prepare`` first.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torchtitan.components.optimizer import build_optimizers
from torchtitan.config import TORCH_DTYPE_MAP, JobConfig
from torchtitan.distributed.pipeline_parallel import pipeline_llm
from torchtitan.models.attention import ScaledDotProductAttentionWrapper
from torchtitan.models.llama3 import TransformerModelArgs, llama3_args
from torchtitan.models.moe import MoEArgs
from torchtitan.models.qwen3 import Qwen3ModelArgs, qwen3_args
from torchtitan.protocols.train_spec import _extra_train_specs, get_train_spec
from torchtitan.train import Trainer

from titan_grpo.config.task import broken
from titan_grpo.patches import torchtitan_pipeline_metrics
from titan_grpo.titan import lora
from titan_grpo.titan.engine import Built
from titan_grpo.titan.flavors import disable_unexported_buffers
from titan_grpo.titan.pipeline import Activations, Pipeline
from titan_grpo.titan.rules import compiles_model
from titan_grpo.titan.tiny import EOS, SHAPE

SECTIONS: Any = JobConfig
"""Dataclass of a job file's sections, without titan_grpo's."""

ATTENTION: type = ScaledDotProductAttentionWrapper
"""Class of plain causal attention."""

TIED = {"output.weight"}
"""Parameters that have no values of their own with tied embeddings."""

KNOWN = "a model that torchtitan knows (llama3, qwen3, ...)"
"""Rule for model.name, for error messages."""

TOKENS = 2
"""Dimension of tokens in attention inputs: [rows, heads, tokens, dim]."""


def get_spec(name: str) -> Any:
    """Return the spec of model ``name``: ``model_args`` by flavor (with the tiny ones),
    ``model_cls``, ``state_dict_adapter``. Raises ValueError for an unknown name."""
    qwen3_args["grpo_tiny"] = _qwen3_args(tied=True, experts=False)
    qwen3_args["grpo_tiny_untied"] = _qwen3_args(tied=False, experts=False)
    qwen3_args["grpo_tiny_moe"] = _qwen3_args(tied=False, experts=True)
    llama3_args["grpo_tiny"] = _llama3_args()
    return get_train_spec(name)


def separate_qkv(args: Any) -> None:
    """Do nothing: q, k and v already have a projection each."""


def violations(config: Any, on_cpu: bool) -> list[str]:
    """Return a job's settings that 0.2.2 cannot run, as "key must be rule (why), got value".
    ``on_cpu``: training runs on the CPU."""
    p, split = config.parallelism, config.parallelism.tensor_parallel_degree
    a, f = config.activation_checkpoint, config.profiling
    uncompiled = not compiles_model(config)
    compiled = "with compile.enable, and model in compile.components"
    traced = f.profiler_warmup + f.profiler_active
    rules = (
        (
            on_cpu and config.model.name == "qwen3" and split > 1,
            "parallelism.tensor_parallel_degree",
            "1 for qwen3 on CPU (torch has no sharding rule for the CPU's attention kernel; llama3"
            " works, and 0.3 does)",
        ),
        (
            p.expert_tensor_parallel_degree not in (1, split),
            "parallelism.expert_tensor_parallel_degree",
            f"1 or that of parallelism.tensor_parallel_degree ({split}; torchtitan has no other cut"
            " of experts)",
        ),
        (
            0 < config.lora.rank < split,
            "lora.rank",
            f"at least parallelism.tensor_parallel_degree ({split}; 0.2.2 gives each rank some of"
            " A's rows, and the optimizer has no step for a rank without one; 0.3 keeps A whole)",
        ),
        (
            a.mode == "memory_budget" and uncompiled,
            "activation_checkpoint.mode",
            f'none, selective or full, or "memory_budget" {compiled} (the compiler keeps to the'
            " budget)",
        ),
        (
            a.mode == "selective"
            and a.selective_ac_option != "op"
            and not a.selective_ac_option.isdigit(),
            "activation_checkpoint.selective_ac_option",
            '"op", or a number such as "2" (each second layer)',
        ),
        (
            a.mode == "selective" and a.selective_ac_option == "op" and a.debug,
            "activation_checkpoint.debug",
            'false with selective_ac_option = "op" (torch has no such record of it)',
        ),
        (
            split > 1 and p.enable_async_tensor_parallel and uncompiled,
            "parallelism.enable_async_tensor_parallel",
            f"false, or true {compiled} (the compiler makes the products overlap)",
        ),
        (
            split > 1 and config.model.name == "deepseek_v3" and not uncompiled,
            "compile.enable",
            "false for deepseek_v3 with parallelism.tensor_parallel_degree > 1, or"
            " compile.components without model (torch 2.13 fails to compile its attention for rows"
            " of changing lengths)",
        ),
        (
            f.enable_profiling
            and (f.profiler_warmup < 0 or f.profiler_active < 1 or f.profile_freq < traced),
            "profiling.profile_freq",
            "at least profiling.profiler_warmup (0 or more) and profiler_active (1 or more) steps"
            f" together ({f.profiler_warmup} and {f.profiler_active})",
        ),
        (
            config.training.seq_len % (2 * split) != 0,
            "training.seq_len",
            f"a multiple of {2 * split}, twice parallelism.tensor_parallel_degree (0.2.2 takes no"
            " other length)",
        ),
    )
    return broken("", config, rules)


def _qwen3_args(tied: bool, experts: bool) -> Any:
    s = SHAPE
    # Experts in a loop: the grouped product computes in bf16, and is no faster on a CPU.
    moe = MoEArgs(
        num_experts=s.experts,
        num_shared_experts=0,
        top_k=s.experts_per_token,
        score_func="softmax",
        route_norm=True,
        score_before_experts=False,
        use_grouped_mm=False,
        load_balance_coeff=None,
    )
    return Qwen3ModelArgs(
        vocab_size=s.vocab,
        max_seq_len=s.max_positions,
        head_dim=s.head_dim,
        dim=s.hidden,
        n_layers=s.layers,
        n_heads=s.heads,
        n_kv_heads=s.kv_heads,
        qk_norm=True,
        hidden_dim=s.ffn,
        rope_theta=1000000,
        eos_id=EOS,
        enable_weight_tying=tied,
        moe_enabled=experts,
        moe_inter_dim=s.expert_ffn,
        moe_args=moe,
    )


def _llama3_args() -> Any:
    s = SHAPE
    # torchtitan derives the FFN's width: int(2 * 4 * 128 / 3) = 341, rounded up to a multiple of
    # ``multiple_of``, gives SHAPE.ffn.
    return TransformerModelArgs(
        dim=s.hidden,
        n_layers=s.layers,
        n_heads=s.heads,
        n_kv_heads=s.kv_heads,
        vocab_size=s.vocab,
        multiple_of=s.ffn,
        rope_theta=500000,
        max_seq_len=s.max_positions,
        eos_id=EOS,
    )


def _register(job_config: Any, make_loader: Callable[[int], Any]) -> Any:
    """Put our loader in place of the text loader in the registered model; return the unchanged
    spec."""
    spec = get_spec(job_config.model.name)
    args = spec.model_args[job_config.model.flavor]
    disable_unexported_buffers(args, spec.state_dict_adapter(args, None))

    def build_loader(dp_world_size: int, dp_rank: int, tokenizer: Any, job_config: Any) -> Any:
        return make_loader(dp_rank)

    ours: dict[str, Any] = {
        "build_dataloader_fn": build_loader,
        "build_tokenizer_fn": None,
        "build_validator_fn": None,
        # Without the hook that moves an MoE's load balancing bias: it counts padding, empty
        # micro-batches and passes without gradient like tokens that are trained on.
        "build_optimizers_fn": build_optimizers,
    }
    if job_config.parallelism.pipeline_parallel_degree > 1:
        torchtitan_pipeline_metrics.apply()
        # qwen3 has none of its own; that of the other language models works.
        ours["pipelining_fn"] = spec.pipelining_fn or pipeline_llm
    if job_config.lora.rank:
        to_hf = spec.state_dict_adapter(args, None).to_hf

        def parallelize(model: torch.nn.Module, *arguments: Any) -> torch.nn.Module:
            return lora.sharded(model, to_hf, job_config.lora, spec.parallelize_fn, *arguments)

        def build_adapter(*arguments: Any) -> Any:
            return lora.of_base(spec.state_dict_adapter(*arguments))

        ours |= {"parallelize_fn": parallelize, "state_dict_adapter": build_adapter}
    # Not under another name: the job's is shown, and saved (job.save_config_file, W&B).
    _extra_train_specs[job_config.model.name] = type(spec)(**{**vars(spec), **ours})
    return spec


class Engine(Built, Trainer):
    """torchtitan 0.2.2's trainer, built from a job."""

    def __init__(self, job_config: Any, make_loader: Callable[[int], Any]) -> None:
        self.own_spec = _register(job_config, make_loader)
        self.pp_schedule: Any = None
        super().__init__(job_config)
        staged = self.parallel_dims.pp_enabled
        self.pipeline = self._pipeline(self.pp_schedule, self.model_parts) if staged else None
        self._complete()

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Enter the contexts of forward and backward."""
        with self.train_context(), self.maybe_enable_amp:
            yield

    def _pipeline(self, schedule: Any, parts: list[torch.nn.Module]) -> Pipeline:
        dims, training = self.parallel_dims, self.job_config.training
        # as torchtitan does with a pipeline: without FSDP there is no mixed precision
        name = training.mixed_precision_param if dims.fsdp_enabled else training.dtype
        between = Activations(self.model_args.dim, TORCH_DTYPE_MAP[name], self.device, dims.tp)
        return Pipeline(schedule, parts, dims.get_mesh("pp").get_group(), between)

    def _parallelized(self, model: torch.nn.Module) -> torch.nn.Module:
        parallelize, dims, job = self.own_spec.parallelize_fn, self.parallel_dims, self.job_config
        if self.pipeline is None:
            made: torch.nn.Module = parallelize(model, dims, job)
            return made
        schedule, parts, _, _ = self.train_spec.pipelining_fn(
            model, dims, job, self.device, self.model_args, parallelize, None
        )
        return self._pipeline(schedule, parts)
