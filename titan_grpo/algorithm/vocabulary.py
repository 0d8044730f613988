"""The vocabulary axis of logits: whole or sharded over tensor-parallel ranks, walked through in chunks of tokens."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate, Shard

from titan_grpo.errors import ConfigError


class VocabularyShard(NamedTuple):
    """Which columns of the logits are here."""

    first_word: int
    """Number of the first one."""
    words: int
    """Columns in all."""
    group: dist.ProcessGroup | None
    """Who holds the other columns; None: all are here."""


def local_logits(logits: torch.Tensor) -> tuple[torch.Tensor, VocabularyShard]:
    """[T, V'] local logits of [R, L, V] ones, and which columns they are. Differentiable.

    Raises ConfigError for a DTensor that is sharded in another way than over the vocabulary, on one mesh axis.
    """
    words = logits.shape[-1]
    shard = VocabularyShard(0, words, None)
    if isinstance(logits, DTensor):
        shard = _shard_of(logits)
        logits = logits.to_local()
    return logits.reshape(-1, logits.shape[-1]), shard


def _shard_of(logits: DTensor) -> VocabularyShard:
    mesh, vocab_dim, words = logits.device_mesh, logits.ndim - 1, logits.shape[-1]
    axes = [axis for axis, p in enumerate(logits.placements) if not isinstance(p, Replicate)]
    if any(logits.placements[axis] != Shard(vocab_dim) for axis in axes) or len(axes) > 1:
        raise ConfigError(
            f"logits must be whole or sharded over the vocabulary on one mesh axis, got {logits.placements}: "
            "the loss can not be computed; set parallelism.disable_loss_parallel = true"
        )
    if not axes:
        return VocabularyShard(0, words, None)
    # DTensor shards as torch.chunk does: equal pieces of the rounded-up size, the last ones shorter or empty.
    piece = -(-words // mesh.size(axes[0]))
    return VocabularyShard(mesh.get_local_rank(axes[0]) * piece, words, mesh.get_group(axes[0]))


def chunks(num_tokens: int, chunk_tokens: int) -> Iterator[slice]:
    """Slices of at most ``chunk_tokens`` tokens each; 0 gives one slice of all."""
    step = chunk_tokens if chunk_tokens > 0 else max(num_tokens, 1)
    for start in range(0, num_tokens, step):
        yield slice(start, min(start + step, num_tokens))


def working_dtype(logits: torch.Tensor) -> torch.dtype:
    """float64 for float64 logits, else float32."""
    return torch.float64 if logits.dtype == torch.float64 else torch.float32


def join_normalizers(local: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """logsumexp over the ranks of ``group`` of their local ones, [T] each."""
    if group is None:
        return local
    largest = local.clone()
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
    total = torch.exp(local - largest)
    dist.all_reduce(total, group=group)
    return largest + torch.log(total)
