"""Tasks whose prompts are not alike, for runs. No torch: the rollout process loads them."""

import asyncio
from collections.abc import Sequence

from titan_grpo.rollout.tasks.digits import Digits
from titan_grpo.samples import Prompt

SLOW, FLAT = "tests.rigs.uneven_tasks:Slow", "tests.rigs.uneven_tasks:Flat"
"""Their names in ``rollout.task``."""

SLOW_S = 6.0


def is_slow(index: int) -> bool:
    """Every tenth prompt."""
    return index % 10 == 9


def is_flat(index: int) -> bool:
    """Every fourth prompt."""
    return index % 4 == 0


class Slow(Digits):
    """Digits, where every reward of a slow prompt takes ``SLOW_S`` seconds."""

    async def reward(self, prompt: Prompt, text: str, token_ids: Sequence[int]) -> float:
        """As Digits."""
        if is_slow(prompt.index):
            judged = asyncio.Event()
            asyncio.get_running_loop().call_later(SLOW_S, judged.set)
            await judged.wait()  # no deadline: the timer ends it
        return await super().reward(prompt, text, token_ids)


class Flat(Digits):
    """Digits, where every completion of a flat prompt gets 0."""

    async def reward(self, prompt: Prompt, text: str, token_ids: Sequence[int]) -> float:
        """As Digits, plus 1, so that no other group is all 0 by chance."""
        return 0.0 if is_flat(prompt.index) else 1 + await super().reward(prompt, text, token_ids)
