"""Which rank computes which row. Pure arithmetic on lengths.

Every micro-batch is a set of collectives for FSDP, so ranks walk through their micro-batches together and a step
costs the sum over micro-batches of the slowest rank's share. Rows are therefore cut into WAVES, one micro-batch of
every rank, and each wave is dealt so that the ranks' shares are alike. Longest rows go first, so a wave's rows
have similar lengths and little padding. Rows of one group may land on different ranks: advantages exist already.
"""

from collections.abc import Sequence


def padded_length(length: int, multiple: int, max_len: int) -> int:
    """``length`` rounded up to ``multiple``, but not past ``max_len``."""
    return min(-(-length // multiple) * multiple, max_len)


def plan_waves(padded: Sequence[int], num_ranks: int, token_budget: int) -> list[list[int]]:
    """Row indices of each wave, longest rows first; ties keep their order.

    A wave that starts with a row of padded length P holds up to num_ranks * (token_budget // P) rows, so no
    rank gets more than token_budget padded tokens. Requires max(padded) <= token_budget.

    Example: padded (8, 16, 8, 16, 8), 2 ranks, budget 16 -> [[1, 3], [0, 2, 4]].
    """
    order = sorted(range(len(padded)), key=lambda row: -padded[row])
    waves: list[list[int]] = []
    start = 0
    while start < len(order):
        capacity = num_ranks * (token_budget // padded[order[start]])
        waves.append(order[start : start + capacity])
        start += capacity
    return waves


def deal(waves: Sequence[Sequence[int]], costs: Sequence[int], num_ranks: int) -> list[list[list[int]]]:
    """Rows of each rank in each wave: result[rank][wave] is a list of rows, possibly empty.

    Longest processing time first, with equal counts: the rows of a wave are dealt ``num_ranks`` at a time, the
    costliest of them to the rank with the least work so far. Counts in a wave differ by at most one, and total
    costs of two ranks differ by at most the costliest row.

    Example: one wave of rows with costs (5, 4, 3, 1), 2 ranks -> rank 0 rows (0, 3) = 6, rank 1 rows (1, 2) = 7.
    """
    shares: list[list[list[int]]] = [[[] for _ in waves] for _ in range(num_ranks)]
    load = [0] * num_ranks
    for number, wave in enumerate(waves):
        rows = sorted(wave, key=lambda row: -costs[row])
        for start in range(0, len(rows), num_ranks):
            ranks = sorted(range(num_ranks), key=lambda rank: load[rank])
            for rank, row in zip(ranks, rows[start : start + num_ranks], strict=False):
                shares[rank][number].append(row)
                load[rank] += costs[row]
    return shares
