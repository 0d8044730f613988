"""Single rules of the loss, by hand; test_reference.py has the whole of it."""

import math

import pytest
import torch

from titan_grpo.algorithm.loss import grpo_loss
from titan_grpo.algorithm.metrics import accumulate, pack, summarize, unpack
from titan_grpo.algorithm.objective import (
    Correction,
    clipped_objective,
    interpolated,
    kl_estimate,
    policy_ratio,
    rollout_weights,
    spans_of,
)
from titan_grpo.algorithm.rows import IGNORE_INDEX
from titan_grpo.config import GRPO
from titan_grpo.errors import ConfigError, ProtocolError

MASK = torch.tensor([[False, True, True], [True, True, True]])


def micro_batch(advantages=(1.0, -1.0), mask=MASK, rollout=-1.0):
    return {
        "labels": torch.where(mask, 3, -100),
        "weights": mask / mask.sum().clamp(min=1),
        "advantages": torch.tensor(advantages).unsqueeze(-1),
        "rollout_logprobs": torch.full(mask.shape, rollout) * mask,
    }


@pytest.mark.parametrize(
    ("advantage", "ratio", "value", "gradient"),
    [(1, 1.5, 1.28, 0), (1, 0.5, 0.5, 1), (-1, 1.5, -1.5, -1), (-1, 0.5, -0.8, 0), (0, 1.5, 0, 0)],
)
def test_the_clip_stops_the_gradient_only_where_the_step_would_go_further(
    advantage, ratio, value, gradient
):
    ratio = torch.tensor([[float(ratio)]], requires_grad=True)
    objective = clipped_objective(ratio, torch.tensor([[float(advantage)]]), 0.2, 0.28)
    objective.sum().backward()
    assert objective.item() == pytest.approx(value)
    assert ratio.grad.item() == gradient


def test_the_sequence_ratio_is_the_length_th_root_of_the_product_and_shares_its_gradient():
    logprobs = torch.tensor([[9.0, -1.0, -2.0]], requires_grad=True)
    old = torch.tensor([[0.0, -1.5, -2.3]])
    ratio = policy_ratio(logprobs, old, spans_of(MASK[:1], None), "sequence")
    assert ratio[0].tolist() == pytest.approx([math.sqrt(math.exp(0.5) * math.exp(0.3))] * 3)
    ratio[0, 1].backward()
    assert logprobs.grad[0].tolist() == pytest.approx(
        [0, ratio[0, 0].item() / 2, ratio[0, 0].item() / 2]
    )


def weights_of(old, rollout, **options):
    return rollout_weights(old, rollout, spans_of(MASK[:1], None), Correction(**options))


def test_the_rollout_weight_is_truncated_detached_and_one_when_off():
    old = torch.tensor([[0.0, -1.0, -1.0]], requires_grad=True)
    rollout = torch.tensor([[0.0, -1.5, -2.5]])
    token = weights_of(old, rollout, threshold=2.0)
    assert token.weight[0].tolist() == pytest.approx([1, math.exp(0.5), 2.0])
    assert token.cut[0].tolist() == [False, False, True]
    assert weights_of(old, rollout, level="sequence", threshold=9.0).weight[
        0, 1
    ].item() == pytest.approx(math.exp(2.0))
    assert weights_of(old, rollout, level="geometric", threshold=9.0).weight[
        0, 1
    ].item() == pytest.approx(math.exp(1.0))
    assert weights_of(old, rollout, level="sequence", threshold=2.0).weight[0, 1].item() == 2.0
    assert (weights_of(old, rollout, threshold=0).weight == 1).all()
    assert not token.weight.requires_grad


def test_a_mask_keeps_weights_inside_its_bounds_and_takes_zero_outside():
    old, rollout = torch.zeros(1, 3), torch.tensor([[0.0, -0.5, -2.5]])
    assert weights_of(old, rollout, mode="mask", threshold=2.0).weight[
        0, 1:
    ].tolist() == pytest.approx([math.exp(0.5), 0])
    # The lower bound is 1 / threshold unless it is given.
    low = torch.tensor([[0.0, 1.0, 0.5]])
    assert weights_of(old, low, mode="mask", threshold=2.0).weight[0, 1:].tolist() == pytest.approx(
        [0, math.exp(-0.5)]
    )
    assert weights_of(old, low, mode="mask", threshold=2.0, lower=0.3).weight[
        0, 1
    ].item() == pytest.approx(math.exp(-1))


