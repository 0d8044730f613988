"""Group-relative advantages (GRPO, arXiv 2402.03300, section 4.1.2; without the division: Dr.GRPO, 2503.20783)."""

import math
from collections.abc import Sequence

from titan_grpo.errors import DataError

STD_EPSILON = 1e-6
"""Added to the standard deviation, so that a group of nearly equal rewards is not blown up to unit scale."""


def group_advantages(rewards: Sequence[float], normalize_std: bool) -> tuple[float, ...]:
    """Advantage of each completion of one prompt: its reward against its own group's mean.

    With ``normalize_std`` the centred rewards are divided by the group's population standard deviation
    plus ``STD_EPSILON``. Equal rewards, and a group of one, give exact zeros: such a group teaches nothing.

    Example: rewards (1, 0, 0, 1) have mean 0.5 and deviation 0.5, so the advantages are (1, -1, -1, 1)
    up to 2e-6; without the division they are (0.5, -0.5, -0.5, 0.5).

    Raises DataError for a reward that is not finite: it would poison the whole group.
    """
    for reward in rewards:
        if not math.isfinite(reward):
            raise DataError(f"a reward must be a finite number, got {reward!r}: the group's advantages would all be NaN")
    if not rewards or min(rewards) == max(rewards):
        return (0.0,) * len(rewards)
    mean = math.fsum(rewards) / len(rewards)
    centred = tuple(reward - mean for reward in rewards)
    if not normalize_std:
        return centred
    std = math.sqrt(math.fsum(c * c for c in centred) / len(centred))
    return tuple(c / (std + STD_EPSILON) for c in centred)
