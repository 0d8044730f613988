"""Parts of the loss: sums over sequences, ratios, off-policy correction, the policy losses, and the
KL term.

Every tensor is [R, L]. docs/algorithm.md has the terms in one table."""

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch

from titan_grpo.config.grpo import AGAINST_ENGINE, GRPO

LOG_RATIO_LIMIT = 20.0
"""Bound of log-ratios, on both sides, before the exponential (e^20 = 4.9e8). A clamped log-ratio
has no gradient."""


def bounded_exp(log_ratio: torch.Tensor) -> torch.Tensor:
    """Return exp of a log-ratio clamped to ``LOG_RATIO_LIMIT``."""
    return torch.exp(log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT))


def running_sums(values: torch.Tensor) -> torch.Tensor:
    """Return the sum of each value and those before it, [N], float64."""
    # With debug.deterministic torch refuses this on CUDA: there it has no such sum of floats.
    there = values.cpu() if torch.are_deterministic_algorithms_enabled() else values
    return there.cumsum(0).to(values.device)


@dataclass(frozen=True, slots=True)
class Spans:
    """Tokens that count, and the sequence of each token.

    Results are [R, L], a sequence's value at each of its tokens: token level and sequence level
    share all further code. No size depends on a tensor's values (no host sync).
    """

    mask: torch.Tensor
    """bool [R, L]: completion tokens that count."""

    sequence: torch.Tensor
    """int64 [R, L]: number of the token's sequence, below R * L and unique in the micro-batch; -1
    for padding."""

    def total(self, values: torch.Tensor) -> torch.Tensor:
        """Return the sum over the counting tokens of each sequence; differentiable."""
        place = (self.sequence + 1).reshape(-1)
        counted = values.masked_fill(~self.mask, 0).reshape(-1)
        sums = counted.new_zeros(place.numel() + 1).index_add(0, place, counted)
        return sums[place].view(self.sequence.shape)

    def mean(self, values: torch.Tensor) -> torch.Tensor:
        """Return the mean over the counting tokens of each sequence; 0 for one without any."""
        return self.total(values) / self.total(torch.ones_like(values)).clamp(min=1)

    def from_here(self, values: torch.Tensor) -> torch.Tensor:
        """Return the sum over each token and the later ones of its sequence, counting tokens only,
        computed in float64. Sequence numbers must rise along the flattened micro-batch."""
        place = (self.sequence + 1).reshape(-1)
        counted = values.masked_fill(~self.mask, 0).reshape(-1).double()
        ahead = running_sums(counted.flip(0)).flip(0)
        totals = counted.new_zeros(place.numel() + 1).index_add(0, place, counted)
        later = running_sums(totals.flip(0)).flip(0) - totals
        return (ahead - later[place]).to(values.dtype).view(self.sequence.shape)

    def any(self, flags: torch.Tensor) -> torch.Tensor:
        """Return whether ``flags`` (bool) holds at any counting token of the sequence."""
        return self.total(flags.to(torch.float32)) > 0


