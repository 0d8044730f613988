"""Off-policy correction: the weight of the proximal policy against the engine that sampled, without gradient.

With d_t = log p_prox(t) - log p_engine(t) over a sequence's completion tokens the weight is exp of

* "token": d_t   (truncated importance sampling, Yao et al. 2025; V-trace's truncation, arXiv 1802.01561);
* "sequence": the SUM of d over the sequence, the exact weight of a whole sample; its spread grows with length;
* "geometric": the MEAN of d over the sequence.

"truncate" bounds it from above: min(w, threshold). "mask" keeps w inside [lower, threshold] and takes 0 outside (masked
importance sampling, Liu et al. 2025). The veto gives a whole sequence 0 if one token has exp(d_t) below its bound: such a
token would hardly ever be sampled by the trainer's policy, and no other token of the sequence can be trusted then.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch

from titan_grpo.algorithm.ratios import bounded_exp
from titan_grpo.algorithm.sequences import Spans


@dataclass(frozen=True, slots=True)
class Correction:
    """Settings of the correction."""

    level: Literal["token", "sequence", "geometric"] = "token"
    mode: Literal["truncate", "mask"] = "truncate"

    threshold: float = 2.0
    """Upper bound; 0 turns the whole correction off (weights of 1, no veto)."""

    lower: float = 0.0
    """Lower bound of "mask"; 0 is 1 / threshold."""

    veto: float = 0.0
    """Bound of a single token's ratio; 0: no veto."""


class Weights(NamedTuple):
    """Result of ``rollout_weights``; all [R, L], without gradient."""

    weight: torch.Tensor
    cut: torch.Tensor
    """bool: the bounds changed the weight."""
    vetoed: torch.Tensor
    """bool: the sequence was vetoed."""


def rollout_weights(
    proximal_logprobs: torch.Tensor, rollout_logprobs: torch.Tensor, spans: Spans, options: Correction
) -> Weights:
    """The weight of every token; see the module's docstring for the formulas. |log| is clamped as all log-ratios are."""
    difference = (proximal_logprobs.detach() - rollout_logprobs).masked_fill(~spans.mask, 0)
    none = torch.zeros_like(spans.mask)
    if options.threshold == 0:
        return Weights(torch.ones_like(difference), none, none)
    raw = bounded_exp({"token": lambda d: d, "sequence": spans.total, "geometric": spans.mean}[options.level](difference))
    if options.mode == "truncate":
        cut, weight = raw > options.threshold, raw.clamp(max=options.threshold)
    else:
        cut = (raw > options.threshold) | (raw < (options.lower or 1 / options.threshold))
        weight = raw.masked_fill(cut, 0)
    vetoed = spans.any(bounded_exp(difference) < options.veto) if options.veto else none
    return Weights(weight.masked_fill(vetoed, 0), cut & spans.mask, vetoed & spans.mask)
