"""Statistics of a series of numbers."""

import math
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Statistics:
    """Summary of the finite values of a series; every figure is None while there is no value."""

    count: int
    median: float | None
    p95: float | None
    mean: float | None
    max: float | None

    def pick(self, *names: str) -> dict[str, float | None]:
        """Some of the figures as a dict: ``s.pick("median", "p95")``."""
        return {name: getattr(self, name) for name in names}


def quantile(ordered: list[float], share: float) -> float:
    """Quantile with linear interpolation between the two nearest ranks (``ordered`` ascending, not
    empty).

    Example: ``quantile([1, 2, 3, 4], 0.5)`` has the position 0.5 * 3 = 1.5, half way from 2 to 3:
    2.5.
    """
    position = share * (len(ordered) - 1)
    low = math.floor(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def describe(values: Iterable[float]) -> Statistics:
    """Statistics of the finite values; NaN and infinities are left out, so one bad step does not
    hide the rest."""
    ordered = sorted(v for v in values if math.isfinite(v))
    if not ordered:
        return Statistics(0, None, None, None, None)
    mean = math.fsum(ordered) / len(ordered)
    return Statistics(
        len(ordered), quantile(ordered, 0.5), quantile(ordered, 0.95), mean, ordered[-1]
    )


def ends(values: list[float]) -> tuple[float | None, float | None, int]:
    """Mean over the first and over the last few of a series, and how many that is.

    The window is a fifth of the series, at least 1 and at most 5 values: single steps are noisy.
    Example: 60 rewards give the means of steps 1..5 and 56..60; 4 rewards give the first and the
    last one.
    """
    finite = [v for v in values if math.isfinite(v)]
    if not finite:
        return None, None, 0
    window = max(1, min(5, len(finite) // 5))
    return math.fsum(finite[:window]) / window, math.fsum(finite[-window:]) / window, window
