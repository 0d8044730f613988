"""Whether an optimizer step may be taken: NaN, infinity, too large a gradient, rewards that say nothing. Pure.

Every rank makes its own ``flags``; one all-reduce with MAX makes them the same everywhere, so that a step that is skipped on
one rank is skipped on all.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

REASONS = (
    "the loss is not finite",
    "the gradient is not finite",
    "the gradient norm is past grpo.grad_norm_limit",
    "all rewards were equal for grpo.reward_collapse_steps steps in a row",
)
"""What each flag says."""


def flags(loss: torch.Tensor, grad_norm: torch.Tensor, grad_norm_limit: float, collapsed: bool) -> torch.Tensor:
    """float32 [4] on the loss's device, 1 where REASONS holds on this rank. No host sync.

    ``loss`` and ``grad_norm`` (before clipping) are scalars; ``grad_norm_limit`` 0 allows any.
    """
    norm = grad_norm.to(loss.device)
    finite = torch.isfinite(norm)
    too_large = finite & (norm > grad_norm_limit) if grad_norm_limit > 0 else torch.zeros_like(finite)
    found = [~torch.isfinite(loss), ~finite, too_large, torch.full_like(finite, collapsed)]
    return torch.stack([flag.reshape(()) for flag in found]).to(torch.float32)


def reasons(reduced: Sequence[float]) -> tuple[str, ...]:
    """What is wrong, from flags that are the same on every rank; empty if the step may be taken."""
    return tuple(reason for flag, reason in zip(reduced, REASONS, strict=True) if flag > 0)


@dataclass(frozen=True, slots=True)
class Collapse:
    """How long all rewards of a step have been equal."""

    limit: int
    """Steps in a row that count as collapse; 0: never."""

    flat_steps: int = 0

    @property
    def collapsed(self) -> bool:
        """Whether the limit is reached."""
        return 0 < self.limit <= self.flat_steps

    def after(self, rewards: Sequence[float]) -> "Collapse":
        """The count after one more step with these rewards; one that differs ends it."""
        flat = not rewards or min(rewards) == max(rewards)
        return replace(self, flat_steps=self.flat_steps + 1 if flat else 0)
