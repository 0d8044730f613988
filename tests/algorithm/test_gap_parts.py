"""The log-probability gap of parts of the tokens, by hand."""

import math

import pytest
import torch

from titan_grpo.algorithm.loss import grpo_loss
from titan_grpo.config import GRPO


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
    metrics = grpo_loss(logprobs, batch, GRPO())[1]

    def of(part: str) -> tuple[float, float]:
        return metrics[f"gap_{part}_sum"].item(), metrics[f"gap_{part}_count_sum"].item()

    assert of("position_16") == pytest.approx((16 * 0.25 + 2, 18))
    assert of("position_128") == pytest.approx((0.5, 1))
    assert of("probability_0.1") == pytest.approx((0.5, 1))
    assert of("probability_inf") == pytest.approx((16 * 0.25 + 2, 18))
    assert of("lag_0") == pytest.approx((16 * 0.25 + 0.5, 17))
    assert of("lag_1") == of("lag_2") == (0, 0)
    assert of("lag_inf") == pytest.approx((2, 2))
