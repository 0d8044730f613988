"""The trainer's way from groups to loss, gradient and metrics, with a table as the model: the
logits after a token are that token's row. Every test of a whole step uses it."""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from titan_grpo.algorithm.batch import BatchOptions, plan
from titan_grpo.algorithm.distribution import logit_mean_square, token_entropy, token_logprobs
from titan_grpo.algorithm.loss import LogitTerms, Metrics, accumulate, grpo_loss
from titan_grpo.config import GRPO
from titan_grpo.samples import Group


class Tables(NamedTuple):
    """Logits [words, words] of the policies that take part."""

    policy: torch.Tensor
    reference: torch.Tensor
    old: torch.Tensor | None = None
    """The policy before the batch, where this is not its first optimizer step."""
    temperature: float = 1.0


class Step(NamedTuple):
    """Sums over the micro-batches of some ranks."""

    loss: torch.Tensor
    gradient: torch.Tensor
    metrics: Metrics


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


def step(
    groups: Sequence[Group],
    tables: Tables,
    grpo: GRPO,
    options: BatchOptions,
    ranks: range,
    of: int,
) -> Step:
    """The part that ``ranks`` have in a step over ``of`` ranks."""
    policy = tables.policy.clone().requires_grad_()
    losses, parts, batch = [], [], plan(groups, of, options)
    for rank in batch.micro_batches()[ranks.start : ranks.stop]:
        for each in rank:
            inputs, arguments = each["inputs"], (each["labels"], tables.temperature, 5)
            logits = policy[inputs]
            old = None if tables.old is None else token_logprobs(tables.old[inputs], *arguments)
            loss, metrics = grpo_loss(
                token_logprobs(logits, *arguments),
                filled(each),
                grpo,
                token_logprobs(tables.reference[inputs], *arguments) if grpo.kl_beta else None,
                old,
                LogitTerms(
                    token_entropy(logits, tables.temperature, 5), logit_mean_square(logits, 5)
                ),
            )
            losses.append(loss)
            parts.append(metrics)
    total = torch.stack(losses).sum()
    total.backward()
    assert policy.grad is not None
    return Step(total.detach(), policy.grad, accumulate(parts))
