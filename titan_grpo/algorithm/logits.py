"""Mean square of a token's logits over the vocabulary: the existing trainer's penalty on their size (``logit_loss_weight``).

    S = mean over words of logit^2,   d S / d logit_j = 2 logit_j / words

The logits are the model's own, not divided by the temperature. Memory and sharding as in logprobs.py.
"""

from typing import Any

import torch
import torch.distributed as dist

from titan_grpo.algorithm.vocabulary import VocabularyShard, chunks, local_logits, working_dtype


def logit_mean_square(logits: torch.Tensor, chunk_tokens: int) -> torch.Tensor:
    """Mean over the vocabulary of logits^2: [R, L, V] -> [R, L], with a gradient to ``logits`` in their dtype.

    ``logits`` may be sharded over the vocabulary; errors as in ``token_logprobs``. float32 (float64 for float64 logits).
    """
    flat, shard = local_logits(logits)
    out: torch.Tensor = _MeanSquare.apply(flat, chunk_tokens, shard)  # type: ignore[no-untyped-call]
    return out.view(logits.shape[:-1])


class _MeanSquare(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, chunk_tokens: int, shard: VocabularyShard) -> torch.Tensor:
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
