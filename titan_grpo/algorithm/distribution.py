"""The vocabulary axis of logits: whole or sharded over tensor-parallel ranks, walked through in
chunks of tokens.

Log-probabilities of given tokens from logits, without a second copy of the logits in float32.

A [tokens, vocabulary] matrix in float32 is the largest thing in a training step (8192 tokens x
151936 words = 5 GB), and a plain log_softmax keeps two of them for backward. Here forward keeps the
logits as the model made them and one float32 number per token; backward makes the probabilities
again, ``chunk_tokens`` rows at a time, straight into the gradient.

Entropy of the next-token distribution from logits, with the memory and the sharding of logprobs.py.

    z = logits / temperature,  p = softmax(z),  H = -sum p log p = logsumexp(z) - sum p z,   d H / d z_j = -p_j (log p_j + H)

Forward keeps the logits as the model made them and two numbers per token; backward makes the
probabilities again in chunks.

Mean square of a token's logits over the vocabulary: the existing trainer's penalty on their size
(``logit_loss_weight``).

    S = mean over words of logit^2,   d S / d logit_j = 2 logit_j / words

The logits are the model's own, not divided by the temperature. Memory and sharding as in
logprobs.py."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate, Shard

from titan_grpo.algorithm.rows import IGNORE_INDEX
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

    Raises ConfigError for a DTensor that is sharded in another way than over the vocabulary, on one
    mesh axis.
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
            "logits must be whole or sharded over the vocabulary on one mesh axis, got"
            f" {logits.placements}: the loss can not be computed; set"
            " parallelism.disable_loss_parallel = true"
        )
    if not axes:
        return VocabularyShard(0, words, None)
    # DTensor shards as torch.chunk does: equal pieces of the rounded-up size, the last ones shorter
    # or empty.
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


def token_logprobs(
    logits: torch.Tensor, labels: torch.Tensor, temperature: float, chunk_tokens: int
) -> torch.Tensor:
    """log softmax(logits / temperature) at the labels: [R, L, V] and int64 [R, L] -> [R, L], 0
    where label is -100.

    The result is float32 (float64 for float64 logits) with a gradient to ``logits`` in their own
    dtype. Temporary memory is about 2 * chunk_tokens * V * 4 bytes; ``chunk_tokens`` 0 takes all at
    once. The value does not depend on it.

    ``logits`` may be a DTensor sharded over the vocabulary, as torchtitan's loss-parallel output
    is: each tensor-parallel rank reads its own columns, and three all-reduces of R * L numbers join
    them, so that every rank has the whole result. Raises ConfigError for a DTensor that is sharded
    in another way.
    """
    flat, shard = local_logits(logits)
    out: torch.Tensor = _TokenLogprobs.apply(
        flat, labels.reshape(-1), temperature, chunk_tokens, shard
    )  # type: ignore[no-untyped-call]
    return out.view(labels.shape)


def _columns(
    labels: torch.Tensor, first_word: int, num_words: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Column of each label in the local shard (0 where it is not there), and whether it is
    there."""
    columns = labels - first_word
    here = (labels != IGNORE_INDEX) & (columns >= 0) & (columns < num_words)
    return columns.masked_fill(~here, 0).unsqueeze(-1), here


