"""Give the first compiled layer whole embeddings under tensor parallelism. Needed on every
device."""

from collections.abc import Iterable
from typing import Any

import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor

from titan_grpo.patches.versions import Range, require

WHY = (
    "under tensor parallelism the embeddings come as the result of a collective that has not ended,"
    " a tensor of a class of its own, and the backward of the compiled layer that takes it ends in"
    " an AttributeError (no attribute '_local_tensor') on every rank"
)
APPLIES_TO: Range = ("torchtitan", "0.2.2", "0.3")
DELETE_WHEN = "torchtitan < 0.3 is no longer supported"


def _arrived(_module: Any, _inputs: Any, output: torch.Tensor) -> torch.Tensor:
    return output.clone() if isinstance(output, AsyncCollectiveTensor) else output


def apply(model_parts: Iterable[torch.nn.Module]) -> None:
    """Wait for the embeddings before the first layer. Must run after parallelize.

    Raises:
        UpstreamError: torchtitan's version is not in ``APPLIES_TO``.
    """
    require(APPLIES_TO, __name__)
    for part in model_parts:
        embeddings = getattr(part, "tok_embeddings", None)
        if isinstance(embeddings, torch.nn.Module):  # None in a later stage of a pipeline
            embeddings.register_forward_hook(_arrived)
