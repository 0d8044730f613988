"""Experts of other workers: what both engines' kernels for CPUs get in their place."""

import torch

from titan_grpo.patches import sglang_cpu_experts


def test_an_expert_of_another_worker_becomes_one_that_the_token_does_not_have() -> None:
    ids = torch.tensor([[2, -1, 3], [-1, 0, -1], [-1, -1, -1], [3, 1, 0]], dtype=torch.int32)
    found = sglang_cpu_experts.any_others(ids, 4)
    assert found.dtype == ids.dtype
    assert torch.equal(found[ids >= 0], ids[ids >= 0])
    for row in found.tolist():
        assert len(set(row)) == 3
        assert set(row) <= set(range(4))
