"""The reference model of the KL term: the same architecture and parallelism as the policy, weights
from HF safetensors."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torchtitan.components.checkpoint import ModelWrapper

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
    model: torch.nn.Module = trainer.second_model(path)
    model.requires_grad_(False)
    return model.eval()


def load_files(parts: Sequence[Any], adapter: Any, path: str, device: str) -> None:
    """Give the parts of a model, which are sharded and without memory, the weights of the Hugging
    Face files in ``path``. ``adapter``: torchtitan's, of these files. Collective."""
    for part in parts:
        part.to_empty(device=device)
        with torch.no_grad():
            part.init_weights(buffer_device=None)
    compat.after_parallelize(parts)
    wrapper = ModelWrapper(list(parts))
    hf_state = adapter.to_hf(wrapper.state_dict())
    dcp.load(hf_state, storage_reader=adapter.get_hf_storage_reader(path, False))
    wrapper.load_state_dict(adapter.from_hf(hf_state))


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
