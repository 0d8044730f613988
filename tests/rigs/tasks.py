"""Tasks for runs whose prompts are not alike, or are long. No torch: the rollout process loads
them."""

import random
import string
import threading
from collections.abc import Sequence

from titan_grpo.rollout.task_runner import Codec, TaskOptions
from titan_grpo.rollout.tasks.built_in import Digits
from titan_grpo.samples import Prompt

FLAT, LONG = "tests.rigs.tasks:Flat", "tests.rigs.tasks:LongPrompts"
UNREADY = "tests.rigs.tasks:Unready"
"""Their names in ``rollout.task``."""

LETTERS = 150
"""More than a block of vLLM's prefix cache on a CPU has tokens (128)."""


def is_flat(index: int) -> bool:
    return index % 4 == 0


class Flat(Digits):
    """Digits, where every completion of a flat prompt gets 0."""

    async def reward(self, prompt: Prompt, text: str, token_ids: Sequence[int]) -> float:
        """As Digits, plus 1, so that no other group is all 0 by chance."""
        return 0.0 if is_flat(prompt.index) else 1 + await super().reward(prompt, text, token_ids)


class Unready(Digits):
    """Digits, whose start takes longer than a test."""

    def __init__(self, options: TaskOptions) -> None:
        # no deadline: the end of its process ends it.
        threading.Event().wait()
        super().__init__(options)


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
        return float(len(token_ids))