def interpolated(
    logprobs: torch.Tensor, rollout_logprobs: torch.Tensor, staleness: torch.Tensor
) -> torch.Tensor:
    """Approximate the proximal log-probabilities from version numbers, without a forward pass; no
    gradient.

    The proximal policy is the denominator of the clipped ratio (decoupled PPO, Hilton et al., arXiv
    2110.00641). With s the trainer's version minus the token's, the policy one version back is
    assumed to lie at (s - 1) / s of the way from the engine's log-probability to the current one
    (log-linear, as in AReaL's proximal approximation and A-3PO, arXiv 2512.06547):

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
    """Return the ratio of the policy to the proximal policy; gradients flow into ``logprobs`` only.

    "token" is exp(logprobs - old_logprobs) (PPO, arXiv 1707.06347; GRPO). "sequence" is GSPO's exp
    of the MEAN log-ratio over the completion (arXiv 2507.18071, eq. 7): the length-th root of the
    sequences' probability ratio. Every token of a sequence gets the same share of its gradient (eq.
    10 there).
    """
    log_ratio = logprobs - old_logprobs.detach()
    return bounded_exp(spans.mean(log_ratio) if level == "sequence" else log_ratio)


def clipped_objective(
    ratio: torch.Tensor, advantages: torch.Tensor, low: float, high: float, dual: float = 0.0
) -> torch.Tensor:
    """Return min(ratio * A, clip(ratio, 1 - low, 1 + high) * A), to be maximised (PPO; separate
    bounds as in DAPO, arXiv 2503.14476).

    ``dual`` > 0: where A < 0 the objective is at least dual * A, so that one token with a ratio far
    above 1 does not dominate the step (dual-clip PPO, arXiv 1912.09729).

    Example with low 0.2, high 0.28: A = 1 and ratio 1.5 give 1.28 and no gradient; A = -1 and ratio
    1.5 give -1.5 with gradient; A = -1 and ratio 0.5 give -0.8. With dual 3, A = -1 and ratio 5
    give -3 and no gradient.
    """
    objective = torch.minimum(ratio * advantages, ratio.clamp(1 - low, 1 + high) * advantages)
    if dual:
        least = dual * advantages
        objective = torch.where(advantages < 0, torch.maximum(objective, least), objective)
    return objective


def gmpo_objective(
    log_ratio: torch.Tensor, advantages: torch.Tensor, spans: Spans, low: float, high: float
) -> torch.Tensor:
    """Return A * geometric mean of the sequence's ratios. Each ratio is bounded on the side to
    which the advantage pushes it: by 1 + high if A > 0, by 1 - low otherwise (GMPO, arXiv
    2507.20673). GMPO's own bounds are e^-0.4 and e^0.4.

    Example with high 0.5: ratios 2 and 0.5, A = 1 -> sqrt(1.5 * 0.5) = 0.866; the first has no
    gradient.
    """
    least = math.log1p(-low) if low < 1 else -math.inf
    bounded = torch.where(
        advantages > 0, log_ratio.clamp(max=math.log1p(high)), log_ratio.clamp(min=least)
    )
    return bounded_exp(spans.mean(bounded)) * advantages


def sapo_objective(
    ratio: torch.Tensor, advantages: torch.Tensor, tau_pos: float, tau_neg: float
) -> torch.Tensor:
    """Return f(ratio) * A with f(r) = 4 / tau * sigmoid(tau * (r - 1)): a soft gate in place of the
    clip (SAPO, arXiv 2511.20347). f has slope 1 at r = 1 and flattens on both sides, sooner with a
    greater tau."""
    up, down = (4 / tau * torch.sigmoid(tau * (ratio - 1)) for tau in (tau_pos, tau_neg))
    return torch.where(advantages > 0, up, down) * advantages


class Weights(NamedTuple):
    """Importance weights of tokens, without gradient."""

    weight: torch.Tensor
    cut: torch.Tensor
    """bool: the bounds changed the weight."""
    vetoed: torch.Tensor
    """bool: the sequence was vetoed."""


def rollout_weights(
    proximal_logprobs: torch.Tensor, rollout_logprobs: torch.Tensor, spans: Spans, grpo: GRPO
) -> Weights:
    """Return the importance weight of the proximal policy against the engine that sampled, per
    token.

    With d_t = log p_prox(t) - log p_engine(t) over a sequence's completion tokens, the weight is
    exp of, by ``rollout_is_level``:

    * "token": d_t (truncated importance sampling, Yao et al. 2025; V-trace's truncation, arXiv
      1802.01561);
    * "sequence": the SUM of d, the exact weight of a whole sample; its variance grows with length;
    * "geometric": the MEAN of d.

    ``rollout_is_mode`` "truncate" gives min(w, threshold); "mask" keeps w in [lower, threshold] and
    gives 0 outside (masked importance sampling, Liu et al. 2025). A sequence in which any exp(d_t)
    is below the veto threshold gets 0: the trainer's policy would hardly ever sample such a token,
    so no token of that sequence can be trusted. A threshold of 0 gives 1 everywhere, without a
    veto.
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