def test_one_token_below_the_veto_takes_its_sequence_out_and_no_other():
    old = torch.zeros(1, 5)
    rollout = torch.tensor([[0.0, 3.0, 0.1, 0.1, 0.1]])
    spans = spans_of(torch.ones(1, 5, dtype=torch.bool), torch.tensor([[0, 0, 0, 1, 1]]))
    found = rollout_weights(old, rollout, spans, Correction(veto=0.1))
    assert found.vetoed[0].tolist() == [True, True, True, False, False]
    assert (found.weight[0] == 0).tolist() == [True, True, True, False, False]


def test_sums_of_sequences_do_not_cross_and_leave_out_what_does_not_count():
    mask = torch.tensor([[True, False, True, True], [True, True, False, False]])
    spans = spans_of(mask, torch.tensor([[0, 0, 0, 1], [2, 2, -1, -1]]))
    values = torch.tensor(
        [[1.0, 100.0, 2.0, 4.0], [8.0, 16.0, torch.nan, torch.inf]], requires_grad=True
    )
    assert spans.total(values).tolist() == [[3, 3, 3, 4], [24, 24, 0, 0]]
    assert spans.mean(values)[:, 0].tolist() == [1.5, 12]
    assert spans.count() == 3
    spans.total(values)[0, 1].backward()
    assert values.grad.tolist() == [[1, 0, 1, 0], [0, 0, 0, 0]]


def test_interpolation_follows_the_staleness():
    now, engine = torch.tensor([-1.0]), torch.tensor([-3.0])
    found = [interpolated(now, engine, torch.tensor([s])).item() for s in (-1, 0, 1, 2, 4)]
    assert found == pytest.approx([-1, -1, -3, -2, -1.5])


@pytest.mark.parametrize(
    ("options", "word"),
    [
        (GRPO(entropy_loss_weight=0.1), "entropy_loss_weight"),
        (GRPO(logit_loss_weight=0.1), "logit_loss_weight"),
    ],
)
def test_a_weight_without_what_it_weights_is_refused(options, word):
    with pytest.raises(ConfigError, match=word):
        grpo_loss(torch.zeros(2, 3), micro_batch(), options)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_a_kl_estimate_is_zero_at_the_reference_and_has_the_divergence_as_its_mean(estimator):
    policy = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64).log()
    near = torch.tensor([0.48, 0.31, 0.21], dtype=torch.float64).log()
    assert not kl_estimate(policy, policy, estimator).any()
    exact = (policy.exp() * (policy - near)).sum()
    assert (policy.exp() * kl_estimate(policy, near, estimator)).sum().item() == pytest.approx(
        exact.item(), rel=0.02
    )


def test_extreme_differences_stay_finite_in_loss_and_gradient():
    logprobs = torch.full((2, 3), -200.0, requires_grad=True)
    ref = torch.zeros(2, 3)
    grpo = GRPO(kl_beta=0.1, rollout_is_level="sequence", rollout_is_threshold=5.0)
    loss, metrics = grpo_loss(
        logprobs, micro_batch(rollout=-400.0), grpo, ref, old_logprobs=torch.full((2, 3), -1.0)
    )
    loss.backward()
    assert loss.isfinite()
    assert logprobs.grad.isfinite().all()
    assert all(value.isfinite() for value in metrics.values())


def test_an_all_masked_micro_batch_is_a_zero_with_a_graph():
    logprobs = torch.zeros(2, 3, requires_grad=True)
    empty = micro_batch((0.0, 0.0), torch.zeros_like(MASK))
    for level in ("token", "sequence"):
        loss, metrics = grpo_loss(
            logprobs, empty, GRPO(policy_ratio_type=level, kl_beta=0.1), torch.zeros(2, 3)
        )
        loss.backward()
        assert loss.item() == 0
        assert not logprobs.grad.any()
        assert all(value == 0 for value in metrics.values())


