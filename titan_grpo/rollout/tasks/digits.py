"""The quickstart's toy: write digits. Dense, so that a tiny random model learns it within a
minute."""

import random
import string
from collections.abc import Sequence

from titan_grpo.rollout.tasks.base import Codec, TaskOptions
from titan_grpo.samples import Prompt

PROMPT_LETTERS = 4


class Digits:
    """Prompts are a few random letters and "=". The reward is the share of the completion's
    characters that are digits."""

    def __init__(self, options: TaskOptions) -> None:
        self._seed = options.seed

    def prompt(self, index: int, codec: Codec) -> Prompt:
        """Letters drawn from a generator that is seeded with (seed, index)."""
        letters = random.Random(f"{self._seed}/{index}").choices(
            string.ascii_lowercase, k=PROMPT_LETTERS
        )
        return Prompt(index, codec.encode("".join(letters) + "="))

    async def reward(self, prompt: Prompt, text: str, token_ids: Sequence[int]) -> float:
        """In 0..1. Special tokens have no characters and count as one non-digit each where tokens
        outnumber characters: "12" and an end token give 2/3."""
        digits = sum(character in string.digits for character in text)
        return digits / max(len(text), len(token_ids), 1)
