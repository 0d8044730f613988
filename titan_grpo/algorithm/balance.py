"""Which rank computes which sequences, and in which micro-batches. Pure arithmetic on lengths.

Two questions, one after the other. WHO: items (groups, or single sequences) are partitioned so that
the ranks' work is alike; work is the model's arithmetic for a sequence, which grows a little faster
than its length. HOW: a rank's sequences are cut into micro-batches that keep the token budget.
Every micro-batch is a set of collectives for FSDP, so all ranks walk through the same number of
them, longest sequences first: the k-th micro-batches of all ranks then have similar lengths.
"""

import heapq
import statistics
from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count, pairwise


@dataclass(frozen=True, slots=True)
class TokenCost:
    """Work of one sequence: ``linear * n + quadratic * n ** 2`` for n tokens, in any unit
    (operations, say).

    The first term is every matrix product with a parameter, the second attention's products of
    tokens with tokens. The defaults count tokens.
    """

    linear: float = 1.0
    quadratic: float = 0.0

    def of(self, length: int) -> float:
        """Example: TokenCost(2, 0.5).of(4) == 16."""
        return length * (self.linear + self.quadratic * length)


def variation(loads: Sequence[float]) -> float:
    """Coefficient of variation: population standard deviation over mean; 0 where nothing is loaded.

    Example: loads (1, 3) have mean 2 and deviation 1: 0.5.
    """
    mean = statistics.fmean(loads)
    return statistics.pstdev(loads, mean) / mean if mean > 0 else 0.0


def deal(num_items: int, num_parts: int) -> list[list[int]]:
    """Items in their order, dealt like cards: what partition is compared with. Example: 5 items, 2
    parts -> (0 2 4), (1 3)."""
    return [list(range(part, num_items, num_parts)) for part in range(num_parts)]


def partition(
    costs: Sequence[float], num_parts: int, equal_counts: bool = False
) -> list[list[int]]:
    """Items of each part, with the largest sum of costs made small. Deterministic; fewer items than
    parts leave parts empty.

    Largest differencing method (Karmarkar and Karp, "The differencing method of set partitioning",
    1982): each item begins as a solution of its own; the two solutions whose parts differ most are
    joined, the largest part of one with the smallest of the other, until one is left. With
    ``equal_counts`` the items are first taken in order of cost, ``num_parts`` at a time, one for
    each part, so that counts differ by at most one. What is uneven then is mended by exchanges of
    items (see ``_mended``). It is a heuristic: items dealt in turn are taken where they come out
    better, so the costliest part is never costlier than ``deal``'s.

    Example: costs (8, 7, 6, 5, 4), 2 parts -> sums 16 and 14 (the method's; the best possible is 15
    and 15), then 15 and 15.
    """
    method = _Differencing(costs, num_parts)
    order = sorted(range(len(costs)), key=costs.__getitem__, reverse=True)
    if equal_counts:
        for start in range(0, len(order), num_parts):
            method.add(order[start : start + num_parts])
    else:
        method.add_singly(order)

    def costliest(parts: list[list[int]]) -> float:
        return max(sum(map(costs.__getitem__, part)) for part in parts)

    mended = _mended(method.parts(), costs, equal_counts)
    return min(mended, deal(len(costs), num_parts), key=costliest)


_Solution = list[tuple[float, int]]
"""(minus its cost, node) of every part, costliest first; a node is an item, or a pair of nodes, or
nothing at all."""
_NOTHING = -1


