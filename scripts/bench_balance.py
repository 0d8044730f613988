"""Time and quality of the balance: python scripts/bench_balance.py [--ranks 64] [--sequences 4096]
[--runs 21]. Prints a table.

Quality is the costliest rank's work over the mean, and the coefficient of variation before (groups
dealt in order) and after. Work is a model's own: the linear and the quadratic term of Qwen3-8B's
dimensions.
"""

import argparse
import random
import statistics
import time
from collections.abc import Callable

from titan_grpo.algorithm.balance import TokenCost, deal, partition, variation

QWEN3_8B = TokenCost(6 * 7.57e9, 36 * 32 * 128 * 2 * 6 / 2)
"""Parameters outside the embedding; layers, heads and head size."""

LENGTHS: dict[str, Callable[[random.Random], int]] = {
    "uniform 50..8192": lambda r: r.randint(50, 8192),
    "long tail to 32768": lambda r: min(32768, max(16, int(r.lognormvariate(7, 1)))),
    "short or long": lambda r: r.choice((r.randint(100, 300), r.randint(15000, 16384))),
}
MODES = {
    "sequences": (1, False),
    "sequences, equal counts": (1, True),
    "groups of 8": (8, False),
    "groups of 8, equal": (8, True),
}


def measured(
    costs: list[float], ranks: int, equal: bool, runs: int
) -> tuple[float, float, float, float]:
    """Medians of milliseconds on a core and by the clock, costliest over mean, coefficient of
    variation afterwards."""
    core, clock = [], []
    for _ in range(runs):
        start, begin = time.perf_counter(), time.thread_time()
        parts = partition(costs, ranks, equal)
        core.append(1e3 * (time.thread_time() - begin))
        clock.append(1e3 * (time.perf_counter() - start))
    loads = [sum(costs[item] for item in part) for part in parts]
    return (
        statistics.median(core),
        statistics.median(clock),
        max(loads) / statistics.fmean(loads),
        variation(loads),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--sequences", type=int, default=4096)
    parser.add_argument("--runs", type=int, default=21)
    options = parser.parse_args()
    print(f"{options.sequences} sequences over {options.ranks} ranks, {options.runs} runs")
    print(
        "| lengths | items | ms on a core | ms by the clock | costliest / mean | variation before |"
        " after |"
    )
    print("|---|---|---|---|---|---|---|")
    for name, length in LENGTHS.items():
        source = random.Random(0)
        single = [QWEN3_8B.of(length(source)) for _ in range(options.sequences)]
        for mode, (size, equal) in MODES.items():
            costs = [sum(single[start : start + size]) for start in range(0, len(single), size)]
            before = variation(
                [sum(costs[item] for item in part) for part in deal(len(costs), options.ranks)]
            )
            core, clock, ratio, after = measured(costs, options.ranks, equal, options.runs)
            print(
                f"| {name} | {mode} | {core:.1f} | {clock:.1f} | {ratio:.5f} | {before:.3f} |"
                f" {after:.6f} |"
            )


if __name__ == "__main__":
    main()
