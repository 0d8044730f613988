"""PTX mix-in: batches of plain text from torchtitan's own loader, whose cross-entropy joins the
optimizer step.

As in InstructGPT (arXiv 2203.02155, eq. 2), where it kept the policy from forgetting:  L = L_policy
+ ptx_scale * CE.
"""

from collections.abc import Iterator
from typing import Any

import torch

from titan_grpo.errors import ConfigError


class TextMixin:
    """One rank's share of the text. ``loader`` goes into the checkpoint; iteration begins after
    that was loaded."""

    def __init__(self, spec: Any, job_config: Any, dp_degree: int, dp_rank: int) -> None:
        """``spec`` is torchtitan's train spec of the model, with its own tokenizer and loader."""
        if spec.build_tokenizer_fn is None or spec.build_dataloader_fn is None:
            raise ConfigError(
                f"grpo.ptx_mixin_batchsize must be 0 for {job_config.model.name!r}: torchtitan has"
                " no text loader for it"
            )
        # rules.py refuses what is no multiple.
        self.batches_per_step = job_config.grpo.ptx_mixin_batchsize // (
            job_config.training.local_batch_size * dp_degree
        )
        tokenizer = spec.build_tokenizer_fn(job_config)
        ranks = {"dp_world_size": dp_degree, "dp_rank": dp_rank}
        try:
            self.loader = spec.build_dataloader_fn(
                **ranks, tokenizer=tokenizer, job_config=job_config
            )
        except (ValueError, OSError) as error:
            raise ConfigError(
                "training.dataset and training.dataset_path must name a text that torchtitan loads"
                f" (grpo.ptx_mixin_batchsize > 0 reads it), got {job_config.training.dataset!r} and"
                f" {job_config.training.dataset_path!r}: {error}"
            ) from error
        self._batches: Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]] | None = None

    def take(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """(inputs, labels) int64 [B, L] on the CPU, one pair per batch of an optimizer step. The
        loader repeats its data."""
        if self._batches is None:
            self._batches = iter(self.loader)
        pairs = [next(self._batches) for _ in range(self.batches_per_step)]
        return [(inputs["input"], labels) for inputs, labels in pairs]


def text_weight(
    text_tokens: float, completion_tokens: float, scale: float, by_tokens: bool
) -> float:
    """Factor on the SUM of the text's cross-entropies, all tokens counted over all ranks.

    ``scale`` / text_tokens: ``scale`` times their mean. With ``by_tokens`` also times text_tokens /
    completion_tokens, so that with token-normalised GRPO a token of text weighs ``scale`` times as
    much as one of a completion.

    Example: 200 tokens of text, 50 of completions, scale 0.5: 0.0025, and by tokens 0.01.
    """
    return scale / max(completion_tokens if by_tokens else text_tokens, 1.0)
