"""Make torch.histc count integers on a CPU, as torchtitan's MoE router needs it."""

import functools
from typing import Any

import torch

from titan_grpo.patches.torchtitan_cpu_device import no_accelerator
from titan_grpo.patches.versions import Range, require

WHY = (
    "torchtitan's MoE router counts tokens per expert with torch.histc on int64 indices; torch"
    " implements that for CUDA only: \"histogram_cpu\" not implemented for 'Long'"
)
APPLIES_TO: Range = ("torch", "2.11", "2.16")
DELETE_WHEN = "torch.histc takes integers on CPU, or torchtitan counts with bincount"

_original = torch.histc


@functools.wraps(_original)
def _histc(
    input: torch.Tensor, bins: int = 100, min: float = 0, max: float = 0, **kwargs: Any
) -> torch.Tensor:
    """Do as torch.histc; also for integers on a CPU if bin i holds exactly the value i."""
    integer = not (input.is_floating_point() or input.is_complex())
    if integer and input.device.type == "cpu" and min == 0 and max == bins and not kwargs:
        # Unlike bincount's, a scatter's output size does not depend on the data: torch.compile can
        # trace it.
        flat = input.reshape(-1)
        return flat.new_zeros(bins).scatter_add(0, flat.long(), torch.ones_like(flat))
    return _original(input, bins=bins, min=min, max=max, **kwargs)


def apply() -> bool:
    """Wrap ``torch.histc``, unless there is an accelerator; return whether it is wrapped. Other
    calls go to the original.

    Raises:
        UpstreamError: torch's version is not in ``APPLIES_TO``.
    """
    if not no_accelerator():
        return False
    require(APPLIES_TO, __name__)
    torch.histc = _histc  # type: ignore[assignment]
    return True