def test_without_advantage_and_kl_there_is_no_gradient():
    logprobs = torch.full((2, 3), -1.0, requires_grad=True)
    grpo_loss(logprobs, micro_batch((0.0, 0.0)), GRPO())[0].backward()
    assert not logprobs.grad.any()


def test_a_positive_advantage_pushes_its_tokens_up_and_nothing_else():
    logprobs = torch.full((2, 3), -1.0, requires_grad=True)
    grpo_loss(logprobs, micro_batch((1.0, 0.0)), GRPO())[0].backward()
    assert (logprobs.grad[0, 1:] < 0).all()
    assert not logprobs.grad[1].any()
    assert logprobs.grad[0, 0] == 0


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_values_at_ignored_positions_do_not_matter(level):
    grpo = GRPO(policy_ratio_type=level, rollout_is_level=level, kl_beta=0.3)
    clean, dirty = (torch.full((2, 3), -0.5), torch.where(MASK, -0.5, 7.0))
    results = []
    for values in (clean, dirty):
        logprobs = values.clone().requires_grad_()
        batch = micro_batch() | {"rollout_logprobs": 2 * values}
        loss, metrics = grpo_loss(logprobs, batch, grpo, 3 * values, 1.5 * values)
        loss.backward()
        results.append(
            (loss.item(), logprobs.grad.tolist(), {name: v.item() for name, v in metrics.items()})
        )
    assert results[0] == results[1]


def test_only_the_policy_gets_a_gradient():
    logprobs, ref, old = (torch.full((2, 3), -x, requires_grad=True) for x in (1.0, 1.2, 1.1))
    grpo_loss(logprobs, micro_batch(), GRPO(kl_beta=0.1), ref, old)[0].backward()
    assert logprobs.grad.any()
    assert ref.grad is None
    assert old.grad is None


def test_a_kl_weight_without_reference_is_refused():
    with pytest.raises(ConfigError, match="kl_beta"):
        grpo_loss(torch.zeros(2, 3), micro_batch(), GRPO(kl_beta=0.1))


def test_metrics_of_micro_batches_add_up_and_maxima_are_maxima():
    logprobs = torch.full((2, 3), -1.5)
    parts = [grpo_loss(logprobs, micro_batch(rollout=r), GRPO())[1] for r in (-1.0, -3.0)]
    metrics = accumulate(parts)
    summary = summarize(metrics)
    assert summary["tokens"] == 10
    assert summary["logprob_gap"] == pytest.approx(1.0)
    assert summary["logprob_gap_max"] == pytest.approx(1.5)
    assert summary["entropy_estimate"] == pytest.approx(1.5)
    assert unpack(list(metrics), *pack(metrics)) == metrics


def test_no_micro_batches_give_no_metrics_and_different_names_are_refused():
    assert accumulate([]) == {}
    assert summarize({}) == {}
    assert [len(vector) for vector in pack({})] == [0, 0]
    with pytest.raises(ProtocolError, match="kl_tokens_sum"):
        accumulate([{"kl_tokens_sum": torch.tensor(0.0)}, {}])


def test_the_on_policy_gap_leaves_out_rows_of_older_versions():
    batch = {
        "labels": torch.tensor([[1, IGNORE_INDEX], [1, 1]]),
        "weights": torch.full((2, 2), 0.25),
        "advantages": torch.zeros(2, 1),
        "rollout_logprobs": torch.tensor([[-1.0, 0.0], [-1.0, -1.0]]),
        "on_policy": torch.tensor([[True], [False]]),
    }
    logprobs = torch.tensor([[-1.5, 0.0], [-9.0, -9.0]])
    metrics = grpo_loss(logprobs, batch, GRPO())[1]
    assert float(metrics["on_policy_count_sum"]) == 1
    assert float(metrics["on_policy_gap_sum"]) == pytest.approx(0.5)
    assert float(metrics["on_policy_gap_max"]) == pytest.approx(0.5)
