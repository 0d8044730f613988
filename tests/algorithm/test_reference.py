"""The whole path, groups to gradient, against a float64 reference written from the formulas with
plain loops.

The model is a table: the logits after a token are that token's row. The reference never sees a
micro-batch, a padded tensor or autograd: it walks through the groups, and its gradient is a central
difference.
"""

import math
import random
from dataclasses import replace

import numpy as np
import pytest
import torch

from titan_grpo.algorithm.advantages import AdvantageOptions
from titan_grpo.algorithm.batch import BatchOptions, plan
from titan_grpo.algorithm.distribution import token_logprobs
from titan_grpo.algorithm.loss import grpo_loss
from titan_grpo.algorithm.metrics import accumulate, summarize
from titan_grpo.config import GRPO
from titan_grpo.samples import Completion, Group, Prompt

VOCAB = 6
TEMPERATURE = 0.7
OPTIONS = BatchOptions(token_budget=32, max_len=16, pad_multiple=4, constant=9)


def as_float32(value):
    return float(np.float32(value))


def make_groups(seed=0, num_groups=4, group_size=4):
    rng = random.Random(seed)
    groups = []
    for index in range(num_groups):
        completions = []
        for _ in range(group_size):
            length = rng.randint(1, 6)
            tokens = tuple(rng.randrange(VOCAB) for _ in range(length))
            logprobs = tuple(as_float32(rng.uniform(-3.0, -0.5)) for _ in range(length))
            completions.append(
                Completion(
                    tokens, logprobs, "stop", index, index, "s", reward=rng.choice([0.0, 0.5, 1.0])
                )
            )
        prompt = Prompt(index, tuple(rng.randrange(VOCAB) for _ in range(rng.randint(1, 5))))
        groups.append(Group(prompt, tuple(completions)))
    return groups


def make_table(seed):
    return np.random.default_rng(seed).normal(size=(VOCAB, VOCAB))


POLICY, OLD, REFERENCE = make_table(1), make_table(2), make_table(3)
GROUPS = make_groups()


def reference_logprobs(table, prompt, completion):
    """Log-probability of each completion token: softmax of the row of the token before it."""
    sequence = prompt.token_ids + completion.token_ids
    out = []
    for t in range(len(prompt.token_ids), len(sequence)):
        row = table[sequence[t - 1]] / TEMPERATURE
        out.append(row[sequence[t]] - math.log(sum(math.exp(x) for x in row)))
    return out


def reference_advantages(rewards, normalize_std):
    mean = sum(rewards) / len(rewards)
    std = math.sqrt(sum((r - mean) ** 2 for r in rewards) / len(rewards))
    return [(r - mean) / (std + 1e-6 if normalize_std else 1.0) for r in rewards]


def reference_kl(logp, ref, estimator):
    r = math.exp(ref - logp)
    return {"k1": -math.log(r), "k2": 0.5 * math.log(r) ** 2, "k3": r - 1 - math.log(r)}[estimator]


def reference_sequence_loss(logp, old, rollout, ref, advantage, grpo):
    """Per-token losses of one completion."""
    n = len(logp)
    token_ratios = [math.exp(a - b) for a, b in zip(logp, old, strict=True)]
    sequence_ratio = math.prod(token_ratios) ** (1 / n)
    token_weights = [math.exp(a - b) for a, b in zip(old, rollout, strict=True)]
    sequence_weight = math.prod(token_weights)
    out = []
    for t in range(n):
        ratio = sequence_ratio if grpo.policy_ratio_type == "sequence" else token_ratios[t]
        clipped = min(max(ratio, 1 - grpo.clip_ratio_lower_bound), 1 + grpo.clip_ratio_upper_bound)
        weight = sequence_weight if grpo.rollout_is_level == "sequence" else token_weights[t]
        weight = min(weight, grpo.rollout_is_threshold) if grpo.rollout_is_threshold else 1.0
        loss = -weight * min(ratio * advantage, clipped * advantage)
        out.append(loss + grpo.kl_beta * reference_kl(logp[t], ref[t], grpo.kl_estimator_type))
    return out


