"""Make FSDP2 reduce gradients over gloo."""

from collections.abc import Iterable

import torch
from torch.distributed.fsdp import FSDPModule

from titan_grpo.patches.versions import Range, require

WHY = (
    "torchtitan turns FSDP2's gradient division off with set_gradient_divide_factor(1.0); FSDP2"
    " then reduces with PREMUL_SUM(1 / 1.0), an operation that only NCCL has: gloo raises in the"
    " first backward"
)
APPLIES_TO: Range = ("torch", "2.11", "2.16")
DELETE_WHEN = "FSDP2 uses SUM for a factor of 1, or gloo learns PREMUL_SUM"


def apply(model_parts: Iterable[torch.nn.Module]) -> bool:
    """Make every FSDP module on CPU reduce with SUM; torchtitan's factor is applied after the sum.
    Return whether any module was changed; modules on other devices are not.

    Must run after parallelize and before the first backward.

    Raises:
        UpstreamError: torch's version is not in ``APPLIES_TO``.
    """
    changed = False
    for part in model_parts:
        if not any(parameter.device.type == "cpu" for parameter in part.parameters()):
            continue
        for module in part.modules():
            if isinstance(module, FSDPModule):
                if not changed:
                    require(APPLIES_TO, __name__)
                module.set_force_sum_reduction_for_comms(True)
                changed = True
    return changed
