"""Experts of other workers: what SGLang's layers in pure torch get in their place."""

import pytest
import torch

from titan_grpo.patches import sglang_cpu_experts

IDS = [[2, -1, 3], [-1, 0, -1], [-1, -1, -1], [3, 1, 0]]
FEW = [[0, -1, -1, -1], [-1, -1, 1, 0], [-1, -1, -1, -1]]


@pytest.mark.parametrize(("rows", "experts"), [(IDS, 4), (FEW, 2)], ids=["", "fewer than k"])
def test_an_expert_of_another_worker_becomes_one_without_weight_that_the_token_does_not_have(
    rows: list[list[int]], experts: int
) -> None:
    ids = torch.tensor(rows, dtype=torch.int32)
    weights = torch.arange(1.0, ids.numel() + 1).view(ids.shape)
    found, given = sglang_cpu_experts.own_experts(ids, weights, experts)
    assert (found.dtype, given.dtype) == (ids.dtype, weights.dtype)
    for before, weighed, after, counted in zip(
        rows, weights.tolist(), found.tolist(), given.tolist(), strict=True
    ):
        own = {expert: w for expert, w in zip(before, weighed, strict=True) if expert >= 0}
        assert {expert: w for expert, w in zip(after, counted, strict=True) if w} == own
        assert len(set(after)) == min(len(before), experts)
        assert set(after) <= set(range(experts))
