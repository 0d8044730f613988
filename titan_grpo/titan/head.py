"""The logits in float32: what is lost in bfloat16 is the gap at rare tokens (MiniMax-M1, arXiv
2506.13585, section 3.2)."""

from types import MethodType
from typing import Any

import torch
from torch.nn import functional

from titan_grpo.errors import ConfigError


def _forward(head: Any, hidden: torch.Tensor) -> torch.Tensor:
    """[..., dim] -> [..., vocabulary] in float32, of the weights as mixed precision gathered
    them."""
    bias = None if head.bias is None else head.bias.float()
    # autocast would take the product back to its own type
    with torch.autocast(hidden.device.type, enabled=False):
        return functional.linear(hidden.float(), head.weight.float(), bias)


def compute_head_in_fp32(model: torch.nn.Module) -> None:
    """Let a model's last projection compute in float32; parameters and their names stay as they
    are. Raises ConfigError for a model without one that is plain."""
    head = getattr(model, "output", None) or getattr(model, "lm_head", None)
    # Not the class: FSDP makes one of its own of it.
    if getattr(type(head), "forward", None) is not torch.nn.Linear.forward:
        raise ConfigError(
            "grpo.fp32_lm_head needs a model whose last layer is a plain projection, this one has"
            f" {type(head).__name__}: set it to false"
        )
    # The instance's forward: hooks of FSDP and TP around it stay.
    assert isinstance(head, torch.nn.Linear)
    head.forward = MethodType(_forward, head)  # type: ignore[method-assign]
