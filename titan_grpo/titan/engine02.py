"""torchtitan 0.2.2's trainer behind the calls that ``engine03`` has too."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torchtitan.config import TORCH_DTYPE_MAP
from torchtitan.distributed.pipeline_parallel import pipeline_llm
from torchtitan.protocols.train_spec import register_train_spec
from torchtitan.tools import utils
from torchtitan.train import Trainer

from titan_grpo.patches import torchtitan_gloo_premul, torchtitan_pipeline_metrics
from titan_grpo.titan import flavors, lora, models02
from titan_grpo.titan.modules import load_files
from titan_grpo.titan.pipeline import Activations, Pipeline

logger = logging.getLogger(__name__)


def _register(job_config: Any, make_loader: Callable[[int], Any]) -> Any:
    """Register the user's model under a name of its own, with our loader in place of the text
    loader; returns the spec as it was."""
    spec = models02.get_spec(job_config.model.name)
    args = spec.model_args[job_config.model.flavor]
    if flavors.disable_unexported_buffers(args, spec.state_dict_adapter(args, None)):
        logger.warning(flavors.BIAS_IS_OFF)

    def build_loader(dp_world_size: int, dp_rank: int, tokenizer: Any, job_config: Any) -> Any:
        return make_loader(dp_rank)

    ours: dict[str, Any] = {
        "build_dataloader_fn": build_loader,
        "build_tokenizer_fn": None,
        "build_validator_fn": None,
    }
    if job_config.parallelism.pipeline_parallel_degree > 1:
        torchtitan_pipeline_metrics.apply()
        # qwen3 has none of its own, and runs with the one of the other language models.
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


class Engine(Trainer):
    """0.2.2's trainer, built from a job."""

    def __init__(self, job_config: Any, make_loader: Callable[[int], Any]) -> None:
        self.own_spec = _register(job_config, make_loader)
        """The model's spec as torchtitan has it: with its loader of text."""
        self.pp_schedule: Any = None
        super().__init__(job_config)
        torchtitan_gloo_premul.apply(self.model_parts)
        self.pipeline = self._pipeline(self.pp_schedule, self.model_parts)
        """None where every rank has the whole model."""
        self.whole: torch.nn.Module = self.model_parts[0]
        """The model; with a pipeline without memory."""
        if self.pipeline is not None:
            self.whole = self._on_meta()
        self.policy: torch.nn.Module = self.pipeline or self.whole
        """What this rank has of it."""
        if job_config.lora.rank:
            lora.start_values(self.model_parts[0], job_config.debug.seed or 0)
        path = str(job_config.model.hf_assets_path)
        self.to_hf = self.train_spec.state_dict_adapter(self.model_args, path).to_hf

    @contextmanager
    def computing(self) -> Iterator[None]:
        """What forward and backward happen in."""
        with self.train_context(), self.maybe_enable_amp:
            yield

    def logits(self, model: torch.nn.Module, batch: dict[str, Any]) -> torch.Tensor:
        """[R, L, V] of "input" [R, L], and of "positions" where the batch has them."""
        extra = {"positions": batch["positions"]} if "positions" in batch else {}
        inputs, _, extra_inputs, extra_kwargs = self.post_dataloading_process(
            {"input": batch["input"], **extra}, batch["labels"]
        )
        logits: torch.Tensor = model(inputs, **extra_inputs, **extra_kwargs)
        return logits

    def _on_meta(self) -> torch.nn.Module:
        dtype = TORCH_DTYPE_MAP[self.job_config.training.dtype]
        with torch.device("meta"), utils.set_default_dtype(dtype):
            model: torch.nn.Module = self.train_spec.model_cls(self.model_args)
        return model

    def _pipeline(self, schedule: Any, parts: list[torch.nn.Module]) -> Pipeline | None:
        dims, training = self.parallel_dims, self.job_config.training
        if not dims.pp_enabled:
            return None
        # as torchtitan computes with a pipeline: without FSDP there is no mixed precision
        name = training.mixed_precision_param if dims.fsdp_enabled else training.dtype
        between = Activations(self.model_args.dim, TORCH_DTYPE_MAP[name], self.device, dims.tp)
        return Pipeline(schedule, parts, dims.get_mesh("pp").get_group(), between)

    def second_model(self, path: str) -> torch.nn.Module:
        """A model built and sharded like the one that is trained (with a pipeline a Pipeline), with
        the weights of the Hugging Face files in ``path``. Collective."""
        spec, schedule = self.own_spec, None  # without adapters
        model = self._on_meta()
        if self.pipeline is None:
            parts = [spec.parallelize_fn(model, self.parallel_dims, self.job_config)]
        else:
            schedule, parts, _, _ = self.train_spec.pipelining_fn(
                model,
                self.parallel_dims,
                self.job_config,
                self.device,
                self.model_args,
                spec.parallelize_fn,
                None,
            )
        load_files(parts, spec.state_dict_adapter(self.model_args, path), path, self.device.type)
        return self._pipeline(schedule, parts) or parts[0]
