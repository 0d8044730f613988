"""The whole way from groups to the gradient, over any number of ranks and cut in any way. That one
rank computes what the papers say: tests/titan/test_named.py.

The model is a table: the logits after a token are that token's row.
"""

import random
from dataclasses import replace
from typing import Literal

import numpy as np
import pytest
import torch

from tests.algorithm.loss_inputs import ALL_ON, filled
from titan_grpo.algorithm.batch import BatchOptions, plan
from titan_grpo.algorithm.distribution import logit_mean_square, token_entropy, token_logprobs
from titan_grpo.algorithm.loss import LogitTerms, accumulate, grpo_loss, summarize
from titan_grpo.config import GRPO
from titan_grpo.samples import Completion, Group, Prompt

WORDS, TEMPERATURE = 6, 0.7
OPTIONS = BatchOptions(token_budget=32, max_len=16, pad_multiple=4, longest=9)
POLICY, OLD, REFERENCE = (
    torch.tensor(np.random.default_rng(seed).normal(size=(WORDS, WORDS))) for seed in (1, 2, 3)
)


def make_groups() -> list[Group]:
    source = random.Random(0)
    groups = []
    for index in range(4):
        completions = []
        for _ in range(4):
            tokens = tuple(source.randrange(WORDS) for _ in range(source.randint(1, 6)))
            logprobs = tuple(float(np.float32(source.uniform(-3.0, -0.5))) for _ in tokens)
            reward = source.choice([0.0, 0.5, 1.0])
            completions.append(Completion(tokens, logprobs, "stop", index, index, "s", reward))
        prompt = tuple(source.randrange(WORDS) for _ in range(source.randint(1, 5)))
        groups.append(Group(Prompt(index, prompt), tuple(completions)))
    return groups


GROUPS = make_groups()


def measured(
    grpo: GRPO, options: BatchOptions, num_ranks: int, old_given: bool = False
) -> tuple[float, torch.Tensor, dict[str, float]]:
    """Losses of all micro-batches of all ranks added up, their gradient and metrics."""
    policy = POLICY.clone().requires_grad_()
    losses, parts = [], []
    for rank in plan(GROUPS, num_ranks, options).micro_batches():
        for each in rank:
            logits, read = policy[each["inputs"]], (each["labels"], TEMPERATURE, 5)
            old = token_logprobs(OLD[each["inputs"]], *read) if old_given else None
            loss, metrics = grpo_loss(
                token_logprobs(logits, *read),
                filled(each),
                grpo,
                token_logprobs(REFERENCE[each["inputs"]], *read) if grpo.kl_beta else None,
                old,
                LogitTerms(token_entropy(logits, TEMPERATURE, 5), logit_mean_square(logits, 5)),
            )
            losses.append(loss)
            parts.append(metrics)
    total = torch.stack(losses).sum()
    total.backward()
    assert policy.grad is not None
    return total.item(), policy.grad, summarize(accumulate(parts))


@pytest.mark.parametrize(
    ("normalization", "old_given", "grpo"),
    [
        ("token", False, GRPO()),
        ("token", False, ALL_ON),
        ("sequence", True, GRPO()),
        ("constant", True, ALL_ON),
    ],
    ids=["defaults", "every term", "later step", "every term of a later step"],
)
def test_loss_gradient_and_metrics_of_a_step_are_the_same_on_one_rank_and_on_many(
    normalization: Literal["token", "sequence", "constant"], old_given: bool, grpo: GRPO
) -> None:
    options = replace(OPTIONS, grpo=GRPO(loss_normalization=normalization))
    loss, gradient, metrics = measured(grpo, options, 1, old_given)
    assert gradient.abs().max() > 1e-3
    others = [(options, ranks) for ranks in (2, 3, 7, 40)]
    others.append((replace(options, token_budget=400, pad_multiple=1), 3))
    split = replace(options.grpo, balance_split_groups=True)
    others.append((replace(options, pack=True, grpo=split), 3))
    for changed, num_ranks in others:
        many = measured(grpo, changed, num_ranks, old_given)
        assert many[0] == pytest.approx(loss, rel=1e-12)
        torch.testing.assert_close(many[1], gradient, rtol=1e-9, atol=1e-12)
        assert many[2] == pytest.approx(metrics, rel=1e-9)


def test_with_the_current_policy_as_proximal_the_clip_bounds_change_nothing() -> None:
    wide = GRPO(clip_ratio_lower_bound=0.9, clip_ratio_upper_bound=9.0)
    narrow = GRPO(clip_ratio_lower_bound=0.001, clip_ratio_upper_bound=0.001)
    assert torch.equal(measured(wide, OPTIONS, 1)[1], measured(narrow, OPTIONS, 1)[1])
    later = [measured(each, OPTIONS, 1, old_given=True) for each in (wide, narrow)]
    assert (later[0][1] - later[1][1]).abs().max() > 1e-3
    assert 0 < later[1][2]["clipped_high"] < 1
    assert 0 < later[1][2]["clipped_low"] < 1


def test_the_metrics_are_those_of_a_plain_loop() -> None:
    gaps, weights, kls, ratios = [], [], [], []
    for group in GROUPS:
        for completion in group.completions:
            sequence = (*group.prompt.token_ids, *completion.token_ids)
            for t, engine in enumerate(completion.logprobs, len(group.prompt.token_ids)):
                now, old, ref = (
                    torch.log_softmax(each[sequence[t - 1]] / TEMPERATURE, -1)[sequence[t]].item()
                    for each in (POLICY, OLD, REFERENCE)
                )
                gaps.append(now - engine)
                weights.append(min(np.exp(old - engine), 1.5))
                kls.append(min(np.exp(now - engine), 10) * (np.exp(ref - now) - 1 - (ref - now)))
                ratios.append(np.exp(now - old))
    grpo = GRPO(kl_beta=0.2, rollout_is_threshold=1.5)
    loss, _, metrics = measured(grpo, OPTIONS, 2, old_given=True)
    plain = {
        "tokens": len(gaps),
        "loss": loss,
        "policy_loss": loss - 0.2 * np.mean(kls),
        "logprob_gap": np.mean(np.abs(gaps)),
        "logprob_gap_max": np.max(np.abs(gaps)),
        "logprob_difference": np.mean(gaps),
        "importance": np.mean(weights),
        "importance_capped": np.mean(np.array(weights) == 1.5),
        "kl": np.mean(kls),
        "ratio": np.mean(ratios),
        "ratio_max": np.max(ratios),
    }
    assert {name: metrics[name] for name in plain} == pytest.approx(plain)
