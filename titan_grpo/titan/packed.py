"""Attention inside each sequence of a packed row, for torchtitan's models.

torchtitan 0.2.2 cuts a row at every end-of-text token (flex and varlen attention), which is not
where our sequences end, and its sdpa attention, as that of 0.3, takes no mask at all. So the module
between a layer's projections is wrapped: it gathers a packed row into rows of one sequence each,
calls the wrapped attention on them, and puts the results back (see algorithm/rows.py).
"""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from titan_grpo.algorithm.rows import AttentionRows
from titan_grpo.errors import ConfigError
from titan_grpo.titan import compat


class DocumentAttention(torch.nn.Module):
    """Calls ``inner`` with q, k, v as they are, or sequence by sequence while ``seam.rows`` is set.
    They are [R, heads, L, dim], ``tokens`` being 2, or [R, L, heads, dim], it being 1."""

    def __init__(self, inner: torch.nn.Module, seam: "PackedAttention", tokens: int) -> None:
        super().__init__()
        self.inner = inner
        self._seam, self._tokens = seam, tokens

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any
    ) -> torch.Tensor:
        """As q, with the dim of v; ``options`` are the wrapped module's."""
        rows = self._seam.rows
        if rows is None:
            out: torch.Tensor = self.inner(q, k, v, **options)
            return out
        tokens = self._tokens
        shape = (q.shape[0], q.shape[tokens])
        flat = [x.transpose(1, tokens).flatten(0, 1) for x in (q, k, v)]
        parts = []
        for index in rows.rows:
            alone = self.inner(*(x[index].transpose(1, tokens) for x in flat), **options)
            parts.append(alone.transpose(1, tokens).flatten(0, 1))
        joined: torch.Tensor = torch.cat(parts)[rows.home].unflatten(0, shape)
        return joined.transpose(1, tokens)


class PackedAttention:
    """Shared by all attention layers of a model: where the sequences of the current micro-batch
    lie."""

    def __init__(self) -> None:
        self.rows: AttentionRows | None = None

    def install(self, model: torch.nn.Module) -> None:
        """Wrap the attention of every layer, before the first forward; parameters and their names
        stay as they are.

        Raises ConfigError for a model without positions in its forward, or with another attention
        than sdpa.
        """
        upstream = compat.upstream("models")
        plain = upstream.attention()
        found = [
            (parent, name, child)
            for parent in model.modules()
            for name, child in parent.named_children()
            if isinstance(child, plain)
        ]
        if not found or "positions" not in inspect.signature(model.forward).parameters:
            raise ConfigError(
                "grpo.pack_sequences needs a model with sdpa attention and positions in its"
                f" forward, {type(model).__name__} has not: sequences of one row would see each"
                " other; set it to false"
            )
        for parent, name, child in found:
            setattr(parent, name, DocumentAttention(child, self, upstream.TOKENS))

    @contextmanager
    def using(self, rows: AttentionRows | None, device: torch.device) -> Iterator[None]:
        """Forward and backward of one micro-batch happen inside (backward too: checkpointed layers
        compute again there)."""
        self.rows = None if rows is None else rows.to(device)
        try:
            yield
        finally:
            self.rows = None
