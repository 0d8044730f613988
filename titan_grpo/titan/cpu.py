"""torchtitan on a machine without an accelerator. Does nothing where there is one (triton's absence apart)."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def install() -> bool:
    """Apply the CPU patches, in the one order that works. Call before anything imports torchtitan. Idempotent.

    Returns whether training runs on the CPU.

    Raises:
        UpstreamError: torchtitan or torch has a version that a needed patch was not written for.
        ProtocolError: torchtitan was imported before.
    """
    from titan_grpo.patches import torchtitan_cpu_device, torchtitan_moe_histc, torchtitan_triton

    torchtitan_triton.apply()
    on_cpu = torchtitan_cpu_device.apply()
    torchtitan_moe_histc.apply()
    return on_cpu


def after_parallelize(model_parts: "Iterable[torch.nn.Module]") -> bool:
    """The patch that needs the sharded model: FSDP2 over gloo. Call right after Trainer.__init__ built the model.

    Returns whether any module was changed; parameters on an accelerator are left alone.
    """
    from titan_grpo.patches import torchtitan_gloo_premul

    return torchtitan_gloo_premul.apply(model_parts)