class _TokenLogprobs(torch.autograd.Function):
    """out = logits[label] / T - logsumexp(logits / T); d out / d logits = (onehot - softmax) /
    T."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        labels: torch.Tensor,
        temperature: float,
        chunk_tokens: int,
        shard: VocabularyShard,
    ) -> torch.Tensor:
        columns, here = _columns(labels, shard.first_word, logits.shape[-1])
        dtype = working_dtype(logits)
        normalizer = torch.empty(labels.shape, dtype=dtype, device=logits.device)
        chosen = torch.empty_like(normalizer)
        for part in chunks(len(labels), chunk_tokens):
            scaled = logits[part].to(dtype) / temperature
            normalizer[part] = torch.logsumexp(scaled, -1)
            chosen[part] = scaled.gather(-1, columns[part]).squeeze(-1)
        chosen.masked_fill_(~here, 0)
        normalizer = join_normalizers(normalizer, shard.group)
        if shard.group is not None:
            dist.all_reduce(chosen, group=shard.group)
        ctx.save_for_backward(logits, columns, here, normalizer, labels)
        ctx.temperature, ctx.chunk_tokens = temperature, chunk_tokens
        return (chosen - normalizer).masked_fill_(labels == IGNORE_INDEX, 0)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        logits, columns, here, normalizer, labels = ctx.saved_tensors
        # Masked before use: an ignored position must give exact zeros, also when the incoming
        # gradient is not finite.
        grad = grads[0].masked_fill(labels == IGNORE_INDEX, 0).unsqueeze(-1) / ctx.temperature
        out = torch.empty_like(logits)
        for part in chunks(len(labels), ctx.chunk_tokens):
            scaled = logits[part].to(normalizer.dtype) / ctx.temperature
            softmax = scaled.sub_(normalizer[part].unsqueeze(-1)).exp_()
            softmax.mul_(-grad[part])
            softmax.scatter_add_(-1, columns[part], grad[part] * here[part].unsqueeze(-1))
            out[part] = softmax
        return out, None, None, None, None


def token_entropy(logits: torch.Tensor, temperature: float, chunk_tokens: int) -> torch.Tensor:
    """Entropy in nats of softmax(logits / temperature): [R, L, V] -> [R, L], with a gradient to
    ``logits`` in their dtype.

    Arguments, memory, sharding over the vocabulary and errors as in ``token_logprobs``; the value
    does not depend on ``chunk_tokens``. The result is float32 (float64 for float64 logits).
    """
    flat, shard = local_logits(logits)
    out: torch.Tensor = _Entropy.apply(flat, temperature, chunk_tokens, shard)  # type: ignore[no-untyped-call]
    return out.view(logits.shape[:-1])


class _Entropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        temperature: float,
        chunk_tokens: int,
        shard: VocabularyShard,
    ) -> torch.Tensor:
        dtype = working_dtype(logits)
        local = torch.empty(len(logits), dtype=dtype, device=logits.device)
        mean_here = torch.empty_like(local)
        for part in chunks(len(logits), chunk_tokens):
            scaled = logits[part].to(dtype) / temperature
            local[part] = torch.logsumexp(scaled, -1)
            mean_here[part] = (torch.exp(scaled - local[part].unsqueeze(-1)) * scaled).sum(-1)
        normalizer = join_normalizers(local, shard.group)
        mean = mean_here * torch.exp(local - normalizer)
        if shard.group is not None:
            dist.all_reduce(mean, group=shard.group)
        entropy = normalizer - mean
        ctx.save_for_backward(logits, normalizer, entropy)
        ctx.temperature, ctx.chunk_tokens = temperature, chunk_tokens
        return entropy

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        logits, normalizer, entropy = ctx.saved_tensors
        grad = grads[0] / ctx.temperature
        out = torch.empty_like(logits)
        for part in chunks(len(logits), ctx.chunk_tokens):
            logp = (logits[part].to(normalizer.dtype) / ctx.temperature).sub_(
                normalizer[part].unsqueeze(-1)
            )
            weighted = torch.exp(logp).mul_(logp.add_(entropy[part].unsqueeze(-1)))
            out[part] = weighted.mul_(-grad[part].unsqueeze(-1))
        return out, None, None, None


def logit_mean_square(logits: torch.Tensor, chunk_tokens: int) -> torch.Tensor:
    """Mean over the vocabulary of logits^2: [R, L, V] -> [R, L], with a gradient to ``logits`` in
    their dtype.

    ``logits`` may be sharded over the vocabulary; errors as in ``token_logprobs``. float32 (float64
    for float64 logits).
    """
    flat, shard = local_logits(logits)
    out: torch.Tensor = _MeanSquare.apply(flat, chunk_tokens, shard)  # type: ignore[no-untyped-call]
    return out.view(logits.shape[:-1])


class _MeanSquare(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, chunk_tokens: int, shard: VocabularyShard
    ) -> torch.Tensor:
        dtype = working_dtype(logits)
        out = torch.empty(len(logits), dtype=dtype, device=logits.device)
        for part in chunks(len(logits), chunk_tokens):
            out[part] = logits[part].to(dtype).square().sum(-1)
        if shard.group is not None:
            dist.all_reduce(out, group=shard.group)
        ctx.save_for_backward(logits)
        ctx.words, ctx.chunk_tokens = shard.words, chunk_tokens
        return out / shard.words

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (logits,) = ctx.saved_tensors
        factor = (grads[0] * (2 / ctx.words)).unsqueeze(-1)
        out = torch.empty_like(logits)
        for part in chunks(len(logits), ctx.chunk_tokens):
            out[part] = logits[part].to(factor.dtype) * factor[part]
        return out, None, None
