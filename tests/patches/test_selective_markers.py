"""A region under selective checkpointing in which a profiler's marker is set when it is computed
again, as FSDP does."""

from functools import partial
from typing import Any

import torch
from torch.profiler import record_function
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from titan_grpo.patches import torch_selective_markers


def save_products(_: Any, op: Any, *__: Any, **___: Any) -> CheckpointPolicy:
    product = op == torch.ops.aten.mm.default
    return CheckpointPolicy.MUST_SAVE if product else CheckpointPolicy.PREFER_RECOMPUTE


def test_a_marker_of_the_second_computation_alone_is_no_operation() -> None:
    torch_selective_markers.apply()
    passes: list[int] = []

    def region(x: torch.Tensor) -> torch.Tensor:
        passes.append(len(passes))
        for _ in passes:
            with record_function("marker"):
                pass
        return (x @ x).sin()

    x = torch.rand(3, 3, requires_grad=True)
    contexts = partial(create_selective_checkpoint_contexts, save_products)
    out = checkpoint(region, x, use_reentrant=False, context_fn=contexts, early_stop=False)
    assert isinstance(out, torch.Tensor)
    out.sum().backward()
    got, x.grad = x.grad, None
    (x @ x).sin().sum().backward()
    assert passes == [0, 1]
    assert got is not None
    assert x.grad is not None
    assert torch.equal(got, x.grad)
