"""Count tokens per expert on a CPU."""

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
    """torch.histc, with one more case: integer indices on CPU where bin i holds exactly the value
    i."""
    integer = not (input.is_floating_point() or input.is_complex())
    if integer and input.device.type == "cpu" and min == 0 and max == bins and not kwargs:
        # A scatter and not a bincount: its output size does not depend on the data, so
        # torch.compile can trace it.
        flat = input.reshape(-1)
        return flat.new_zeros(bins).scatter_add(0, flat.long(), torch.ones_like(flat))
    return _original(input, bins=bins, min=min, max=max, **kwargs)


def apply() -> bool:
    """Wrap ``torch.histc``; nothing where an accelerator is present. Calls it does not know go to
    the original.

    Raises:
        UpstreamError: torch's version is not in ``APPLIES_TO``.
    """
    if not no_accelerator():
        return False
    require(APPLIES_TO, __name__)
    torch.histc = _histc  # type: ignore[assignment]
    return True