def reference_loss(policy, proximal, grpo, options):
    """``proximal`` is a table held constant, or None for "the engine's own log-probabilities"."""
    per_sequence = []
    for group in GROUPS:
        advantages = reference_advantages(
            [c.reward for c in group.completions], options.advantage.normalization == "group"
        )
        for completion, advantage in zip(group.completions, advantages, strict=True):
            logp = reference_logprobs(policy, group.prompt, completion)
            rollout = list(completion.logprobs)
            old = (
                rollout
                if proximal is None
                else reference_logprobs(proximal, group.prompt, completion)
            )
            ref = reference_logprobs(REFERENCE, group.prompt, completion)
            per_sequence.append(reference_sequence_loss(logp, old, rollout, ref, advantage, grpo))
    if options.normalization == "token":
        return sum(map(sum, per_sequence)) / sum(map(len, per_sequence))
    if options.normalization == "sequence":
        return sum(sum(s) / len(s) for s in per_sequence) / len(per_sequence)
    return sum(map(sum, per_sequence)) / options.constant / len(per_sequence)


def reference_gradient(proximal, grpo, options, step=1e-5):
    out = np.zeros_like(POLICY)
    for place in np.ndindex(*POLICY.shape):
        values = []
        for sign in (1, -1):
            moved = POLICY.copy()
            moved[place] += sign * step
            values.append(reference_loss(moved, proximal, grpo, options))
        out[place] = (values[0] - values[1]) / (2 * step)
    return out


def measured(grpo, options, num_ranks=1, old="current", chunk_tokens=5):
    """(loss, gradient, metrics) of the code under test: losses of all micro-batches of all ranks,
    added up."""
    table = torch.tensor(POLICY, requires_grad=True)
    losses, parts = [], []
    for micro_batches in plan(GROUPS, num_ranks, options).micro_batches():
        for batch in micro_batches:
            args = (batch["labels"], TEMPERATURE, chunk_tokens)
            logprobs = token_logprobs(table[batch["inputs"]], *args)
            ref = token_logprobs(torch.tensor(REFERENCE)[batch["inputs"]], *args)
            other = token_logprobs(torch.tensor(OLD)[batch["inputs"]], *args)
            old_logprobs = {"current": None, "rollout": batch["rollout_logprobs"], "table": other}[
                old
            ]
            loss, metrics = grpo_loss(
                logprobs, batch, grpo, ref if grpo.kl_beta else None, old_logprobs
            )
            losses.append(loss)
            parts.append(metrics)
    total = torch.stack(losses).sum()
    total.backward()
    return total.item(), table.grad.numpy(), summarize(accumulate(parts))


CASES = [
    GRPO(),
    GRPO(rollout_is_threshold=0.0),
    GRPO(rollout_is_level="sequence", rollout_is_threshold=1.5),
    GRPO(policy_ratio_type="sequence", kl_beta=0.3, kl_estimator_type="k1"),
    GRPO(
        policy_ratio_type="sequence",
        rollout_is_level="sequence",
        kl_beta=0.3,
        kl_estimator_type="k2",
    ),
    GRPO(kl_beta=0.3, kl_estimator_type="k2"),
    GRPO(
        kl_beta=0.3, kl_estimator_type="k3", clip_ratio_lower_bound=0.1, clip_ratio_upper_bound=0.5
    ),
]
PROXIMAL = {"current": POLICY, "rollout": None, "table": OLD}


@pytest.mark.parametrize("old", PROXIMAL)
@pytest.mark.parametrize("normalization", ["token", "sequence", "constant"])
@pytest.mark.parametrize("case", range(len(CASES)))
def test_loss_and_gradient_are_the_float64_reference(case, normalization, old):
    grpo, options = (
        CASES[case],
        replace(
            OPTIONS,
            normalization=normalization,
            advantage=AdvantageOptions(normalization=["group", "none"][case % 2]),
        ),
    )
    loss, gradient, _ = measured(grpo, options, old=old)
    # 1e-6: advantages and weights are float32 tensors by contract; everything else here is float64.
    assert loss == pytest.approx(
        reference_loss(POLICY, PROXIMAL[old], grpo, options), rel=1e-6, abs=1e-7
    )
    np.testing.assert_allclose(
        gradient, reference_gradient(PROXIMAL[old], grpo, options), rtol=2e-6, atol=2e-7
    )
    assert np.abs(gradient).max() > 1e-3


