"""A small tool loop: sums with a calculator that the policy may call. Several turns, no files."""

import random
import re
from collections.abc import Sequence

from titan_grpo.rollout.tasks.base import Codec, TaskOptions, Turn
from titan_grpo.samples import Prompt

LARGEST = 999
TEMPLATE = "{a}+{b}=? [x+y] asks the calculator.\n"
CALL = re.compile(r"\[(\d{1,9})\+(\d{1,9})\]\s*\Z")
NUMBER = re.compile(r"\d+")


class Calculator:
    """A turn that ends with "[12+34]" gets "=46" and a new line appended; any other turn ends the
    episode."""

    def __init__(self, options: TaskOptions) -> None:
        self._seed = options.seed

    def prompt(self, index: int, codec: Codec) -> Prompt:
        """Two numbers drawn from a generator that is seeded with (seed, index)."""
        chance = random.Random(f"{self._seed}/{index}")
        a, b = chance.randint(0, LARGEST), chance.randint(0, LARGEST)
        return Prompt(index, codec.encode(TEMPLATE.format(a=a, b=b)), {"sum": a + b})

    async def turn(
        self, prompt: Prompt, turns: Sequence[Turn], codec: Codec
    ) -> Sequence[int] | None:
        """The sum that was asked for."""
        call = CALL.search(turns[-1].text)
        return codec.encode(f"={int(call[1]) + int(call[2])}\n") if call else None

    async def episode_reward(self, prompt: Prompt, turns: Sequence[Turn]) -> float:
        """1 where the last number that the policy wrote after the calculator's last answer is the
        sum of the prompt, else 0."""
        numbers = NUMBER.findall(turns[-1].text) if turns[-1].sampled else []
        return float(bool(numbers) and int(numbers[-1][:18]) == prompt.payload["sum"])
