"""What given weights compute, by an implementation that is neither the trainer's nor the server's: transformers, fp32, CPU."""

from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file


class ReferenceModel:
    """A model whose weights are replaced as often as wanted. ``folder``: a model directory with its config.json."""

    def __init__(self, folder: Path, prompts: Sequence[Sequence[int]]) -> None:
        """``prompts`` must have the same length, [prompts, tokens]."""
        from transformers import AutoConfig, AutoModelForCausalLM

        self._model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.float32).eval()
        self._tokens = torch.tensor(prompts, dtype=torch.int64)

    def logprobs(self, weights: Path) -> tuple[tuple[float, ...], ...]:
        """Log-probability of every token but the first, in nats, [prompts][tokens - 1], under a safetensors file's weights.

        Raises ValueError for a file that does not hold the model's tensors (a tied head may be missing).
        """
        tensors = {name: t.float() for name, t in load_file(weights).items()}
        missing, unexpected = self._model.load_state_dict(tensors, strict=False)
        tied = set(self._model._tied_weights_keys or ()) if self._model.config.tie_word_embeddings else set()
        if set(missing) - tied or unexpected:
            raise ValueError(f"{weights} must hold the model's tensors: missing {missing}, unexpected {unexpected}")
        with torch.inference_mode():
            logits = self._model(self._tokens).logits
        values = logits.log_softmax(-1)[:, :-1].gather(2, self._tokens[:, 1:, None])[..., 0]
        return tuple(tuple(float(x) for x in row) for row in values)
