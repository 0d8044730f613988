"""Estimators of KL(policy || reference) from sampled tokens (Schulman, "Approximating KL Divergence", 2020)."""

from typing import Literal

import torch

from titan_grpo.algorithm.ratios import LOG_RATIO_LIMIT

KLEstimator = Literal["k1", "k2", "k3"]


def kl_estimate(logprobs: torch.Tensor, ref_logprobs: torch.Tensor, estimator: KLEstimator) -> torch.Tensor:
    """KL estimate per token, same shape and dtype as ``logprobs``; gradients flow into ``logprobs`` only.

    With log r = log p_ref - log p: k1 = -log r, k2 = (log r)^2 / 2, k3 = r - 1 - log r. All three have the KL
    as their mean value (k2 approximately); as loss terms they differ. On tokens of the policy itself the gradient of
    k2 is that of KL(policy || reference), that of k3 is that of KL(reference || policy), and that of k1 has
    mean zero: k1 is there to be looked at.

    |log r| is clamped to ``LOG_RATIO_LIMIT`` inside the exponential of k3, which would overflow otherwise.
    """
    log_r = ref_logprobs.detach() - logprobs
    if estimator == "k1":
        return -log_r
    if estimator == "k2":
        return 0.5 * log_r.square()
    return torch.exp(log_r.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)) - 1 - log_r
