"""Parts of the loss: sums over sequences, ratios and their bounds, off-policy correction, KL.

Every tensor is [R, L]. docs/algorithm.md has the terms in one table.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch

from titan_grpo.config_grpo import GRPO

LOG_RATIO_LIMIT = 20.0
"""Log-ratios are clamped to plus and minus this before the exponential (e^20 = 4.9e8), where they
get no gradient."""


def bounded_exp(log_ratio: torch.Tensor) -> torch.Tensor:
    """exp of a log-ratio clamped to ``LOG_RATIO_LIMIT``."""
    return torch.exp(log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT))


@dataclass(frozen=True, slots=True)
class Spans:
    """Which tokens count, and which sequence each belongs to.

    Results are [R, L]: a sequence's value at each of its tokens, so that token and sequence level
    share all further code. No size depends on a tensor's values (no host sync).
    """

    mask: torch.Tensor
    """bool [R, L]: completion tokens that count."""

    sequence: torch.Tensor
    """int64 [R, L]: number of the token's sequence, below R * L and unique in the micro-batch; -1
    for padding."""

    def total(self, values: torch.Tensor) -> torch.Tensor:
        """Sum over the counting tokens of each sequence; differentiable."""
        place = (self.sequence + 1).reshape(-1)
        counted = values.masked_fill(~self.mask, 0).reshape(-1)
        sums = counted.new_zeros(place.numel() + 1).index_add(0, place, counted)
        return sums[place].view(self.sequence.shape)

    def mean(self, values: torch.Tensor) -> torch.Tensor:
        """Mean over the counting tokens of each sequence; 0 for a sequence without any."""
        return self.total(values) / self.total(torch.ones_like(values)).clamp(min=1)

    def any(self, flags: torch.Tensor) -> torch.Tensor:
        """Whether ``flags`` (bool) holds at any counting token of the sequence."""
        return self.total(flags.to(torch.float32)) > 0

    def count(self) -> torch.Tensor:
        """Number of sequences with a counting token, a float64 scalar."""
        place = torch.where(self.mask, self.sequence + 1, 0).reshape(-1)
        present = self.mask.new_zeros(self.sequence.numel() + 1, dtype=torch.float64)
        return present.index_fill(0, place, 1.0)[1:].sum()


def spans_of(mask: torch.Tensor, sequence: torch.Tensor | None) -> Spans:
    """Spans of a micro-batch; without ``sequence`` every row is one sequence."""
    if sequence is None:
        sequence = torch.arange(len(mask), device=mask.device).unsqueeze(-1).expand(mask.shape)
    return Spans(mask, sequence)


def interpolated(
    logprobs: torch.Tensor, rollout_logprobs: torch.Tensor, staleness: torch.Tensor
) -> torch.Tensor:
    """Proximal log-probabilities without a forward pass, from version numbers; no gradient.

    The proximal policy is what the clipped ratio is measured against (decoupled PPO, Hilton et al.,
    arXiv 2110.00641). With s the trainer's version minus the token's, the policy one version back
    is taken to lie at the fraction (s - 1) / s of the way from the engine's log-probability to the
    current one (log-linear, as in AReaL's proximal approximation and A-3PO, arXiv 2512.06547):

        s >= 1:  log p_prox = log p_engine / s + (1 - 1 / s) * log p_current
        s <= 0:  log p_prox = log p_current

    Example: s = 1 gives the engine's, s = 2 the mean of the two.
    """
    share = torch.where(staleness > 0, 1 / staleness.clamp(min=1), 0.0).to(logprobs.dtype)
    current = logprobs.detach()
    return current + share * (rollout_logprobs - current)


def policy_ratio(
    logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    spans: Spans,
    level: Literal["token", "sequence"],
) -> torch.Tensor:
    """Ratio of the policy to the proximal policy; gradients flow into ``logprobs`` only.

    "token" is exp(logprobs - old_logprobs) (PPO, arXiv 1707.06347; GRPO). "sequence" is GSPO's exp
    of the MEAN log-ratio over the completion (arXiv 2507.18071, eq. 7): the length-th root of the
    sequences' probability ratio. Every token of a sequence gets the same share of its gradient (eq.
    10 there).
    """
    log_ratio = logprobs - old_logprobs.detach()
    return bounded_exp(spans.mean(log_ratio) if level == "sequence" else log_ratio)


def clipped_objective(
    ratio: torch.Tensor, advantages: torch.Tensor, low: float, high: float
) -> torch.Tensor:
    """min(ratio * A, clip(ratio, 1 - low, 1 + high) * A), to be maximised (PPO; the two bounds are
    DAPO's, arXiv 2503.14476).

    Example with low 0.2, high 0.28: A = 1 and ratio 1.5 give 1.28 and no gradient; A = -1 and ratio
    1.5 give -1.5 with gradient; A = -1 and ratio 0.5 give -0.8.
    """
    return torch.minimum(ratio * advantages, ratio.clamp(1 - low, 1 + high) * advantages)


def cispo_objective(
    ratio: torch.Tensor, advantages: torch.Tensor, logprobs: torch.Tensor, low: float, high: float
) -> torch.Tensor:
    """sg(clip(ratio, 1 - low, 1 + high)) * A * logprobs, to be maximised (CISPO, arXiv 2506.13585,
    eq. 4 and 5). The clipped ratio is only a weight: no token is left without a gradient."""
    return ratio.detach().clamp(1 - low, 1 + high) * advantages * logprobs


class Weights(NamedTuple):
    """Result of ``rollout_weights``, without gradient."""

    weight: torch.Tensor
    cut: torch.Tensor
    """bool: the bounds changed the weight."""
    vetoed: torch.Tensor
    """bool: the sequence was vetoed."""


def rollout_weights(
    proximal_logprobs: torch.Tensor, rollout_logprobs: torch.Tensor, spans: Spans, grpo: GRPO
) -> Weights:
    """Importance weight of the proximal policy against the engine that sampled, per token.

    With d_t = log p_prox(t) - log p_engine(t) over a sequence's completion tokens the weight is exp
    of, by ``rollout_is_level``:

    * "token": d_t (truncated importance sampling, Yao et al. 2025; V-trace's truncation, arXiv
      1802.01561);
    * "sequence": the SUM of d, the exact weight of a whole sample; its spread grows with length;
    * "geometric": the MEAN of d.

    ``rollout_is_mode`` "truncate" gives min(w, threshold); "mask" keeps w inside [lower, threshold]
    and gives 0 outside (masked importance sampling, Liu et al. 2025). A sequence with one token of
    exp(d_t) below the veto gets 0: the trainer's policy would hardly ever sample such a token, and
    no other token of the sequence can be trusted then. A threshold of 0 turns all of it off.
    """
    difference = (proximal_logprobs.detach() - rollout_logprobs).masked_fill(~spans.mask, 0)
    none = torch.zeros_like(spans.mask)
    threshold, veto = grpo.rollout_is_threshold, grpo.rollout_is_veto_threshold
    if threshold == 0:
        return Weights(torch.ones_like(difference), none, none)
    match grpo.rollout_is_level:
        case "token":
            raw = bounded_exp(difference)
        case "sequence":
            raw = bounded_exp(spans.total(difference))
        case "geometric":
            raw = bounded_exp(spans.mean(difference))
    cut = raw > threshold
    if grpo.rollout_is_mode == "truncate":
        weight = raw.clamp(max=threshold)
    else:
        cut |= raw < (grpo.rollout_is_threshold_lower or 1 / threshold)
        weight = raw.masked_fill(cut, 0)
    vetoed = spans.any(bounded_exp(difference) < veto) if veto else none
    return Weights(weight.masked_fill(vetoed, 0), cut & spans.mask, vetoed & spans.mask)


def kl_estimate(
    logprobs: torch.Tensor,
    ref_logprobs: torch.Tensor,
    estimator: Literal["k1", "k2", "k3", "mse", "abs"],
) -> torch.Tensor:
    """KL(policy || reference) per token, estimated (Schulman, "Approximating KL Divergence", 2020);
    gradients flow into ``logprobs`` only.

    With log r = log p_ref - log p: k1 = -log r, k2 = mse = (log r)^2 / 2, k3 = r - 1 - log r, abs =
    |log r|. The mean value of k1, k2 (approximately) and k3 is the KL. As loss terms they differ:
    on tokens of the policy itself the gradient of k2 is that of KL(policy || reference), that of k3
    is that of KL(reference || policy), and that of k1 has mean zero, so k1 only serves as a metric.
    mse and abs are names of other trainers; abs is a distance and no estimate.
    """
    log_r = ref_logprobs.detach() - logprobs
    match estimator:
        case "k1":
            return -log_r
        case "k2" | "mse":
            return 0.5 * log_r.square()
        case "k3":
            return bounded_exp(log_r) - 1 - log_r
        case "abs":
            return log_r.abs()
