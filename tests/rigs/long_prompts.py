"""A task whose prompts are longer than a block of an engine's prefix cache, for checks. No torch:
the rollout process loads it."""

import random
import string
from collections.abc import Sequence

from titan_grpo.rollout.tasks.base import Codec, TaskOptions
from titan_grpo.samples import Prompt

TASK = "tests.rigs.long_prompts:LongPrompts"
"""Its name in ``rollout.task``."""

LETTERS = 150
"""More than a block of vLLM's cache on a CPU has tokens (128)."""


class LongPrompts:
    """Random letters; every completion has the reward of its length."""

    def __init__(self, options: TaskOptions) -> None:
        self._seed = options.seed

    def prompt(self, index: int, codec: Codec) -> Prompt:
        """Letters drawn from a generator that is seeded with (seed, index). Neighbours differ in
        the first one, so that a cached prefix is one of the same prompt."""
        chosen = random.Random(f"{self._seed}/{index}").choices(string.ascii_lowercase, k=LETTERS)
        chosen[0] = string.ascii_lowercase[index % len(string.ascii_lowercase)]
        return Prompt(index, codec.encode("".join(chosen)))

    async def reward(self, prompt: Prompt, text: str, token_ids: Sequence[int]) -> float:
        """Number of tokens."""
        return float(len(token_ids))
