"""The reference model of the KL term: the same architecture and parallelism as the policy, weights
from HF safetensors."""

from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torchtitan.components.checkpoint import ModelWrapper
from torchtitan.config import TORCH_DTYPE_MAP
from torchtitan.tools import utils

from titan_grpo.errors import ConfigError, ProtocolError
from titan_grpo.titan import compat


def build_reference(trainer: Any, job_config: Any) -> torch.nn.Module:
    """Build, shard and load the reference model. Collective over all ranks.

    Its weights come from disk and not from the policy, so a resumed run has the same reference as
    the one it continues. Raises ConfigError if the configuration names no directory.
    """
    path = job_config.grpo.reference_model or job_config.model.hf_assets_path
    if not path:
        raise ConfigError(
            "grpo.kl_beta > 0 needs grpo.reference_model or model.hf_assets_path, got neither"
        )
    spec = trainer.train_spec
    dtype = TORCH_DTYPE_MAP[job_config.training.dtype]
    with torch.device("meta"), utils.set_default_dtype(dtype):
        model: torch.nn.Module = spec.model_cls(trainer.model_args)
    model = spec.parallelize_fn(model, trainer.parallel_dims, job_config)
    model.to_empty(device=trainer.device.type)
    with torch.no_grad():
        model.init_weights(buffer_device=None)  # type: ignore[operator]
    compat.after_parallelize([model])
    adapter = spec.state_dict_adapter(trainer.model_args, path)
    wrapper = ModelWrapper(model)
    hf_state = adapter.to_hf(wrapper.state_dict())
    dcp.load(hf_state, storage_reader=adapter.get_hf_storage_reader(path, False))
    wrapper.load_state_dict(adapter.from_hf(hf_state))
    model.requires_grad_(False)
    return model.eval()


@torch.no_grad()
def move_reference(reference: torch.nn.Module, policy: torch.nn.Module, ema: float) -> None:
    """reference = ema * reference + (1 - ema) * policy, on this rank's own shards: in place,
    without communication. For a step boundary, where FSDP2 has the policy sharded."""
    for module in reference.modules():
        if isinstance(module, FSDPModule):
            # A forward without backward leaves the last group gathered, and that copy would be used
            # again.
            module.reshard()
    ours, theirs = (
        [p.to_local() if isinstance(p, DTensor) else p.data for p in model.parameters()]
        for model in (reference, policy)
    )
    if [p.shape for p in ours] != [p.shape for p in theirs]:
        raise ProtocolError(
            "reference and policy must be sharded alike, and their local parameters differ in"
            " number or shape"
        )
    torch._foreach_lerp_(ours, theirs, 1 - ema)
