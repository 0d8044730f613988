"""Partition of sequences over ranks, and of a rank's sequences over micro-batches. Pure arithmetic
on lengths.

First, items (groups, or single sequences) are partitioned so that all ranks have about equal work:
the model's arithmetic, which grows a little faster than a sequence's length. Then each rank's
sequences are cut into micro-batches that keep the token budget. Every micro-batch is a set of
collectives for FSDP, so all ranks run the same number of them, longest sequences first: the k-th
micro-batches of all ranks then have similar lengths.
"""

import heapq
import statistics
from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True, slots=True)
class TokenCost:
    """Work of one sequence: ``linear * n + quadratic * n ** 2`` for n tokens, in any unit
    (operations, say).

    The first term stands for matrix products with parameters, the second for attention's products
    of tokens with tokens. The defaults count tokens.
    """

    linear: float = 1.0
    quadratic: float = 0.0

    def of(self, length: int) -> float:
        """Return the work of ``length`` tokens. Example: TokenCost(2, 0.5).of(4) == 16."""
        return length * (self.linear + self.quadratic * length)


def variation(loads: Sequence[float]) -> float:
    """Return the coefficient of variation: population standard deviation over mean; 0 for mean 0.

    Example: loads (1, 3) have mean 2 and deviation 1: 0.5.
    """
    mean = statistics.fmean(loads)
    return statistics.pstdev(loads, mean) / mean if mean > 0 else 0.0


def deal(num_items: int, num_parts: int) -> list[list[int]]:
    """Deal items to parts in turn: the baseline of ``partition``. Example: 5 items, 2 parts ->
    (0 2 4), (1 3)."""
    return [list(range(part, num_items, num_parts)) for part in range(num_parts)]


def partition(
    costs: Sequence[float], num_parts: int, equal_counts: bool = False
) -> list[list[int]]:
    """Return the items of each part, with a small greatest sum of costs. Deterministic; with fewer
    items than parts, some parts are empty.

    Longest processing time first (Graham, "Bounds on multiprocessing timing anomalies", 1969): each
    item, costliest first, goes to the part with the smallest sum so far. With ``equal_counts``
    every ``num_parts`` items go to one part each: counts differ by at most one. ``_mended`` then
    exchanges items between uneven parts. All this is a heuristic, so ``deal``'s parts are returned
    if they are better.

    Example: costs (8, 7, 6, 5, 4), 2 parts -> sums 17 and 13, then by an exchange 15 and 15.
    """
    order = sorted(range(len(costs)), key=costs.__getitem__, reverse=True)
    parts: list[list[int]] = [[] for _ in range(num_parts)]
    loads = [(0.0, part) for part in range(num_parts)]
    at_once = num_parts if equal_counts else 1
    for start in range(0, len(order), at_once):
        items = order[start : start + at_once]
        lightest = [heapq.heappop(loads) for _ in items]
        for item, (load, part) in zip(items, lightest, strict=True):
            parts[part].append(item)
            heapq.heappush(loads, (load + costs[item], part))

    def costliest(parts: list[list[int]]) -> float:
        return max(sum(map(costs.__getitem__, part)) for part in parts)

    mended = _mended(parts, costs, equal_counts)
    return min(mended, deal(len(costs), num_parts), key=costliest)


EVEN_ENOUGH = 1e-3
"""Excess of a part over the mean, relative to the mean, up to which it stays as it is."""


def _mended(parts: list[list[int]], costs: Sequence[float], equal_counts: bool) -> list[list[int]]:
    """Exchange items between the costliest part and a cheaper one while that makes the costliest
    cheaper.

    An exchange is one item for one (or for none, unless counts must stay equal): the pair that
    comes closest to halving the difference. It helps most with equal counts if a few items are very
    long: no partner is short enough for them. At most four exchanges per part; the items of a part
    are returned sorted.
    """
    cost = costs.__getitem__
    loads = [sum(map(cost, part)) for part in parts]
    enough = (1 + EVEN_ENOUGH) * sum(loads) / len(loads)
    parts = [sorted(part, key=cost) for part in parts]
    for _ in range(4 * len(parts)):
        heavy = max(range(len(parts)), key=loads.__getitem__)
        if loads[heavy] <= enough:
            break
        own = [costs[i] for i in parts[heavy]]
        for light in sorted(range(len(parts)), key=loads.__getitem__):
            others = [costs[i] for i in parts[light]]
            found = _best_pair(own, others, loads[heavy] - loads[light], not equal_counts)
            if found is not None:
                break
        else:
            break
        give, take = found
        given = parts[heavy].pop(give)
        moved = costs[given]
        if take is not None:
            taken = parts[light].pop(take)
            insort(parts[heavy], taken, key=cost)
            moved -= costs[taken]
        insort(parts[light], given, key=cost)
        loads[heavy] -= moved
        loads[light] += moved
    return [sorted(part) for part in parts]


