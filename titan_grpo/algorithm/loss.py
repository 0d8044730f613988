"""The GRPO loss of one micro-batch, already normalised over the whole batch.

    L = sum over tokens t of weights[t] * ( -is[t] * min(ratio * A, clip(ratio) * A)  +  kl_beta * KL[t] )

``weights`` carry the normalisation (see batch.py), so the loss of a step is the plain SUM over ranks and
micro-batches, and ranks' gradients are summed, never averaged (torchtitan's FSDP divide factor is 1.0 already).

The proximal policy. A step makes one optimizer step per batch, so the policy before the step and the policy that is
differentiated are the same: unless ``old_logprobs`` is given, the proximal log-probabilities are the current ones,
detached. The ratio then has the VALUE 1 everywhere: only its gradient matters, clipping never binds, and all the
off-policy correction is in ``is``, the truncated importance weight against the engine's log-probabilities.
With ``old_logprobs=batch["rollout_logprobs"]`` the roles change: ``is`` is 1 and the clip bounds act on policy against engine.
"""

import math

import torch

from titan_grpo.algorithm.batch import IGNORE_INDEX, MicroBatch
from titan_grpo.algorithm.kl import kl_estimate
from titan_grpo.algorithm.metrics import Metrics
from titan_grpo.algorithm.ratios import clipped_objective, policy_ratio, rollout_weight
from titan_grpo.config import GRPO
from titan_grpo.errors import ConfigError


def grpo_loss(
    logprobs: torch.Tensor,
    batch: MicroBatch,
    options: GRPO,
    ref_logprobs: torch.Tensor | None = None,
    old_logprobs: torch.Tensor | None = None,
) -> tuple[torch.Tensor, Metrics]:
    """Loss (scalar with gradient) and metrics of one micro-batch; sum the losses, see metrics.py for the metrics.

    ``logprobs`` [R, L] are ``token_logprobs`` of the model, at the sampling temperature. ``batch`` is one of
    ``assemble``'s, moved to the same device. ``ref_logprobs`` [R, L] belong to the reference model and are needed
    when ``options.kl_beta`` > 0. The KL term is not importance-weighted. An all-masked micro-batch gives a zero that
    still has a graph, so that every rank runs the same backward collectives.

    Raises ConfigError when ``kl_beta`` > 0 and there are no ``ref_logprobs``.
    """
    if options.kl_beta > 0 and ref_logprobs is None:
        raise ConfigError(f"grpo.kl_beta = {options.kl_beta} needs a reference model's log-probabilities, got none")
    mask = batch["labels"] != IGNORE_INDEX
    weights = batch["weights"]
    advantages = batch["advantages"]
    rollout = batch["rollout_logprobs"]
    old = logprobs if old_logprobs is None else old_logprobs

    ratio = policy_ratio(logprobs, old, mask, options.policy_ratio_type)
    objective = clipped_objective(ratio, advantages, options.clip_ratio_lower_bound, options.clip_ratio_upper_bound)
    importance = rollout_weight(old, rollout, mask, options.rollout_is_level, options.rollout_is_threshold)
    policy_loss = -(weights * importance * objective).sum()

    kl = None
    loss = policy_loss
    if ref_logprobs is not None:
        kl = kl_estimate(logprobs, ref_logprobs, options.kl_estimator_type) * mask
        loss = loss + options.kl_beta * (weights * kl).sum()
    with torch.no_grad():
        metrics = _policy_metrics(logprobs, rollout, mask)
        metrics |= _ratio_metrics(ratio, importance, advantages, mask, options)
        metrics |= {"loss_sum": loss.detach().double(), "policy_loss_sum": policy_loss.detach().double()}
        metrics |= _on_policy_metrics(logprobs, batch, mask)
        if kl is not None:
            metrics["kl_tokens_sum"] = kl.sum().double()
    return loss, metrics


def _policy_metrics(logprobs: torch.Tensor, rollout: torch.Tensor, mask: torch.Tensor) -> Metrics:
    """Counts, and trainer against engine: gap is the absolute difference of the two log-probabilities, per token."""
    difference = (logprobs - rollout) * mask
    gap = difference.abs()
    return {
        "tokens_sum": mask.sum().double(),
        "sequences_sum": mask.any(-1).sum().double(),
        "logprob_tokens_sum": (logprobs * mask).sum().double(),
        "logprob_difference_tokens_sum": difference.sum().double(),
        "logprob_gap_tokens_sum": gap.sum().double(),
        "logprob_gap_max": gap.max().double(),
    }


def _on_policy_metrics(logprobs: torch.Tensor, batch: MicroBatch, mask: torch.Tensor) -> Metrics:
    """Trainer against engine on what the trainer's own version made (``batch["on_policy"]``, bool [R, L], optional).

    There the gap is arithmetic alone (types, kernels, a wrong sync); elsewhere it is also what the policy learnt since.
    """
    rows = batch.get("on_policy")
    if rows is None:
        return {}
    chosen = mask & rows
    gap = (logprobs - batch["rollout_logprobs"]).abs() * chosen
    return {
        "on_policy_count_sum": chosen.sum().double(),
        "on_policy_gap_sum": gap.sum().double(),
        "on_policy_gap_max": gap.max().double(),
    }


def _ratio_metrics(
    ratio: torch.Tensor, importance: torch.Tensor, advantages: torch.Tensor, mask: torch.Tensor, options: GRPO
) -> Metrics:
    """Ratio and importance weight per token (a sequence's one counts for each of its tokens), and how often they were cut."""
    low, high = 1 - options.clip_ratio_lower_bound, 1 + options.clip_ratio_upper_bound
    cap = options.rollout_is_threshold or math.inf
    return {
        "ratio_tokens_sum": (ratio * mask).sum().double(),
        "ratio_max": (ratio * mask).max().double(),
        "clipped_low_tokens_sum": ((ratio < low) & (advantages < 0) & mask).sum().double(),
        "clipped_high_tokens_sum": ((ratio > high) & (advantages > 0) & mask).sum().double(),
        "importance_tokens_sum": (importance * mask).sum().double(),
        "importance_max": (importance * mask).max().double(),
        "importance_capped_tokens_sum": ((importance >= cap) & mask).sum().double(),
    }
