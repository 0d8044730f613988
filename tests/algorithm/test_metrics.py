"""Metrics over micro-batches, the log-probability gap of parts of the tokens by hand, what counts
as cut, and when a step may be taken. That a step is skipped on every rank:
tests/e2e/test_recorded_runs.py."""

import math
from typing import Literal

import pytest
import torch

from tests.algorithm.loss_inputs import filled
from titan_grpo.algorithm.loss import (
    REASONS,
    Collapse,
    accumulate,
    flags,
    grpo_loss,
    pack,
    reasons,
    summarize,
    unpack,
)
from titan_grpo.algorithm.objective import Spans, topr_weights
from titan_grpo.config import GRPO
from titan_grpo.errors import ProtocolError


def test_metrics_of_micro_batches_add_up_and_maxima_are_maxima() -> None:
    parts = [
        {
            "tokens_sum": torch.tensor(5.0),
            "logprob_tokens_sum": torch.tensor(-7.5),
            "logprob_gap_tokens_sum": torch.tensor(gap),
            "logprob_gap_max": torch.tensor(gap),
        }
        for gap in (2.5, 7.5)
    ]
    metrics = accumulate(parts)
    assert summarize(metrics) == {
        "tokens": 10,
        "logprob": -1.5,
        "logprob_gap": 1.0,
        "logprob_gap_max": 7.5,
    }
    assert unpack(list(metrics), *pack(metrics)) == metrics


def test_a_maximum_that_is_not_a_number_is_infinite_for_all_ranks() -> None:
    """MAX of gloo: max(1, NaN) is 1."""
    values = {"tokens_sum": 1.0, "gap_max": math.nan, "logprob_max": -math.inf, "ratio_max": 2.0}
    _, maxima = pack({name: torch.tensor(value) for name, value in values.items()})
    assert maxima.tolist() == [math.inf, -math.inf, 2.0]


def test_metrics_with_different_names_are_refused() -> None:
    with pytest.raises(ProtocolError, match="kl_tokens_sum"):
        accumulate([{"kl_tokens_sum": torch.tensor(0.0)}, {}])


def test_topr_counts_as_cut_only_the_weights_that_its_bound_changes() -> None:
    mask = torch.ones(4, 2, dtype=torch.bool)
    advantages = torch.tensor([1.0, 1.0, -1.0, -1.0]).unsqueeze(-1).expand(4, 2)
    differences = torch.tensor([0.4, -0.4, 0.4, -0.4]).unsqueeze(-1).expand(4, 2)
    spans = Spans(mask, torch.arange(4)[:, None].expand(4, 2))
    found = topr_weights(differences, torch.zeros(4, 2), advantages, spans)
    assert found.weight[:, 0].tolist() == pytest.approx([1, 1, 1, math.exp(-0.8)])
    assert found.cut.tolist() == [[False] * 2, [False] * 2, [True] * 2, [False] * 2]


@pytest.mark.parametrize("loss", ["cispo", "topr"])
def test_the_ratio_of_a_loss_against_the_engine_is_to_the_engine(
    loss: Literal["cispo", "topr"],
) -> None:
    rollout = torch.tensor([[-1.0, -2.0]])
    batch = {
        "labels": torch.tensor([[1, 2]]),
        "weights": torch.full((1, 2), 0.5),
        "advantages": torch.ones(1, 2),
        "rollout_logprobs": rollout,
    }
    metrics = grpo_loss(rollout + math.log(3), filled(batch), GRPO(policy_loss=loss))[1]
    found = [metrics[name].item() for name in ("ratio_tokens_sum", "ratio_max")]
    assert found == pytest.approx([6, 3])


BAD = (math.nan, math.inf, -math.inf)


@pytest.mark.parametrize(
    ("loss", "norm", "limit", "collapsed", "expected"),
    [
        (0.5, 1.0, 0.0, False, ()),
        (0.5, 9.0, 9.0, False, ()),
        (0.5, 1e30, 0.0, False, ()),
        *((bad, 1.0, 0.0, False, REASONS[:1]) for bad in BAD),
        *((0.5, bad, 1.0, False, REASONS[1:2]) for bad in BAD),
        (math.nan, math.nan, 0.0, False, REASONS[:2]),
        (0.5, 9.1, 9.0, False, REASONS[2:3]),
        (0.5, 1.0, 0.0, True, REASONS[3:]),
    ],
)
def test_bad_numbers_are_named_and_a_large_gradient_counts_only_with_a_limit(
    loss: float, norm: float, limit: float, collapsed: bool, expected: tuple[str, ...]
) -> None:
    found = flags(torch.tensor(loss), torch.tensor(norm), limit, collapsed)
    assert reasons(found.tolist()) == expected


@pytest.mark.parametrize(("limit", "collapses"), [(2, [3, 4]), (0, [])])
def test_rewards_collapse_after_equal_ones_in_a_row_and_never_without_a_limit(
    limit: int, collapses: list[int]
) -> None:
    state, seen = Collapse(limit), []
    for rewards in ((1, 1), (1, 2), (3, 3), (0, 0), (), (0, 1)):
        state = state.after(rewards)
        seen.append(state.collapsed)
    assert [at for at, collapsed in enumerate(seen) if collapsed] == collapses


def test_the_gap_is_also_known_by_place_by_probability_and_by_versions_behind() -> None:
    # Two sequences in one row, of 17 and 2 tokens; the second's first label is not sampled.
    labels = torch.full((1, 22), 3)
    labels[0, [17, 18, 21]] = -100
    sequence = torch.tensor([[0] * 17 + [1] * 4 + [-1]])
    rollout = torch.full((1, 22), math.log(0.6))
    rollout[0, 16] = math.log(0.05)
    batch = {
        "labels": labels,
        "sequence": sequence,
        "weights": torch.ones(1, 22) / 19,
        "advantages": torch.ones(1, 22),
        "rollout_logprobs": rollout,
        "staleness": torch.tensor([[0] * 17 + [3] * 5]),
    }
    logprobs = rollout.clone()
    logprobs[0, :16] += 0.25
    logprobs[0, 16] -= 0.5
    logprobs[0, 19:21] += 1.0
    metrics = grpo_loss(logprobs, filled(batch), GRPO())[1]

    def of(part: str) -> tuple[float, float]:
        return metrics[f"gap_{part}_sum"].item(), metrics[f"gap_{part}_count_sum"].item()

    assert of("position_16") == pytest.approx((16 * 0.25 + 2, 18))
    assert of("position_128") == pytest.approx((0.5, 1))
    assert of("probability_0.1") == pytest.approx((0.5, 1))
    assert of("probability_inf") == pytest.approx((16 * 0.25 + 2, 18))
    assert of("lag_0") == pytest.approx((16 * 0.25 + 0.5, 17))
    assert of("lag_1") == of("lag_2") == (0, 0)
    assert of("lag_inf") == pytest.approx((2, 2))