def _best_pair(
    heavy: Sequence[float], light: Sequence[float], gap: float, may_give: bool
) -> tuple[int, int | None] | None:
    """Return positions in two sorted lists whose costs differ by about ``gap / 2`` (second None:
    give without taking); None if no exchange helps."""
    best: tuple[int, int | None] | None = None
    best_error = gap / 2 * (1 - 1e-9)
    at = 0
    for give, cost in enumerate(heavy):
        if may_give and abs(cost - gap / 2) < best_error:
            best, best_error = (give, None), abs(cost - gap / 2)
        while at < len(light) and cost - light[at] > gap / 2:
            at += 1
        for take in (at - 1, at):
            if 0 <= take < len(light) and abs(cost - light[take] - gap / 2) < best_error:
                best, best_error = (give, take), abs(cost - light[take] - gap / 2)
    return best


def padded_length(length: int, multiple: int, max_len: int) -> int:
    """Round ``length`` up to a multiple of ``multiple``, but not past ``max_len``."""
    return min(-(-length // multiple) * multiple, max_len)


def cut_padded(padded: Sequence[int], token_budget: int, at_least: int = 1) -> list[list[int]]:
    """Cut rows into micro-batches, longest rows first (ties keep their order); rows are padded to
    the longest of their micro-batch.

    A micro-batch that starts with a row of padded length P holds up to ``token_budget // P`` rows.
    If there are fewer than ``at_least``, the largest are halved, down to one row each. Requires
    max(padded) <= token_budget.

    Example: padded (8, 16, 8), budget 16 -> [[1], [0, 2]].
    """
    order = sorted(range(len(padded)), key=lambda row: -padded[row])
    cuts: list[list[int]] = []
    start = 0
    while start < len(order):
        capacity = token_budget // padded[order[start]]
        cuts.append(order[start : start + capacity])
        start += capacity
    while len(cuts) < min(at_least, len(order)):
        number = max(
            (n for n, cut in enumerate(cuts) if len(cut) > 1),
            key=lambda n: len(cuts[n]) * padded[cuts[n][0]],
        )
        half = -(-len(cuts[number]) // 2)
        cuts[number : number + 1] = [cuts[number][:half], cuts[number][half:]]
    return cuts


def cut_alike(padded: Sequence[int], token_budget: int, at_least: int = 1) -> list[list[int]]:
    """Cut rows into micro-batches, longest rows first, all rows padded to the longest of all, as
    pipeline stages need them: as few as keep the budget, but ``at_least`` if there are as many
    rows. Requires max(padded) <= token_budget.

    Example: padded (8, 16, 8), budget 32 -> [[1], [0, 2]].
    """
    if not padded:
        return []
    order = sorted(range(len(padded)), key=lambda row: -padded[row])
    fewest = -(-len(padded) // (token_budget // max(padded)))
    cuts = max(fewest, min(at_least, len(padded)))
    ends = [len(padded) * number // cuts for number in range(cuts + 1)]
    return [order[slice(*pair)] for pair in pairwise(ends)]


def cut_packed(lengths: Sequence[int], token_budget: int, at_least: int = 1) -> list[list[int]]:
    """Cut sequences into micro-batches, each a packed row of at most ``token_budget`` tokens,
    fullest first.

    First fit, longest first, finds how many are needed. ``partition`` makes as many, or
    ``at_least`` if that is more; its micro-batches are more alike, and are taken if all keep the
    budget. If not, first fit's are taken, and single sequences out of them until there are
    ``at_least``. Requires max(lengths) <= token_budget.

    Example: lengths (3, 2, 5, 6), budget 8 -> [[1, 3], [0, 2]], 8 tokens each (in the order given
    they would need three).
    """
    if not lengths:
        return []
    bins: list[list[int]] = []
    room: list[int] = []
    for item in sorted(range(len(lengths)), key=lambda item: -lengths[item]):
        fits = next((number for number, free in enumerate(room) if free >= lengths[item]), None)
        if fits is None:
            bins.append([])
            room.append(token_budget)
            fits = len(bins) - 1
        bins[fits].append(item)
        room[fits] -= lengths[item]
    wanted = min(max(len(bins), at_least), len(lengths))
    alike = partition(lengths, wanted)
    if all(sum(lengths[i] for i in items) <= token_budget for items in alike):
        bins = alike
    # More micro-batches are no guarantee: partition may exceed with 20 a budget that first fit
    # keeps with 19.
    while len(bins) < wanted:
        bins.append([max(bins, key=len).pop()])
    return sorted(
        (sorted(items) for items in bins), key=lambda items: -sum(lengths[i] for i in items)
    )
