"""torchtitan 0.2.2's trainer behind the same interface as ``engine03``."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torchtitan.config import TORCH_DTYPE_MAP
from torchtitan.distributed.pipeline_parallel import pipeline_llm
from torchtitan.protocols.train_spec import register_train_spec
from torchtitan.train import Trainer

from titan_grpo.patches import torchtitan_pipeline_metrics
from titan_grpo.titan import lora, models02
from titan_grpo.titan.engine import Built
from titan_grpo.titan.flavors import disable_unexported_buffers
from titan_grpo.titan.pipeline import Activations, Pipeline


def _register(job_config: Any, make_loader: Callable[[int], Any]) -> Any:
    """Register the user's model under a name of its own, with our loader instead of the text
    loader; return the unchanged spec."""
    spec = models02.get_spec(job_config.model.name)
    args = spec.model_args[job_config.model.flavor]
    disable_unexported_buffers(args, spec.state_dict_adapter(args, None))

    def build_loader(dp_world_size: int, dp_rank: int, tokenizer: Any, job_config: Any) -> Any:
        return make_loader(dp_rank)

    ours: dict[str, Any] = {
        "build_dataloader_fn": build_loader,
        "build_tokenizer_fn": None,
        "build_validator_fn": None,
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
    job_config.model.name = f"grpo_{job_config.model.name}"
    register_train_spec(job_config.model.name, type(spec)(**{**vars(spec), **ours}))
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