class _Differencing:
    """Solutions in order of their difference, costliest part minus cheapest. Parts are trees:
    joining them copies no items."""

    def __init__(self, costs: Sequence[float], num_parts: int) -> None:
        self._costs = costs
        self._num_parts = num_parts
        self._base = len(costs) - 1
        self._pairs: list[tuple[int, int]] = []
        self._heap: list[tuple[float, int, _Solution]] = []
        self._ticket = count()

    def add(self, items: Sequence[int]) -> None:
        """A solution with one item in each part, as far as they go. ``items`` are sorted, costliest
        first."""
        filled = [(-self._costs[item], item) for item in items]
        self._push(filled + [(0.0, _NOTHING)] * (self._num_parts - len(items)))

    def add_singly(self, order: Sequence[int]) -> None:
        """One solution per item of ``order`` (costliest first), all joined as the method says.

        A solution with empty parts differs by its costliest part, which no later item exceeds: it
        stays first, and takes the next items one by one into its empty parts. And one item joins a
        full solution at its cheapest part. So most steps need neither the heap nor a pass over all
        parts, which makes this some ten times as fast.
        """
        at = 0
        while at < len(order):
            if self._heap and -self._heap[0][0] > self._costs[order[at]]:
                at = self._feed(heapq.heappop(self._heap)[2], order, at)
                continue
            stop, bound = at + 1, -self._heap[0][0] if self._heap else -1.0
            while (
                stop < min(at + self._num_parts, len(order)) and self._costs[order[stop]] >= bound
            ):
                stop += 1
            self.add(order[at:stop])
            at = stop

    def parts(self) -> list[list[int]]:
        """Join what is left, and the items of each part."""
        heap = self._heap
        while len(heap) > 1:
            self._push(self._joined(heapq.heappop(heap)[2], heapq.heappop(heap)[2]))
        return (
            [self._items(node) for _, node in heap[0][2]]
            if heap
            else [[] for _ in range(self._num_parts)]
        )

    def _push(self, solution: _Solution) -> None:
        heapq.heappush(self._heap, (solution[0][0] - solution[-1][0], next(self._ticket), solution))

    def _feed(self, top: _Solution, order: Sequence[int], at: int) -> int:
        """Join the first solution with what differs most after it, for as long as that is one item;
        where ``order`` goes on."""
        rival = -self._heap[0][0] if self._heap else 0.0
        while at < len(order) and top[-1][0] - top[0][0] > self._costs[order[at]] >= rival:
            load, node = top.pop()
            insort(top, (load - self._costs[order[at]], self._pair(node, order[at])))
            at += 1
        if at < len(order) and top[-1][0] - top[0][0] > self._costs[order[at]]:
            top = self._joined(top, heapq.heappop(self._heap)[2])
        self._push(top)
        return at

    def _joined(self, one: _Solution, other: _Solution) -> _Solution:
        """The costliest part of one with the cheapest of the other, and so on."""
        parts, pair = [], self._pair
        for (a, x), (b, y) in zip(one, reversed(other), strict=True):
            parts.append((a + b, pair(x, y)))
        parts.sort()
        return parts

    def _pair(self, x: int, y: int) -> int:
        if x == _NOTHING or y == _NOTHING:
            return max(x, y)
        self._pairs.append((x, y))
        return self._base + len(self._pairs)

    def _items(self, node: int) -> list[int]:
        items, stack = [], [node] if node != _NOTHING else []
        num_items, pairs = len(self._costs), self._pairs
        while stack:
            node = stack.pop()
            while node >= num_items:
                node, other = pairs[node - num_items]
                stack.append(other)
            items.append(node)
        return items


EVEN_ENOUGH = 1e-3
"""A part that is this much above the mean, relative to it, is left as it is."""


def _mended(parts: list[list[int]], costs: Sequence[float], equal_counts: bool) -> list[list[int]]:
    """Exchange items between the costliest part and a cheaper one while that makes the costliest
    cheaper.

    An exchange is one item for one (or for none, unless counts must stay equal), the pair that
    comes closest to halving the difference. Differencing of equal counts leaves something to do
    where few items are very long: nothing short enough may go with them. At most four exchanges per
    part; items of a part come out sorted.
    """
    cost = costs.__getitem__
    loads = [sum(map(cost, part)) for part in parts]
    enough = (1 + EVEN_ENOUGH) * sum(loads) / max(len(loads), 1)
    if max(loads) > enough:
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
    """Positions in two sorted lists whose costs differ by about ``gap / 2``, None for nothing; None
    if no exchange helps."""
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
    """``length`` rounded up to ``multiple``, but not past ``max_len``."""
    return min(-(-length // multiple) * multiple, max_len)


def cut_padded(padded: Sequence[int], token_budget: int, at_least: int = 1) -> list[list[int]]:
    """Micro-batches of rows that are padded to the longest of their micro-batch, longest rows
    first; ties keep their order.

    A micro-batch that starts with a row of padded length P holds up to ``token_budget // P`` rows.
    If that makes fewer than ``at_least``, the largest are halved while they have rows to give.
    Requires max(padded) <= token_budget.

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
    """Micro-batches of rows that are all padded to the longest, as pipeline stages take them,
    longest rows first: as few as keep the budget, but at least so many where there are rows.
    Requires max(padded) <= token_budget.

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
    """Micro-batches of sequences that lie one after the other in a row of at most ``token_budget``
    tokens.

    First fit, longest first, finds how many are needed; if differencing finds as many that keep the
    budget, those are taken, since they are more alike. Fullest first. Requires max(lengths) <=
    token_budget.

    Example: lengths (5, 3, 2, 6), budget 8 -> [[2, 3], [0, 1]], 8 tokens each.
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
    if len(bins) < wanted or all(sum(lengths[i] for i in items) <= token_budget for items in alike):
        bins = alike
    return sorted(
        (sorted(items) for items in bins), key=lambda items: -sum(lengths[i] for i in items)
    )
