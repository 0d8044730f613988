"""Let SGLang's experts in pure torch compute with the experts of their own worker alone."""

from functools import wraps
from typing import Any

import torch

from titan_grpo.patches.versions import Range, require

WHY = (
    "With --ep-size each worker has some of the experts, and SGLang marks those of the others with"
    " -1. On a CPU without its compiled kernels moe_forward_native computes, which takes -1 for the"
    " number of an expert: torch ends the server at the first request."
)
APPLIES_TO: Range = ("sglang", "0.5.20", "0.5.24")
DELETE_WHEN = "moe_forward_native of SGLang leaves experts out that are -1"


def apply(device: str) -> bool:
    """Whether it is in place: on ``device`` "cpu" only. Idempotent.

    Raises:
        UpstreamError: SGLang has a version that this was not written for.
    """
    if device != "cpu":
        return False
    require(APPLIES_TO, __name__)
    from sglang.srt.layers.moe import fused_moe_native

    theirs = fused_moe_native.moe_forward_native
    if not hasattr(theirs, "__wrapped__"):
        fused_moe_native.moe_forward_native = _with_own_experts(theirs)
    return True


def _with_own_experts(theirs: Any) -> Any:
    @wraps(theirs)
    def forward(layer: Any, x: torch.Tensor, topk_output: Any, config: Any) -> torch.Tensor:
        ids, weights = topk_output.topk_ids, topk_output.topk_weights
        places = any_others(ids, len(layer.w13_weight))
        known = topk_output._replace(topk_ids=places, topk_weights=weights * (ids >= 0))
        out: torch.Tensor = theirs(layer, x, known, config)
        return out

    return forward


def any_others(ids: torch.Tensor, experts: int) -> torch.Tensor:
    """Experts [tokens, k] of a worker that has so many, with others of it in place of -1: each only
    once for a token, since moe_forward_native counts them so. Source: its ``cnts.scatter_``."""
    here = ids >= 0
    taken = torch.zeros(len(ids), experts + 1, dtype=torch.bool, device=ids.device)
    taken.scatter_(1, torch.where(here, ids, experts).long(), True)
    free = taken[:, :experts].int().argsort(dim=1, stable=True)
    number = (~here).cumsum(1).sub(1).clamp(min=0)
    return torch.where(here, ids, free.gather(1, number).to(ids.dtype))
