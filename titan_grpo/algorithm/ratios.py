"""Importance ratios: policy against proximal policy (with gradient), proximal policy against the engine (without)."""

from typing import Literal

import torch

LOG_RATIO_LIMIT = 20.0
"""Log-ratios are clamped to plus and minus this before the exponential (e^20 = 4.9e8), where they get no gradient."""

Level = Literal["token", "sequence"]


def masked_mean(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Mean over the True positions of each row: [R, L] and bool [R, L] -> [R, 1]; an empty row gives 0."""
    return (values * mask).sum(-1, keepdim=True) / mask.sum(-1, keepdim=True).clamp(min=1)


def _exp(log_ratio: torch.Tensor) -> torch.Tensor:
    return torch.exp(log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT))


def policy_ratio(logprobs: torch.Tensor, old_logprobs: torch.Tensor, mask: torch.Tensor, level: Level) -> torch.Tensor:
    """Ratio of the policy to the proximal policy: [R, L] at level "token", [R, 1] at level "sequence".

    "token" is exp(logprobs - old_logprobs) (PPO, GRPO). "sequence" is GSPO's exp of the MEAN log-ratio over the
    completion (arXiv 2507.18071, eq. 7), that is the length-th root of the sequences' probability ratio. Its
    gradient flows through the mean, so every token of a sequence gets the same share.
    """
    log_ratio = logprobs - old_logprobs.detach()
    return _exp(masked_mean(log_ratio, mask) if level == "sequence" else log_ratio)


def clipped_objective(ratio: torch.Tensor, advantages: torch.Tensor, low: float, high: float) -> torch.Tensor:
    """min(ratio * A, clip(ratio, 1 - low, 1 + high) * A), the quantity to be maximised (PPO; DAPO's two bounds).

    ``advantages`` [R, 1] broadcasts against ``ratio`` [R, L] or [R, 1]. Example with low 0.2, high 0.28: A = 1 and
    ratio 1.5 give 1.28 and no gradient; A = -1 and ratio 1.5 give -1.5 with gradient; A = -1 and ratio 0.5 give -0.8.
    """
    return torch.minimum(ratio * advantages, ratio.clamp(1 - low, 1 + high) * advantages)


def rollout_weight(
    old_logprobs: torch.Tensor, rollout_logprobs: torch.Tensor, mask: torch.Tensor, level: Level, threshold: float
) -> torch.Tensor:
    """Truncated importance weight of trainer against engine, without gradient: min(exp(difference), threshold).

    Level "token": difference of one token's log-probabilities, [R, L]. Level "sequence": their SUM over the
    completion, [R, 1], which is the exact importance weight of a whole sample; its spread grows with length.
    ``threshold`` 0 turns the correction off and gives ones. (Espeholt 2018, V-trace's truncation; Yao 2025, TIS.)
    """
    difference = (old_logprobs.detach() - rollout_logprobs) * mask
    if threshold == 0:
        return torch.ones_like(difference)
    if level == "sequence":
        difference = difference.sum(-1, keepdim=True)
    return _exp(difference).clamp(max=threshold)
