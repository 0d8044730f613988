"""Log-probabilities of given tokens from logits, without a second copy of the logits in float32.

A [tokens, vocabulary] matrix in float32 is the largest thing in a training step (8192 tokens x 151936 words = 5 GB),
and a plain log_softmax keeps two of them for backward. Here forward keeps the logits as the model made them and one float32
number per token; backward makes the probabilities again, ``chunk_tokens`` rows at a time, straight into the gradient.
"""

from typing import Any

import torch
import torch.distributed as dist

from titan_grpo.algorithm.microbatches import IGNORE_INDEX
from titan_grpo.algorithm.vocabulary import VocabularyShard, chunks, join_normalizers, local_logits, working_dtype


def token_logprobs(logits: torch.Tensor, labels: torch.Tensor, temperature: float, chunk_tokens: int) -> torch.Tensor:
    """log softmax(logits / temperature) at the labels: [R, L, V] and int64 [R, L] -> [R, L], 0 where label is -100.

    The result is float32 (float64 for float64 logits) with a gradient to ``logits`` in their own dtype. Temporary memory is
    about 2 * chunk_tokens * V * 4 bytes; ``chunk_tokens`` 0 takes all at once. The value does not depend on it.

    ``logits`` may be a DTensor sharded over the vocabulary, as torchtitan's loss-parallel output is: each tensor-parallel
    rank reads its own columns, and three all-reduces of R * L numbers join them, so that every rank has the whole result.
    Raises ConfigError for a DTensor that is sharded in another way.
    """
    flat, shard = local_logits(logits)
    out: torch.Tensor = _TokenLogprobs.apply(flat, labels.reshape(-1), temperature, chunk_tokens, shard)  # type: ignore[no-untyped-call]
    return out.view(labels.shape)


def _columns(labels: torch.Tensor, first_word: int, num_words: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Column of each label in the local shard (0 where it is not there), and whether it is there."""
    columns = labels - first_word
    here = (labels != IGNORE_INDEX) & (columns >= 0) & (columns < num_words)
    return columns.masked_fill(~here, 0).unsqueeze(-1), here


class _TokenLogprobs(torch.autograd.Function):
    """out = logits[label] / T - logsumexp(logits / T); d out / d logits = (onehot - softmax) / T."""

    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, labels: torch.Tensor, temperature: float, chunk_tokens: int, shard: VocabularyShard
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
        # Masked before use: an ignored position must give exact zeros, also when the incoming gradient is not finite.
        grad = grads[0].masked_fill(labels == IGNORE_INDEX, 0).unsqueeze(-1) / ctx.temperature
        out = torch.empty_like(logits)
        for part in chunks(len(labels), ctx.chunk_tokens):
            scaled = logits[part].to(normalizer.dtype) / ctx.temperature
            softmax = scaled.sub_(normalizer[part].unsqueeze(-1)).exp_()
            softmax.mul_(-grad[part])
            softmax.scatter_add_(-1, columns[part], grad[part] * here[part].unsqueeze(-1))
            out[part] = softmax
        return out, None, None, None, None
