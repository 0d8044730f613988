"""How the loss's metrics are added up over micro-batches and ranks, and what they mean then.

A name says how it is reduced: ``*_sum`` by addition, ``*_max`` by maximum. ``*_tokens_sum`` becomes a mean over
completion tokens in ``summarize``. Values are float64 scalars on the loss's device: no host sync until the end.
"""

from collections.abc import Mapping, Sequence

import torch

from titan_grpo.errors import ProtocolError

Metrics = dict[str, torch.Tensor]


def accumulate(parts: Sequence[Mapping[str, torch.Tensor]]) -> Metrics:
    """One dict from those of several micro-batches (or ranks). All must have the same names."""
    if not parts:
        return {}
    for part in parts:
        if part.keys() != parts[0].keys():
            raise ProtocolError(f"metrics of one step must have the same names, got {sorted(part.keys() ^ parts[0].keys())}")
    stacked = {name: torch.stack([part[name] for part in parts]) for name in parts[0]}
    return {name: values.amax() if name.endswith("_max") else values.sum() for name, values in stacked.items()}


def pack(metrics: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """(sums, maxima): two float64 vectors, in sorted order of names, so that two all-reduces serve every metric."""
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

    ``X_tokens_sum`` gives ``X`` as mean over completion tokens (0 without tokens), ``X_sum`` gives ``X`` as it is,
    ``X_max`` stays. ``entropy_estimate`` is minus the mean log-probability: unbiased for on-policy tokens.

    Example: tokens_sum 4, logprob_gap_tokens_sum 0.2, logprob_gap_max 0.1 -> tokens 4.0, logprob_gap 0.05, logprob_gap_max 0.1.
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
