"""Down-sampling for pictures, so that a run of any length fits on a page. Pure."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Band:
    """Least, mean and largest value of each bucket, [buckets] float64; NaN where a bucket has
    none."""

    low: Array
    mean: Array
    high: Array


def edges(count: int, limit: int) -> npt.NDArray[np.int64]:
    """Bounds of at most ``limit`` buckets of ``count`` values; their sizes differ by 1 at most.

    Example: 10 values in 4 buckets have the bounds 0, 2, 5, 7, 10; 3 values in 4 have 0, 1, 2, 3.
    """
    buckets = max(1, min(count, limit))
    return np.arange(buckets + 1, dtype=np.int64) * count // buckets


def band(values: Array, bounds: npt.NDArray[np.int64]) -> Band:
    """Bucket k has ``values[bounds[k]:bounds[k + 1]]``. What is not finite counts as no value.

    Example: values 1, 3, NaN, NaN with bounds 0, 2, 4: low 1, NaN; mean 2, NaN; high 3, NaN.
    """
    if not values.size:
        return Band(*(np.empty(0) for _ in range(3)))
    known = np.isfinite(values)
    at = bounds[:-1]
    count = np.add.reduceat(known, at, dtype=np.int64)
    total = np.add.reduceat(np.where(known, values, 0.0), at)
    empty = count == 0
    mean = np.where(empty, np.nan, total / np.maximum(count, 1))
    low = np.minimum.reduceat(np.where(known, values, np.inf), at)
    high = np.maximum.reduceat(np.where(known, values, -np.inf), at)
    return Band(np.where(empty, np.nan, low), mean, np.where(empty, np.nan, high))


def covered(start: Array, stop: Array, bounds: Array) -> Array:
    """Share of each interval between neighbouring ``bounds`` (seconds, rising) that the spans
    cover, in [0, 1]. Spans are sorted by start; one that overlaps the next is cut at its start.

    Example: a span from 1 to 3 over the bounds 0, 2, 4 covers 0.5 and 0.5.
    """
    if not start.size:
        return np.zeros(bounds.size - 1)
    stop = np.minimum(stop, np.append(start[1:], np.inf))
    stop = np.maximum(stop, start)
    total = np.append(0.0, np.cumsum(stop - start))
    times = np.stack([start, stop], axis=1).ravel()
    so_far = np.stack([total[:-1], total[1:]], axis=1).ravel()
    done = np.interp(bounds, times, so_far)
    shares: Array = np.diff(done) / np.maximum(np.diff(bounds), 1e-12)
    return shares.clip(0.0, 1.0)


def steps_at(times: Array, values: npt.NDArray[np.int64], at: Array) -> npt.NDArray[np.int64]:
    """Value of a step function at the times ``at``: the last of ``values`` at or before, -1 before
    the first. ``times`` is sorted.

    Example: values 5, 6 at times 1, 2 are -1, 5, 6 at times 0, 1.5, 9.
    """
    index = np.searchsorted(times, at, side="right") - 1
    return (
        np.where(index >= 0, values[np.maximum(index, 0)], -1)
        if times.size
        else np.full(at.shape, -1, dtype=np.int64)
    )


def integral(times: Array, values: npt.NDArray[np.int64], begin: float, end: float) -> float:
    """Integral of that step function from ``begin``, at or after its first time, to ``end``.

    Example: values 5, 6 at times 1, 2 from 1 to 4: 5 * 1 + 6 * 2 = 17.
    """
    inside = times[(times > begin) & (times < end)]
    points = np.concatenate([[begin], inside, [end]])
    return float((np.diff(points) * steps_at(times, values, points[:-1])).sum())


def rounded(values: Array | Sequence[float], digits: int = 4) -> list[float | None]:
    """Plain numbers with few significant digits, None for NaN: what goes into the page's data."""
    out: list[float | None] = []
    for value in np.asarray(values).tolist():
        if not math.isfinite(value):
            out.append(None)
        else:
            short = float(f"{value:.{digits}g}")
            out.append(int(short) if short.is_integer() and abs(short) < 1e15 else short)
    return out
