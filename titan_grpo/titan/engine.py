"""Parts that the trainers of both torchtitans share: the model of a run, its logits, and a second
model like it."""

from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torchtitan.components.checkpoint import ModelWrapper
from torchtitan.config import TORCH_DTYPE_MAP
from torchtitan.tools import utils

from titan_grpo.patches import (
    torch_compiled_meshes,
    torch_selective_gather,
    torch_symbolic_products,
    torchtitan_compiled_embeddings,
    torchtitan_gloo_premul,
    torchtitan_hsdp_experts,
    torchtitan_router_gradient,
)
from titan_grpo.patches.versions import inside
from titan_grpo.titan import compat, lora
from titan_grpo.titan.jobfile import quantised, read_config
from titan_grpo.titan.pipeline import Pipeline, parts_of
from titan_grpo.titan.rules import compiles_model


class Built:
    """Mixin of the Engines in ``upstream02`` and ``upstream03``, beside torchtitan's Trainer. They
    set the attributes declared here, then call ``_complete``."""

    own_spec: Any
    """torchtitan's own spec of the model: with its text loader, without adapters."""
    model_args: Any
    job_config: Any
    pipeline: Pipeline | None
    """None without pipeline parallelism."""

    model_parts: list[torch.nn.Module]
    device: torch.device
    parallel_dims: Any
    ntokens_seen: int
    post_dataloading_process: Any
    """Set by torchtitan, like the three before it."""

    def _complete(self) -> None:
        config = self.job_config
        torchtitan_gloo_premul.apply(self.model_parts)
        torch_selective_gather.apply()
        if config.parallelism.data_parallel_replicate_degree > 1:
            torchtitan_hsdp_experts.apply()
        dims = self.parallel_dims
        compiled = compiles_model(config)
        if compiled:
            torch_symbolic_products.apply()
            # Of a layer's graphs: torch ends a run at the ninth. A batch of one row is one kind of
            # input, as are no gradients, the embeddings beside adapters, and the reference's layer.
            torch._dynamo.config.recompile_limit = 64
            if dims.tp_enabled:
                torch_compiled_meshes.apply(self.device.type == "cpu")
        if dims.tp_enabled and not inside(compat.require_torchtitan(), compat.THREE):
            borrowed = dims.ep_enabled and not dims.etp_enabled
            torchtitan_router_gradient.apply(self.model_parts, dims.get_mesh("tp"), borrowed)
            if compiled:
                torchtitan_compiled_embeddings.apply(self.model_parts)
        self.whole = self.model_parts[0] if self.pipeline is None else self._on_meta()
        """The whole model; with a pipeline on the meta device."""
        self.policy: torch.nn.Module = self.pipeline or self.whole
        """This rank's part of the model."""
        if config.lora.rank:
            lora.start_values(self.model_parts[0], config.debug.seed or 0)
        path = str(config.model.hf_assets_path)
        self.to_hf = lora.of_base(self.own_spec.state_dict_adapter(self.model_args, path)).to_hf

    def logits(self, model: torch.nn.Module, batch: dict[str, Any]) -> torch.Tensor:
        """Return logits [R, L, V] of "input" [R, L], with "positions" if the batch has them."""
        given = {name: batch[name] for name in ("input", "positions") if name in batch}
        # 0.2.2 returns further arguments in two tables, 0.3 in one. 0.3 also counts the tokens of
        # each pass here: its Engine counts those of a batch once, as 0.2.2 does.
        seen = self.ntokens_seen
        inputs, _, *tables = self.post_dataloading_process(given, batch["labels"])
        self.ntokens_seen = seen
        further = {name: value for table in tables for name, value in table.items()}
        logits: torch.Tensor = model(inputs, **further)
        return logits

    def second_model(self, path: str) -> torch.nn.Module:
        """Build a model sharded like the trained one (with a pipeline a Pipeline), with the weights
        of the Hugging Face files in ``path``. Collective."""
        model = self._parallelized(self._on_meta())
        parts = parts_of(model)
        for part in parts:
            part.to_empty(device=self.device.type)
            with torch.no_grad():
                part.init_weights(buffer_device=None)
        torchtitan_gloo_premul.apply(parts)
        wrapper = ModelWrapper(parts)
        adapter = self.own_spec.state_dict_adapter(self.model_args, path)
        hf_state = adapter.to_hf(wrapper.state_dict())
        reader = adapter.get_hf_storage_reader(path, quantised(read_config(path)))
        dcp.load(hf_state, storage_reader=reader)
        wrapper.load_state_dict(adapter.from_hf(hf_state))
        return model

    def _on_meta(self) -> torch.nn.Module:
        dtype = TORCH_DTYPE_MAP[self.job_config.training.dtype]
        with torch.device("meta"), utils.set_default_dtype(dtype):
            model: torch.nn.Module = self.own_spec.model_cls(self.model_args)
        return model

    def _parallelized(self, model: torch.nn.Module) -> torch.nn.Module:
        """Return the model sharded like the trained one, without adapters."""
        raise NotImplementedError
