"""The importance ratio of the policy to the proximal policy, and the two ways to bound it."""

from typing import Literal

import torch

from titan_grpo.algorithm.sequences import Spans

LOG_RATIO_LIMIT = 20.0
"""Log-ratios are clamped to plus and minus this before the exponential (e^20 = 4.9e8), where they get no gradient."""


def bounded_exp(log_ratio: torch.Tensor) -> torch.Tensor:
    """exp of a log-ratio clamped to ``LOG_RATIO_LIMIT``."""
    return torch.exp(log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT))


def policy_ratio(
    logprobs: torch.Tensor, old_logprobs: torch.Tensor, spans: Spans, level: Literal["token", "sequence"]
) -> torch.Tensor:
    """Ratio of the policy to the proximal policy at every token, [R, L]; gradients flow into ``logprobs`` only.

    "token" is exp(logprobs - old_logprobs) (PPO, arXiv 1707.06347; GRPO). "sequence" is GSPO's exp of the MEAN log-ratio
    over the completion (arXiv 2507.18071, eq. 7), that is the length-th root of the sequences' probability ratio. Its
    gradient flows through the mean and nowhere else, so every token of a sequence gets the same share (eq. 10 there).
    """
    log_ratio = logprobs - old_logprobs.detach()
    return bounded_exp(spans.mean(log_ratio) if level == "sequence" else log_ratio)


def clipped_objective(ratio: torch.Tensor, advantages: torch.Tensor, low: float, high: float) -> torch.Tensor:
    """min(ratio * A, clip(ratio, 1 - low, 1 + high) * A), the quantity to be maximised (PPO; DAPO's two bounds, 2503.14476).

    Example with low 0.2, high 0.28: A = 1 and ratio 1.5 give 1.28 and no gradient; A = -1 and ratio 1.5 give -1.5 with
    gradient; A = -1 and ratio 0.5 give -0.8.
    """
    return torch.minimum(ratio * advantages, ratio.clamp(1 - low, 1 + high) * advantages)


def cispo_objective(
    ratio: torch.Tensor, advantages: torch.Tensor, logprobs: torch.Tensor, low: float, high: float
) -> torch.Tensor:
    """sg(clip(ratio, 1 - low, 1 + high)) * A * logprobs (CISPO, arXiv 2506.13585, eq. 4 and 5): to be maximised.

    The clipped ratio only weights; the gradient is that of the log-probability, so no token is left without one.
    """
    return ratio.detach().clamp(1 - low, 1 + high) * advantages * logprobs