def cispo_weights(
    logprobs: torch.Tensor, rollout_logprobs: torch.Tensor, spans: Spans, most: float
) -> Weights:
    """Return min(p / q, most) per token, p the policy and q the engine that sampled (CISPO, arXiv
    2506.13585, eq. 4, 5, without a lower bound, as there). It weights A * log p: unlike a token
    that PPO clips, a bounded token still has a gradient."""
    raw = bounded_exp((logprobs.detach() - rollout_logprobs).masked_fill(~spans.mask, 0))
    return Weights(raw.clamp(max=most), (raw > most) & spans.mask, torch.zeros_like(spans.mask))


def topr_weights(
    logprobs: torch.Tensor, rollout_logprobs: torch.Tensor, advantages: torch.Tensor, spans: Spans
) -> Weights:
    """Return 1 where A >= 0, else min(product over the sequence of p / q, 1), for A * log p (TOPR,
    arXiv 2503.14286): good samples are learnt as in supervised training, bad ones count only as far
    as the policy would still produce them."""
    raw = bounded_exp(spans.total(logprobs.detach() - rollout_logprobs))
    bad = advantages < 0
    weight = torch.where(bad, raw.clamp(max=1), 1.0)
    return Weights(weight, bad & (raw > 1) & spans.mask, torch.zeros_like(spans.mask))


def second_moments(
    logprobs: torch.Tensor, rollout_logprobs: torch.Tensor, advantages: torch.Tensor
) -> torch.Tensor:
    """Return (log p - log q)^2, p the policy and q the engine that sampled, at tokens that already
    moved in the direction of their advantage: p > q and A > 0, or p < q and A < 0. A trust region
    bounds these; 0 at other tokens."""
    moved = logprobs.detach() - rollout_logprobs
    return moved.square().masked_fill(moved * advantages <= 0, 0)


def least_left_out(moments: torch.Tensor, threshold: float) -> float:
    """Return the least of ``second_moments`` that M2PO masks (arXiv 2510.01161, algorithm 1);
    infinity if it masks none. The greatest are masked, one by one, until the mean of the remaining
    nonzero ones is at most ``threshold``.

    Example: moments 0, 0.01, 0.02, 0.5, 0.9, threshold 0.04 -> 0.5: without it and 0.9 the mean is
    0.015, with it 0.177.
    """
    bounded = moments[moments > 0].double().sort().values
    means = running_sums(bounded) / torch.arange(1, len(bounded) + 1, device=bounded.device)
    kept = int((means <= threshold).sum())
    return float(bounded[kept]) if kept < len(bounded) else math.inf


class Policy(NamedTuple):
    """Policy term of every token."""

    objective: torch.Tensor
    """To be maximised, with gradient; not weighted yet."""
    importance: Weights
    ratio: torch.Tensor
    """What the loss bounds: policy to proximal policy; for cispo and topr to the engine."""

    def without(self, tokens: torch.Tensor) -> "Policy":
        """Return a copy with weight 0 at these tokens, which count as cut."""
        weight, cut, vetoed = self.importance
        return self._replace(
            importance=Weights(weight.masked_fill(tokens, 0), cut | tokens, vetoed)
        )


