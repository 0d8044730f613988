"""What tests of the loss share."""

import torch

from titan_grpo.config import GRPO

ALL_ON = GRPO(
    policy_ratio_type="sequence",
    kl_beta=0.2,
    pos_scaler=1.5,
    neg_scaler=0.5,
    onpolicy_logp_threshold=0.03,
    logit_loss_weight=0.3,
    entropy_loss_weight=0.05,
    rollout_is_level="geometric",
    rollout_is_mode="mask",
    rollout_is_threshold=1.6,
    rollout_is_threshold_lower=0.5,
    rollout_is_veto_threshold=1e-2,
    clip_ratio_dual=1.5,
)
"""Every term, ratio and correction at once."""


def filled(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A micro-batch with what the loss needs besides: each row is one sequence, no token is stale,
    and none counts as on-policy."""
    shape = batch["labels"].shape
    return {
        "sequence": torch.arange(shape[0])[:, None].expand(shape),
        "staleness": torch.zeros(shape, dtype=torch.int64),
        "on_policy": torch.zeros(shape, dtype=torch.bool),
        **batch,
    }
