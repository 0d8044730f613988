"""The KL term: distance of the policy from the reference model, on tokens that the engine sampled.

Every tensor is [R, L]. docs/algorithm.md has the terms in one table.
"""

from typing import Literal

import torch

from titan_grpo.algorithm.objective import Spans, bounded_exp

Estimator = Literal["k1", "k2", "k3", "mse", "abs"]

WEIGHT_LIMIT = 10.0
"""Greatest weight of a token in the KL term: one token that the engine found very unlikely must not
be the whole term."""


def kl_estimate(
    logprobs: torch.Tensor, ref_logprobs: torch.Tensor, estimator: Estimator
) -> torch.Tensor:
    """KL(policy || reference) per token, estimated on tokens of the policy itself (Schulman,
    "Approximating KL Divergence", 2020); gradients flow into ``logprobs`` only.

    With log r = log p_ref - log p: k1 = -log r, k2 = mse = (log r)^2 / 2, k3 = r - 1 - log r, abs =
    |log r|. On such tokens the mean value of k1, k2 (approximately) and k3 is the KL. Their
    gradients differ: that of k2 has the KL's as its mean, that of k3 the one of KL(reference ||
    policy), and that of k1 has mean zero. On tokens of an older policy none of this holds, not even
    the zero; see ``kl_term``. mse and abs are names of other trainers; abs is a distance and no
    estimate.
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
    """The estimate per token, weighted so that on the engine's tokens its gradient has that of
    KL(policy || reference) as its mean, whatever policy the engine had.

    With w = min(p / q, WEIGHT_LIMIT), p the policy and q the engine:

    * k3: w * k3, and w has a gradient too (DeepSeek-V3.2, arXiv 2512.02556): with it the mean over
      q is the sum over words of p k3, which is the KL for every p;
    * k2, mse: w * k2, w without gradient: E_q[w log(p / p_ref) grad log p] is the KL's gradient.

    Both have the same gradient, token by token: w log(p / p_ref) grad log p. k1 and abs stay
    without weight; the configuration refuses them where tokens may be of an older policy.
    """
    estimate = kl_estimate(logprobs, ref_logprobs, estimator)
    if estimator in ("k1", "abs"):
        return estimate
    weight = bounded_exp(logprobs - rollout_logprobs).clamp(max=WEIGHT_LIMIT)
    return (weight if estimator == "k3" else weight.detach()) * estimate


def kl_returns(logprobs: torch.Tensor, ref_logprobs: torch.Tensor, spans: Spans) -> torch.Tensor:
    """What the KL takes from a token's advantage where it is in the reward: the sum of k1 over this
    token and the later ones of its sequence, without gradient (REINFORCE++, arXiv 2501.03262;
    InstructGPT's reward, arXiv 2203.02155).

    A token cannot change what came before it, so earlier terms would only add noise. The policy
    term then has the gradient of the whole sequence's KL as its mean.

    Example: log p - log p_ref of 0.1, 0.2, -0.1 -> 0.2, 0.1, -0.1.
    """
    return spans.from_here((logprobs - ref_logprobs).detach())
