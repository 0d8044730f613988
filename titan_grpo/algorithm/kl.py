"""Estimators of KL(policy || reference) from sampled tokens (Schulman, "Approximating KL Divergence", 2020)."""

from collections.abc import Callable, Mapping
from typing import Literal

import torch

from titan_grpo.algorithm.ratios import LOG_RATIO_LIMIT

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


def kl_estimate(logprobs: torch.Tensor, ref_logprobs: torch.Tensor, estimator: KLEstimator) -> torch.Tensor:
    """KL estimate per token, same shape and dtype as ``logprobs``; gradients flow into ``logprobs`` only.

    With log r = log p_ref - log p: k1 = -log r, k2 = mse = (log r)^2 / 2, k3 = r - 1 - log r, abs = |log r|. The first three
    have the KL as their mean value (k2 approximately); as loss terms they differ. On tokens of the policy itself the gradient
    of k2 is that of KL(policy || reference), that of k3 is that of KL(reference || policy), and that of k1 has mean zero: k1
    is there to be looked at. mse and abs are the existing trainer's names and no estimates: distances of the same kind.

    |log r| is clamped to ``LOG_RATIO_LIMIT`` inside the exponential of k3, which would overflow otherwise.
    """
    return ESTIMATORS[estimator](ref_logprobs.detach() - logprobs)
