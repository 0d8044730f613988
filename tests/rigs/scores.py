"""Log-probabilities of some prompts, of a server and of the weights that it should hold."""

from pathlib import Path

import torch

from tests.conformance.crowd import prompt
from tests.conformance.engine import furthest
from tests.conformance.reference import Reference
from titan_grpo.engines.http import ServerAccess
from titan_grpo.engines.server import dialect

PROMPTS = tuple(prompt(seed) for seed in range(1, 5))
Scores = list[list[float]]
"""Of each prompt, of every token but the first, in nats."""


def right(folder: Path, dtype: torch.dtype = torch.float32) -> Scores:
    """By transformers, of the model in ``folder``."""
    reference = Reference(folder, dtype)
    return [reference.logprobs(ids) for ids in PROMPTS]


def said(access: ServerAccess, engine: str, salt: str) -> Scores:
    """By a server. ``salt``: no prefix of other weights is in its cache under it."""
    with access.driver() as driver:
        score = dialect(engine).score
        out = [driver.run(score(ids, access.deadline_s, salt)) for ids in PROMPTS]
    return [list(logprobs) for logprobs in out]


def apart(one: Scores, other: Scores) -> float:
    return max(map(furthest, one, other))
