"""Adding the loss's metrics up over the data-parallel ranks."""

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from titan_grpo.algorithm.metrics import Metrics, accumulate, pack, summarize, unpack


def reduce_metrics(parts: Sequence[Metrics], parallel_dims: Any) -> dict[str, float]:
    """Plain numbers of one step from every micro-batch of every data-parallel rank. Collective over the batch mesh."""
    metrics = accumulate(parts)
    sums, maxima = pack(metrics)
    mesh = parallel_dims.get_optional_mesh("batch")
    if mesh is not None:
        # float64 sums: a mean over a million tokens keeps its digits.
        dist.all_reduce(sums, op=dist.ReduceOp.SUM, group=mesh.get_group())
        dist.all_reduce(maxima, op=dist.ReduceOp.MAX, group=mesh.get_group())
    return summarize(unpack(list(metrics), sums, maxima))