def policy_objective(
    logprobs: torch.Tensor,
    old: torch.Tensor,
    rollout: torch.Tensor,
    advantages: torch.Tensor,
    spans: Spans,
    grpo: GRPO,
) -> Policy:
    """Return the policy term of ``grpo.policy_loss`` from the log-probabilities of the policy, the
    proximal policy (``old``) and the engine (``rollout``).

    clip, gmpo and sapo bound the ratio to the proximal policy; ``rollout_weights`` corrects from
    the engine to the proximal policy. cispo and topr weight A * log p by policy against engine,
    which corrects for both at once.
    """
    level = grpo.policy_ratio_type if grpo.policy_loss == "clip" else "token"
    base = rollout if grpo.policy_loss in AGAINST_ENGINE else old
    ratio = policy_ratio(logprobs, base, spans, level)
    low, high = grpo.clip_ratio_lower_bound, grpo.clip_ratio_upper_bound
    match grpo.policy_loss:
        case "clip":
            objective = clipped_objective(ratio, advantages, low, high, grpo.clip_ratio_dual)
        case "gmpo":
            objective = gmpo_objective(logprobs - old.detach(), advantages, spans, low, high)
        case "sapo":
            objective = sapo_objective(ratio, advantages, grpo.sapo_tau_pos, grpo.sapo_tau_neg)
        case "cispo":
            weights = cispo_weights(logprobs, rollout, spans, grpo.cispo_weight_max)
            return Policy(advantages * logprobs, weights, ratio)
        case "topr":
            weights = topr_weights(logprobs, rollout, advantages, spans)
            return Policy(advantages * logprobs, weights, ratio)
    return Policy(objective, rollout_weights(old, rollout, spans, grpo), ratio)


Estimator = Literal["k1", "k2", "k3", "mse", "abs"]

WEIGHT_LIMIT = 10.0
"""Greatest weight of a token in the KL term: one token that was very unlikely for the engine must
not dominate the term."""


def kl_estimate(
    logprobs: torch.Tensor, ref_logprobs: torch.Tensor, estimator: Estimator
) -> torch.Tensor:
    """Estimate KL(policy || reference) per token, on tokens of the policy itself (Schulman,
    "Approximating KL Divergence", 2020); gradients flow into ``logprobs`` only.

    With log r = log p_ref - log p: k1 = -log r, k2 = mse = (log r)^2 / 2, k3 = r - 1 - log r, abs =
    |log r|. On such tokens the expected value of k1, k3 and approximately k2 is the KL. Their
    expected gradients differ: k2 has the KL's, k3 that of KL(reference || policy), k1 has zero. On
    tokens of an older policy none of this holds, not even the zero; see ``kl_term``. The names mse
    and abs are those of other trainers; abs is a distance, not an estimate.
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


def kl_term(
    logprobs: torch.Tensor,
    ref_logprobs: torch.Tensor,
    rollout_logprobs: torch.Tensor,
    estimator: Estimator,
) -> torch.Tensor:
    """Return the KL estimate per token, weighted so that on the engine's tokens its expected
    gradient is that of KL(policy || reference), whatever policy the engine had.

    With w = min(p / q, WEIGHT_LIMIT), p the policy and q the engine:

    * k3: w * k3, with the gradient of w (DeepSeek-V3.2, arXiv 2512.02556): the mean over q is then
      the sum over words of p k3, which is the KL for every p;
    * k2, mse: w * k2, w without gradient: E_q[w log(p / p_ref) grad log p] is the KL's gradient.

    Below the limit both have the same gradient, token by token: w log(p / p_ref) grad log p. k1 and
    abs have no weight; the configuration refuses k1, and abs where tokens may be of an older
    policy.
    """
    estimate = kl_estimate(logprobs, ref_logprobs, estimator)
    if estimator in ("k1", "abs"):
        return estimate
    weight = bounded_exp(logprobs - rollout_logprobs).clamp(max=WEIGHT_LIMIT)
    return (weight if estimator == "k3" else weight.detach()) * estimate


def kl_returns(logprobs: torch.Tensor, ref_logprobs: torch.Tensor, spans: Spans) -> torch.Tensor:
    """Return what to subtract from each token's advantage, times kl_beta, for a KL in the reward:
    the sum of k1 over this token and the later ones of its sequence, without gradient (REINFORCE++,
    arXiv 2501.03262; InstructGPT's reward, arXiv 2203.02155).

    A token cannot change earlier tokens, so their terms would only add noise. The expected gradient
    of the policy term then includes that of the whole sequence's KL.

    Example: log p - log p_ref of 0.1, 0.2, -0.1 -> 0.2, 0.1, -0.1.
    """
    return spans.from_here((logprobs - ref_logprobs).detach())
