"""Make SGLang's MoE layers in pure torch use only the experts of their own worker."""

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
    """Patch SGLang if ``device`` is "cpu"; return whether it is patched. Idempotent.

    Raises:
        UpstreamError: SGLang's version is not in ``APPLIES_TO``.
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
        ids, weights = own_experts(
            topk_output.topk_ids, topk_output.topk_weights, len(layer.w13_weight)
        )
        known = topk_output._replace(topk_ids=ids, topk_weights=weights)
        out: torch.Tensor = theirs(layer, x, known, config)
        return out

    return forward


def own_experts(
    ids: torch.Tensor, weights: torch.Tensor, experts: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Replace -1 in ``ids`` [tokens, k] by other experts of this worker, which has ``experts``, and
    their ``weights`` by 0. No expert comes twice for a token: moe_forward_native would count it
    once (``cnts.scatter_``). With fewer experts than k both get as few columns: a token's own fit.
    """
    first = (ids < 0).int().argsort(dim=1, stable=True)[:, :experts]
    ids, weights = ids.gather(1, first), weights.gather(1, first)
    here = ids >= 0
    taken = torch.zeros(len(ids), experts + 1, dtype=torch.bool, device=ids.device)
    taken.scatter_(1, torch.where(here, ids, experts).long(), True)
    free = taken[:, :experts].int().argsort(dim=1, stable=True)
    number = (~here).cumsum(1).sub(1).clamp(min=0)
    return torch.where(here, ids, free.gather(1, number).to(ids.dtype)), weights * here
