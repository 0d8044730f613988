"""Functions of the logits for the loss: log-probabilities of given tokens, entropy, mean square.

A [tokens, vocabulary] matrix in float32 is the largest tensor of a training step (8192 tokens x
151936 words = 5 GB), and a plain log_softmax keeps two of them for backward. Here forward keeps the
model's logits and one or two float32 numbers per token. Backward computes the probabilities again,
``chunk_tokens`` rows at a time, straight into the gradient. Temporary memory is about
2 * chunk_tokens * V * 4 bytes; 0 takes all tokens at once. The results do not depend on it.

Logits [R, L, V] may be a DTensor sharded over the vocabulary, as torchtitan's loss-parallel output
is: each tensor-parallel rank reads its own columns, and all-reduces of R * L numbers give every
rank the whole result. Results are float32 (float64 for float64 logits); gradients have the dtype of
the logits. Every function raises ConfigError for a DTensor that is sharded in another way.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate, Shard

from titan_grpo.algorithm.rows import IGNORE_INDEX
from titan_grpo.errors import ConfigError


class _Shard(NamedTuple):
    """The columns of the logits on this rank."""

    first_word: int
    words: int
    """Columns in all."""
    group: dist.ProcessGroup | None
    """Ranks with the other columns; None: all are here."""


def token_logprobs(
    logits: torch.Tensor, labels: torch.Tensor, temperature: float, chunk_tokens: int
) -> torch.Tensor:
    """Return log softmax(logits / temperature) at the labels: [R, L, V] and int64 [R, L] ->
    [R, L], 0 where the label is -100."""
    flat, shard = _local(logits)
    arguments = (flat, labels.reshape(-1), temperature, chunk_tokens, shard)
    out: torch.Tensor = _TokenLogprobs.apply(*arguments)  # type: ignore[no-untyped-call]
    return out.view(labels.shape)


def token_entropy(logits: torch.Tensor, temperature: float, chunk_tokens: int) -> torch.Tensor:
    """Return the entropy, in nats, of softmax(logits / temperature): [R, L, V] -> [R, L]."""
    flat, shard = _local(logits)
    apply: Callable[..., torch.Tensor] = _Entropy.apply
    out = apply(flat, temperature, chunk_tokens, shard)
    return out.view(logits.shape[:-1])


def logit_mean_square(logits: torch.Tensor, chunk_tokens: int) -> torch.Tensor:
    """Return the mean over the vocabulary of logit^2, without temperature: [R, L, V] -> [R, L]."""
    flat, shard = _local(logits)
    apply: Callable[..., torch.Tensor] = _MeanSquare.apply
    out = apply(flat, chunk_tokens, shard)
    return out.view(logits.shape[:-1])


def _local(logits: torch.Tensor) -> tuple[torch.Tensor, _Shard]:
    """Return the local logits, [T, V'], and which columns they are. Differentiable."""
    words = logits.shape[-1]
    shard = _Shard(0, words, None)
    if isinstance(logits, DTensor):
        mesh, placements = logits.device_mesh, logits.placements
        axes = [axis for axis, p in enumerate(placements) if not isinstance(p, Replicate)]
        if any(placements[axis] != Shard(logits.ndim - 1) for axis in axes) or len(axes) > 1:
            raise ConfigError(
                "logits must be whole or sharded over the vocabulary on one mesh axis, got"
                f" {placements}: the loss cannot be computed; set"
                " parallelism.disable_loss_parallel = true"
            )
        if axes:
            # DTensor shards as torch.chunk does: pieces of the rounded-up size, the last ones
            # shorter or empty.
            piece = -(-words // mesh.size(axes[0]))
            first_word = mesh.get_local_rank(axes[0]) * piece
            shard = _Shard(first_word, words, mesh.get_group(axes[0]))
        logits = logits.to_local()
    # Not reshape(-1, ..): torch refuses it for a shard without columns.
    return logits.flatten(0, -2), shard


def _chunks(num_tokens: int, chunk_tokens: int) -> Iterator[slice]:
    step = chunk_tokens if chunk_tokens > 0 else max(num_tokens, 1)
    for start in range(0, num_tokens, step):
        yield slice(start, start + step)


def _per_token(logits: torch.Tensor) -> torch.Tensor:
    """Return an uninitialised [T] of the dtype to compute in."""
    dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
    return torch.empty(len(logits), dtype=dtype, device=logits.device)


def _sum_over(shard: _Shard, values: torch.Tensor) -> torch.Tensor:
    if shard.group is not None:
        dist.all_reduce(values, group=shard.group)
    return values


def _join_normalizers(local: torch.Tensor, shard: _Shard) -> torch.Tensor:
    """Return the logsumexp over all shards from that of each shard, [T]."""
    if shard.group is None:
        return local
    largest = local.clone()
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=shard.group)
    return largest + torch.log(_sum_over(shard, torch.exp(local - largest)))


class _TokenLogprobs(torch.autograd.Function):
    """out = z[label] - logsumexp(z) with z = logits / T; d out / d logits = (onehot - softmax) /
    T."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        labels: torch.Tensor,
        temperature: float,
        chunk_tokens: int,
        shard: _Shard,
    ) -> torch.Tensor:
        columns = labels - shard.first_word
        here = (labels != IGNORE_INDEX) & (columns >= 0) & (columns < logits.shape[-1])
        columns = columns.masked_fill(~here, 0).unsqueeze(-1)
        normalizer, chosen = _per_token(logits), _per_token(logits)
        for part in _chunks(len(labels), chunk_tokens):
            scaled = logits[part].to(normalizer.dtype) / temperature
            normalizer[part] = torch.logsumexp(scaled, -1)
            if logits.shape[-1]:  # else gather has no column to take
                chosen[part] = scaled.gather(-1, columns[part]).squeeze(-1)
        normalizer = _join_normalizers(normalizer, shard)
        chosen = _sum_over(shard, chosen.masked_fill_(~here, 0))
        ctx.save_for_backward(logits, columns, here, normalizer, labels)
        ctx.temperature, ctx.chunk_tokens = temperature, chunk_tokens
        return (chosen - normalizer).masked_fill_(labels == IGNORE_INDEX, 0)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        logits, columns, here, normalizer, labels = ctx.saved_tensors
        # Mask first: an ignored position must give exact zeros even if the incoming gradient is
        # not finite.
        grad = grads[0].masked_fill(labels == IGNORE_INDEX, 0).unsqueeze(-1) / ctx.temperature
        out = torch.empty_like(logits)
        for part in _chunks(len(labels) if logits.shape[-1] else 0, ctx.chunk_tokens):
            scaled = logits[part].to(normalizer.dtype) / ctx.temperature
            softmax = scaled.sub_(normalizer[part].unsqueeze(-1)).exp_()
            softmax.mul_(-grad[part])
            softmax.scatter_add_(-1, columns[part], grad[part] * here[part].unsqueeze(-1))
            out[part] = softmax
        return out, None, None, None, None


class _Entropy(torch.autograd.Function):
    """With z = logits / T and p = softmax(z): H = -sum p log p = logsumexp(z) - sum p z,
    d H / d z_j = -p_j (log p_j + H)."""

    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, temperature: float, chunk_tokens: int, shard: _Shard
    ) -> torch.Tensor:
        local, mean_here = _per_token(logits), _per_token(logits)
        for part in _chunks(len(logits), chunk_tokens):
            scaled = logits[part].to(local.dtype) / temperature
            local[part] = torch.logsumexp(scaled, -1)
            mean_here[part] = (torch.exp(scaled - local[part].unsqueeze(-1)) * scaled).sum(-1)
        normalizer = _join_normalizers(local, shard)
        entropy = normalizer - _sum_over(shard, mean_here * torch.exp(local - normalizer))
        ctx.save_for_backward(logits, normalizer, entropy)
        ctx.temperature, ctx.chunk_tokens = temperature, chunk_tokens
        return entropy

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        logits, normalizer, entropy = ctx.saved_tensors
        grad = grads[0] / ctx.temperature
        out = torch.empty_like(logits)
        for part in _chunks(len(logits), ctx.chunk_tokens):
            scaled = logits[part].to(normalizer.dtype) / ctx.temperature
            logp = scaled.sub_(normalizer[part].unsqueeze(-1))
            weighted = torch.exp(logp).mul_(logp.add_(entropy[part].unsqueeze(-1)))
            out[part] = weighted.mul_(-grad[part].unsqueeze(-1))
        return out, None, None, None


class _MeanSquare(torch.autograd.Function):
    """S = mean over words of logit^2, d S / d logit_j = 2 logit_j / words."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, chunk_tokens: int, shard: _Shard) -> torch.Tensor:
        total = _per_token(logits)
        for part in _chunks(len(logits), chunk_tokens):
            total[part] = logits[part].to(total.dtype).square().sum(-1)
        ctx.save_for_backward(logits)
        ctx.words, ctx.chunk_tokens = shard.words, chunk_tokens
        return _sum_over(shard, total) / shard.words

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (logits,) = ctx.saved_tensors
        factor = (grads[0] * (2 / ctx.words)).unsqueeze(-1)
        out = torch.empty_like(logits)
        for part in _chunks(len(logits), ctx.chunk_tokens):
            out[part] = logits[part].to(factor.dtype) * factor[part]
        return out, None, None
