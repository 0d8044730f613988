"""Make vLLM's CPU backend use only the experts of its own worker."""

from functools import wraps
from typing import Any

import torch

from titan_grpo.patches import vllm_cpu_reload

WHY = (
    "With --enable-expert-parallel and several workers each has some of the experts, and"
    " expert_map says which. CPUUnquantizedExperts says that it can (_supports_parallel_config) and"
    " does not read the map: its kernel looks up an expert's number among all in the weights of its"
    " own few, beyond their end. The engine ends at the first request."
)
APPLIES_TO = vllm_cpu_reload.APPLIES_TO
DELETE_WHEN = "CPUUnquantizedExperts.apply of vLLM reads expert_map"


def apply() -> bool:
    """Patch vLLM on the CPU backend; return whether it is patched. Idempotent.

    Raises:
        UpstreamError: the CPU backend's version is not in ``APPLIES_TO``.
    """
    if not vllm_cpu_reload.apply():
        return False
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

    theirs = CPUUnquantizedExperts.apply
    if not hasattr(theirs, "__wrapped__"):
        CPUUnquantizedExperts.apply = _with_own_experts(theirs)
    return True


def _with_own_experts(theirs: Any) -> Any:
    @wraps(theirs)
    def apply(self: Any, **arguments: Any) -> Any:
        places = arguments["expert_map"]
        if places is not None:
            assert not arguments["apply_router_weight_on_input"], "weights must be the output's"
            ids, weights = own_experts(arguments["topk_ids"], arguments["topk_weights"], places)
            arguments |= {"topk_ids": ids, "topk_weights": weights}
        return theirs(self, **arguments)

    return apply


def own_experts(
    ids: torch.Tensor, weights: torch.Tensor, places: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return experts [tokens, k] as places in this worker, and weights [tokens, k]. Experts of
    other workers get place 0 and weight 0. ``places``: [experts], -1 for other workers' experts."""
    local = places[ids.long()]
    return local.clamp(min=0).to(ids.dtype), weights * (local >= 0)
