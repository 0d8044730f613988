"""torchtitan 0.3's trainer behind the same interface as ``engine02``, and the translation of a
job's configuration.

Jobs use the sections of 0.2.2. ``SECTIONS`` and ``translated`` map them to 0.3's. models03's
``violations`` refuses keys without a counterpart, and settings that were never run with 0.3.
"""

from collections.abc import Callable, Collection
from contextlib import AbstractContextManager
from dataclasses import dataclass, fields, replace
from typing import Any

import spmd_types as spmd
import torch
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
from torchtitan.models.common.decoder_sharding import dense_param_placement
from torchtitan.tools.profiler import Profiler
from torchtitan.trainer import Trainer

from titan_grpo.titan import lora, models03
from titan_grpo.titan.engine import Built
from titan_grpo.titan.flavors import disable_unexported_buffers
from titan_grpo.titan.jobfile import JobConfig

SECTIONS: dict[str, tuple[str, Any]] = {
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
    "experimental": ("custom_args_module",),
}
"""Supported keys of other sections; the rest of these sections has no counterpart."""

OURS = {
    "training.dataset",
    "training.dataset_path",
    "training.dataloader",
    "activation_checkpoint.selective_ac_option",  # 0.3 has only "op": see models03.violations
    "checkpoint.enable_ft_dataloader_checkpoints",
    "parallelism.disable_loss_parallel",
    "parallelism.pipeline_parallel_expert_parallel_overlap",
}
"""Keys without a counterpart that have no effect on supported GRPO jobs."""


def translated(config: Any) -> dict[str, Any]:
    """Return a job's keyword arguments of Trainer.Config, without the model and the loader."""
    out = {}
    for section, (name, kind) in SECTIONS.items():
        known = {f.name for f in fields(kind)}
        values = vars(getattr(config, section))
        out[name] = kind(**{key: value for key, value in values.items() if key in known})
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


class Engine(Built, Trainer):
    """torchtitan 0.3's trainer, built from a job."""

    def __init__(self, job_config: Any, make_loader: Callable[[int], Any]) -> None:
        self.job_config, self.pipeline = job_config, None
        spec = self.own_spec = models03.get_spec(job_config.model.name)
        self.model_args = spec.model_args[job_config.model.flavor]
        disable_unexported_buffers(self.model_args, spec.state_dict_adapter(self.model_args, None))

        def adapter(model_config: Any, path: str | None) -> Any:
            return lora.of_base(spec.state_dict_adapter(self.model_args, path))

        model_spec = replace(self.model_args.spec, state_dict_adapter=adapter)
        self._parallelize = model_spec.parallelize_fn
        if job_config.lora.rank:
            models03.separate_qkv(self.model_args)
            model_spec = replace(model_spec, parallelize_fn=self._with_adapters)
        super().__init__(
            Trainer.Config(
                **translated(job_config),
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


def without_counterpart(config: Any) -> list[str]:
    """Return a line for each key of a job that differs from its default and has no counterpart in
    0.3."""
    plain = JobConfig()
    out = []
    known: dict[str, Collection[str]] = {**TRANSLATED}
    known |= {section: {f.name for f in fields(kind)} for section, (_, kind) in SECTIONS.items()}
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