@pytest.mark.parametrize("num_ranks", [2, 3, 7, 40])
@pytest.mark.parametrize("normalization", ["token", "sequence", "constant"])
def test_one_rank_and_many_give_the_same_loss_and_gradient(normalization, num_ranks):
    grpo = GRPO(policy_ratio_type="sequence", kl_beta=0.1)
    options = replace(OPTIONS, normalization=normalization)
    one = measured(grpo, options)
    many = measured(grpo, options, num_ranks)
    other_budget = measured(
        grpo, replace(options, token_budget=400, pad_multiple=1), num_ranks, chunk_tokens=0
    )
    for loss, gradient, metrics in (many, other_budget):
        assert loss == pytest.approx(one[0], rel=1e-12)
        np.testing.assert_allclose(gradient, one[1], rtol=1e-9, atol=1e-12)
        assert metrics == pytest.approx(one[2], rel=1e-9)


def test_with_the_current_policy_as_proximal_the_clip_bounds_change_nothing():
    wide = GRPO(clip_ratio_lower_bound=0.9, clip_ratio_upper_bound=9.0)
    narrow = GRPO(clip_ratio_lower_bound=0.001, clip_ratio_upper_bound=0.001)
    np.testing.assert_array_equal(measured(wide, OPTIONS)[1], measured(narrow, OPTIONS)[1])
    assert measured(narrow, OPTIONS)[2]["clipped_high"] == 0
    assert (
        np.abs(
            measured(wide, OPTIONS, old="rollout")[1] - measured(narrow, OPTIONS, old="rollout")[1]
        ).max()
        > 1e-3
    )


def test_the_metrics_are_those_of_a_plain_loop():
    grpo = GRPO(kl_beta=0.2, rollout_is_threshold=1.5)
    gaps, weights, kls, ratios = [], [], [], []
    for group in GROUPS:
        for completion in group.completions:
            logp = reference_logprobs(POLICY, group.prompt, completion)
            old = reference_logprobs(OLD, group.prompt, completion)
            ref = reference_logprobs(REFERENCE, group.prompt, completion)
            gaps += [a - b for a, b in zip(logp, completion.logprobs, strict=True)]
            weights += [
                min(math.exp(a - b), 1.5) for a, b in zip(old, completion.logprobs, strict=True)
            ]
            kls += [reference_kl(a, b, "k3") for a, b in zip(logp, ref, strict=True)]
            ratios += [math.exp(a - b) for a, b in zip(logp, old, strict=True)]
    loss, _, metrics = measured(grpo, OPTIONS, num_ranks=2, old="table")
    assert metrics["tokens"] == len(gaps)
    assert metrics["sequences"] == 16
    assert metrics["loss"] == pytest.approx(loss)
    assert metrics["policy_loss"] == pytest.approx(loss - 0.2 * np.mean(kls))
    assert metrics["logprob_gap"] == pytest.approx(np.mean(np.abs(gaps)))
    assert metrics["logprob_gap_max"] == pytest.approx(np.max(np.abs(gaps)))
    assert metrics["logprob_difference"] == pytest.approx(np.mean(gaps))
    assert metrics["importance"] == pytest.approx(np.mean(weights))
    assert metrics["importance_capped"] == pytest.approx(np.mean(np.array(weights) == 1.5))
    assert metrics["kl"] == pytest.approx(np.mean(kls))
    assert metrics["ratio"] == pytest.approx(np.mean(ratios))
    assert metrics["ratio_max"] == pytest.approx(np.max(ratios))
    assert 0 < metrics["clipped_high"] < 1
    assert 0 < metrics["clipped_low"] < 1
