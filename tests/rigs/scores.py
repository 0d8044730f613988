"""How far servers' log-probabilities are from those of the weights that they should hold."""

from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file

from tests.conformance.crowd import prompt
from tests.conformance.engine import furthest
from tests.conformance.reference import Reference
from titan_grpo.engines.http import SyncDriver
from titan_grpo.engines.server import dialect

PROMPTS = 4
CALL_S = 60.0
Tensors = dict[str, torch.Tensor]


class Scores:
    """What the model in ``folder`` gives to some prompts, by transformers, and how far from it
    servers are."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._last = folder, list[list[float]]()
        self._asked = [prompt(seed) for seed in range(PROMPTS)]

    def of_version(
        self, version: int, tensors: Tensors, urls: Sequence[str], engines: Sequence[str]
    ) -> dict[str, float]:
        """Largest differences to these weights in float32, in nats: ``difference`` of the servers,
        ``rounding`` of transformers in bfloat16, ``moved`` of the weights before."""
        save_file(tensors, self._folder / "model.safetensors", metadata={"format": "pt"})
        now, before = self._right(torch.float32), self._last
        self._last = now
        rounded = self._right(torch.bfloat16)
        found = {
            "difference": self._apart(urls, engines, now, str(version)),
            "rounding": max(map(furthest, rounded, now)),
        }
        return found | ({"moved": max(map(furthest, now, before))} if before else {})

    def _right(self, dtype: torch.dtype) -> list[list[float]]:
        reference = Reference(self._folder, dtype)
        return [reference.logprobs(ids) for ids in self._asked]

    def _apart(
        self, urls: Sequence[str], engines: Sequence[str], right: Sequence[list[float]], salt: str
    ) -> float:
        apart = []
        for url, engine in zip(urls, engines, strict=True):
            with SyncDriver(url) as driver:
                for ids, wanted in zip(self._asked, right, strict=True):
                    scores = driver.run(dialect(engine).score(ids, CALL_S, salt))
                    apart.append(furthest(scores, wanted))
        return max(apart)
