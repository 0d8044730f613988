"""The loss's metrics added up over micro-batches and ranks, and whether a step may be taken.

A name says how it is reduced: ``*_sum`` by addition, ``*_max`` by maximum. Values are float64
scalars on the loss's device: no host sync until the end.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from titan_grpo.errors import ProtocolError

Metrics = dict[str, torch.Tensor]


GAP_PARTS: Mapping[str, tuple[float, ...]] = {
    "position": (16, 128, 1024, 8192, math.inf),
    "probability": (0.01, 0.1, 0.5, math.inf),
    "lag": (0, 1, 2, math.inf),
}
"""Parts of the tokens whose log-probability gap is a figure of its own: the greatest place in the
completion, probability, or number of versions behind, that a part has."""


def accumulate(parts: Sequence[Mapping[str, torch.Tensor]]) -> Metrics:
    """One dict from those of several micro-batches (or ranks). All must have the same names."""
    if not parts:
        return {}
    for part in parts:
        if part.keys() != parts[0].keys():
            raise ProtocolError(
                "metrics of one step must have the same names, got"
                f" {sorted(part.keys() ^ parts[0].keys())}"
            )
    stacked = {name: torch.stack([part[name] for part in parts]) for name in parts[0]}
    return {
        name: values.amax() if name.endswith("_max") else values.sum()
        for name, values in stacked.items()
    }


def pack(metrics: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """(sums, maxima): two float64 vectors in sorted order of names, so that two all-reduces serve
    every metric."""
    sums = [metrics[name] for name in sorted(metrics) if not name.endswith("_max")]
    maxima = [metrics[name] for name in sorted(metrics) if name.endswith("_max")]
    device = next(iter(metrics.values())).device if metrics else None
    empty = torch.zeros(0, dtype=torch.float64, device=device)
    return torch.stack(sums) if sums else empty, torch.stack(maxima) if maxima else empty


def unpack(names: Sequence[str], sums: torch.Tensor, maxima: torch.Tensor) -> Metrics:
    """The inverse of ``pack`` for the same set of names."""
    ordered = sorted(names)
    out = dict(zip((n for n in ordered if not n.endswith("_max")), sums.unbind(), strict=True))
    return out | dict(zip((n for n in ordered if n.endswith("_max")), maxima.unbind(), strict=True))


def summarize(metrics: Mapping[str, torch.Tensor]) -> dict[str, float]:
    """Plain numbers of one step from fully reduced metrics.

    ``X_tokens_sum`` gives ``X`` as mean over completion tokens (0 without tokens), ``X_sum`` gives
    ``X``, ``X_max`` stays. ``entropy_estimate`` is minus the mean log-probability: unbiased for
    on-policy tokens.

    Example: tokens_sum 4, logprob_gap_tokens_sum 0.2, logprob_gap_max 0.1 -> tokens 4.0,
    logprob_gap 0.05, logprob_gap_max 0.1.
    """
    values = {name: float(value) for name, value in metrics.items()}
    tokens = max(values.get("tokens_sum", 0.0), 1.0)
    out: dict[str, float] = {}
    for name, value in values.items():
        if name.endswith("_tokens_sum"):
            out[name.removesuffix("_tokens_sum")] = value / tokens
        else:
            out[name.removesuffix("_sum")] = value
    if "logprob" in out:
        out["entropy_estimate"] = -out["logprob"]
    return out


REASONS = (
    "the loss is not finite",
    "the gradient is not finite",
    "the gradient norm is past grpo.grad_norm_limit",
    "all rewards were equal for grpo.reward_collapse_steps steps in a row",
)
"""What each of ``flags`` says."""


def flags(
    loss: torch.Tensor, grad_norm: torch.Tensor, grad_norm_limit: float, collapsed: bool
) -> torch.Tensor:
    """float32 [4] on the loss's device, 1 where REASONS holds on this rank. No host sync.

    An all-reduce with MAX makes them the same everywhere: a step that one rank skips is skipped on
    all. ``grad_norm`` is that before clipping; a limit of 0 allows any.
    """
    norm = grad_norm.to(loss.device)
    finite = torch.isfinite(norm)
    large = finite & (norm > grad_norm_limit) if grad_norm_limit > 0 else torch.zeros_like(finite)
    found = [~torch.isfinite(loss), ~finite, large, torch.full_like(finite, collapsed)]
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
