"""Sums over sequences that may lie several in one row: by an index tensor, never by row.

The proximal policy: what the clipped ratio is measured against (decoupled PPO, Hilton et al., arXiv
2110.00641).

The data's policy is corrected for by a weight (correction.py), the step's size is bounded against
the proximal policy. That one is best the policy right before the batch: recomputed by a forward
pass, or the current policy itself for the first optimizer step of a batch.

The importance ratio of the policy to the proximal policy, and the two ways to bound it.

Off-policy correction: the weight of the proximal policy against the engine that sampled, without
gradient.

With d_t = log p_prox(t) - log p_engine(t) over a sequence's completion tokens the weight is exp of

* "token": d_t   (truncated importance sampling, Yao et al. 2025; V-trace's truncation, arXiv 1802.01561);
* "sequence": the SUM of d over the sequence, the exact weight of a whole sample; its spread grows
  with length;
* "geometric": the MEAN of d over the sequence.

"truncate" bounds it from above: min(w, threshold). "mask" keeps w inside [lower, threshold] and
takes 0 outside (masked importance sampling, Liu et al. 2025). The veto gives a whole sequence 0 if
one token has exp(d_t) below its bound: such a token would hardly ever be sampled by the trainer's
policy, and no other token of the sequence can be trusted then.

Estimators of KL(policy || reference) from sampled tokens (Schulman, "Approximating KL Divergence",
2020)."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch


@dataclass(frozen=True, slots=True)
class Spans:
    """Which tokens count, and which sequence each belongs to. Every result is [R, L] again: a
    sequence's value at each of its tokens, so that token and sequence level share all further code.
    No size depends on a tensor's values (no host sync).
    """

    mask: torch.Tensor
    """bool [R, L]: completion tokens that count."""

    sequence: torch.Tensor
    """int64 [R, L]: number of the token's sequence, -1 for padding. Numbers are below R * L and
    unique in the micro-batch."""

    def total(self, values: torch.Tensor) -> torch.Tensor:
        """Sum over the counting tokens of each sequence, [R, L]; differentiable."""
        place = (self.sequence + 1).reshape(-1)
        counted = values.masked_fill(~self.mask, 0).reshape(-1)
        sums = counted.new_zeros(place.numel() + 1).index_add(0, place, counted)
        return sums[place].view(self.sequence.shape)

    def mean(self, values: torch.Tensor) -> torch.Tensor:
        """Mean over the counting tokens of each sequence, [R, L]; 0 for a sequence without any."""
        return self.total(values) / self.total(torch.ones_like(values)).clamp(min=1)

    def any(self, flags: torch.Tensor) -> torch.Tensor:
        """Whether ``flags`` (bool [R, L]) holds at any counting token of the sequence: bool [R,
        L]."""
        return self.total(flags.to(torch.float32)) > 0

    def count(self) -> torch.Tensor:
        """Sequences with a counting token, a float64 scalar."""
        present = torch.zeros(
            self.sequence.numel() + 1, dtype=torch.float64, device=self.mask.device
        )
        return present.index_fill(0, torch.where(self.mask, self.sequence + 1, 0).reshape(-1), 1.0)[
            1:
        ].sum()


def spans_of(labels_mask: torch.Tensor, sequence: torch.Tensor | None) -> Spans:
    """Spans of a micro-batch; without ``sequence`` every row is one sequence."""
    if sequence is None:
        rows = torch.arange(labels_mask.shape[0], device=labels_mask.device)
        sequence = rows.unsqueeze(-1).expand(labels_mask.shape)
    return Spans(labels_mask, sequence)


def interpolated(
    logprobs: torch.Tensor, rollout_logprobs: torch.Tensor, staleness: torch.Tensor
) -> torch.Tensor:
    """Proximal log-probabilities without a forward pass, from version numbers; no gradient.

    With s the trainer's version minus the token's, the policy one version back is taken to lie at
    the fraction (s - 1) / s of the way from the engine's log-probability to the current one
    (log-linear, as in AReaL's proximal approximation and A-3PO, arXiv 2512.06547):

        log p_prox = log p_engine / s + (1 - 1 / s) * log p_current    for s >= 1,    log p_current for s <= 0.

    ``staleness`` [R, L] in versions. Example: s = 1 gives the engine's, s = 2 the mean of the two.
    """
    share = torch.where(staleness > 0, 1 / staleness.clamp(min=1), 0.0).to(logprobs.dtype)
    current = logprobs.detach()
    return current + share * (rollout_logprobs - current)


LOG_RATIO_LIMIT = 20.0
"""Log-ratios are clamped to plus and minus this before the exponential (e^20 = 4.9e8), where they
get no gradient."""


def bounded_exp(log_ratio: torch.Tensor) -> torch.Tensor:
    """exp of a log-ratio clamped to ``LOG_RATIO_LIMIT``."""
    return torch.exp(log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT))


def policy_ratio(
    logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    spans: Spans,
    level: Literal["token", "sequence"],
) -> torch.Tensor:
    """Ratio of the policy to the proximal policy at every token, [R, L]; gradients flow into
    ``logprobs`` only.

    "token" is exp(logprobs - old_logprobs) (PPO, arXiv 1707.06347; GRPO). "sequence" is GSPO's exp
    of the MEAN log-ratio over the completion (arXiv 2507.18071, eq. 7), that is the length-th root
    of the sequences' probability ratio. Its gradient flows through the mean and nowhere else, so
    every token of a sequence gets the same share (eq. 10 there).
    """
    log_ratio = logprobs - old_logprobs.detach()
    return bounded_exp(spans.mean(log_ratio) if level == "sequence" else log_ratio)


def clipped_objective(
    ratio: torch.Tensor, advantages: torch.Tensor, low: float, high: float
) -> torch.Tensor:
    """min(ratio * A, clip(ratio, 1 - low, 1 + high) * A), the quantity to be maximised (PPO; DAPO's
    two bounds, 2503.14476).

    Example with low 0.2, high 0.28: A = 1 and ratio 1.5 give 1.28 and no gradient; A = -1 and ratio
    1.5 give -1.5 with gradient; A = -1 and ratio 0.5 give -0.8.
    """
    return torch.minimum(ratio * advantages, ratio.clamp(1 - low, 1 + high) * advantages)


def cispo_objective(
    ratio: torch.Tensor, advantages: torch.Tensor, logprobs: torch.Tensor, low: float, high: float
) -> torch.Tensor:
    """sg(clip(ratio, 1 - low, 1 + high)) * A * logprobs (CISPO, arXiv 2506.13585, eq. 4 and 5): to
    be maximised.

    The clipped ratio only weights; the gradient is that of the log-probability, so no token is left
    without one.
    """
    return ratio.detach().clamp(1 - low, 1 + high) * advantages * logprobs


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
    proximal_logprobs: torch.Tensor,
    rollout_logprobs: torch.Tensor,
    spans: Spans,
    options: Correction,
) -> Weights:
    """The weight of every token; see the module's docstring for the formulas. |log| is clamped as
    all log-ratios are."""
    difference = (proximal_logprobs.detach() - rollout_logprobs).masked_fill(~spans.mask, 0)
    none = torch.zeros_like(spans.mask)
    if options.threshold == 0:
        return Weights(torch.ones_like(difference), none, none)
    raw = bounded_exp(
        {"token": lambda d: d, "sequence": spans.total, "geometric": spans.mean}[options.level](
            difference
        )
    )
    if options.mode == "truncate":
        cut, weight = raw > options.threshold, raw.clamp(max=options.threshold)
    else:
        cut = (raw > options.threshold) | (raw < (options.lower or 1 / options.threshold))
        weight = raw.masked_fill(cut, 0)
    vetoed = spans.any(bounded_exp(difference) < options.veto) if options.veto else none
    return Weights(weight.masked_fill(vetoed, 0), cut & spans.mask, vetoed & spans.mask)


KLEstimator = Literal["k1", "k2", "k3", "mse", "abs"]


def _k3(log_r: torch.Tensor) -> torch.Tensor:
    return torch.exp(log_r.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)) - 1 - log_r


ESTIMATORS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "k1": torch.neg,
    "k2": lambda log_r: 0.5 * log_r.square(),
    "k3": _k3,
    "mse": lambda log_r: 0.5 * log_r.square(),
    "abs": torch.abs,
}
"""Name -> estimate from log r = log p_ref - log p."""


def kl_estimate(
    logprobs: torch.Tensor, ref_logprobs: torch.Tensor, estimator: KLEstimator
) -> torch.Tensor:
    """KL estimate per token, same shape and dtype as ``logprobs``; gradients flow into ``logprobs``
    only.

    With log r = log p_ref - log p: k1 = -log r, k2 = mse = (log r)^2 / 2, k3 = r - 1 - log r, abs =
    |log r|. The first three have the KL as their mean value (k2 approximately); as loss terms they
    differ. On tokens of the policy itself the gradient of k2 is that of KL(policy || reference),
    that of k3 is that of KL(reference || policy), and that of k1 has mean zero: k1 is there to be
    looked at. mse and abs are the existing trainer's names and no estimates: distances of the same
    kind.

    |log r| is clamped to ``LOG_RATIO_LIMIT`` inside the exponential of k3, which would overflow otherwise.
    """
    return ESTIMATORS[estimator](ref_logprobs.detach() - logprobs)
