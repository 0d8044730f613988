"""Entropy of the next-token distribution from logits, with the memory and the sharding of logprobs.py.

    z = logits / temperature,  p = softmax(z),  H = -sum p log p = logsumexp(z) - sum p z,   d H / d z_j = -p_j (log p_j + H)

Forward keeps the logits as the model made them and two numbers per token; backward makes the probabilities again in chunks.
"""

from typing import Any

import torch
import torch.distributed as dist

from titan_grpo.algorithm.vocabulary import VocabularyShard, chunks, join_normalizers, local_logits, working_dtype


def token_entropy(logits: torch.Tensor, temperature: float, chunk_tokens: int) -> torch.Tensor:
    """Entropy in nats of softmax(logits / temperature): [R, L, V] -> [R, L], with a gradient to ``logits`` in their dtype.

    Arguments, memory, sharding over the vocabulary and errors as in ``token_logprobs``; the value does not depend on
    ``chunk_tokens``. The result is float32 (float64 for float64 logits).
    """
    flat, shard = local_logits(logits)
    out: torch.Tensor = _Entropy.apply(flat, temperature, chunk_tokens, shard)  # type: ignore[no-untyped-call]
    return out.view(logits.shape[:-1])


class _Entropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, temperature: float, chunk_tokens: int, shard: VocabularyShard) -> torch.Tensor:
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
            logp = (logits[part].to(normalizer.dtype) / ctx.temperature).sub_(normalizer[part].unsqueeze(-1))
            weighted = torch.exp(logp).mul_(logp.add_(entropy[part].unsqueeze(-1)))
            out[part] = weighted.mul_(-grad[part].unsqueeze(-1))
        return out, None, None, None
