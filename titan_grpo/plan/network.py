"""Fluid model of transfers. They share a server host's link evenly, and the trainer hosts' rate by
max-min fairness with random weights; a server's readers are a further bound.

A server that reads from another one (protocol.relay) uses nothing of the trainer's rate, shares the
parent host's rate with its other readers, and stays some blocks behind a parent that still
reads."""

import random

import numpy as np

from titan_grpo.plan.setup import Setup
from titan_grpo.protocol.relay import DEPTH

TRAINER = -1
"""Parent of a server that reads from the trainer."""

SHARES = (0.7, 0.9, 1.1, 1.3)
"""Weights, drawn at random, of transfers over connections that were idle: TCP's window starts again
there and the link is shared unevenly (8 servers: 5.1 to 7.4 s for the same bytes at once,
bench_plan.py). It matters because the slot stays pinned until the last one ends."""

IDLE_S = 1.0
"""Idle time after which a connection starts again, as TCP does after a retransmission timeout. A
busy one has an even share (7 servers: 7.0 to 7.1 s in the same run)."""

LIMITS = (
    "",
    "a slow server",
    "the server hosts' links",
    "a server's readers (weight_sync.connections)",
    "what a server's host sends to others (its link, and its sending threads)",
)
"""Limits of a transfer. In place of the first: the trainer hosts' links or range sources."""

SOURCE, SLOW, LINK, READERS, SENDERS = range(5)

DONE_BYTES = 1.0
"""A transfer with fewer bytes left has ended."""

Vector = np.ndarray[tuple[int], np.dtype[np.float64]]


class Network:
    """All transfers of a simulation, at most one per server. Times are simulated seconds."""

    def __init__(self, setup: Setup, slow: set[int], rng: random.Random) -> None:
        """``slow``: servers with ``slow_factor`` of the rate."""
        self._s, self._random = setup, rng
        numbers = range(setup.servers)
        self._left = np.zeros(setup.servers)
        self._active = np.zeros(setup.servers, dtype=bool)
        self._rate = np.zeros(setup.servers)
        self._weight = np.ones(setup.servers)
        self._sent_at = np.full(setup.servers, -np.inf)
        self._parent = np.full(setup.servers, TRAINER)
        self._hosts = np.array([n // setup.servers_per_host for n in numbers])
        self._factor = np.array([setup.slow_factor if n in slow else 1.0 for n in numbers])
        limits = setup.source_limits
        self._source_rate = min(limits.values(), default=float("inf"))
        source = min(limits, key=lambda name: limits[name]) if limits else ""
        self._limits = (source, *LIMITS[1:])
        self._limit = np.zeros(setup.servers, dtype=np.intp)
        self._bounding = np.zeros(len(LIMITS), dtype=np.intp)
        self._moved_at, self._ends_at, self._dirty = 0.0, float("inf"), False
        self._sends = min(setup.link_rate, setup.source_rate)
        self._trainers_rate = 0.0
        self.busy_s: dict[str, float] = {}
        """Limit -> summed seconds of the transfers that it bounded."""
        self.sent_bytes = 0.0
        """Bytes that the trainer sent."""

    def begin(self, n: int, nbytes: int, parent: int, now: float) -> None:
        """Begin a transfer of ``nbytes`` to server ``n``, from server ``parent`` or TRAINER."""
        self.leave(n)
        self._parent[n] = parent
        self._left[n], self._active[n], self._dirty = nbytes, True, True
        anew = now - self._sent_at[n] > IDLE_S
        self._weight[n] = self._random.choice(SHARES) if anew else 1.0

    def leave(self, n: int) -> None:
        """Let the servers that read from ``n`` read from the trainer."""
        self._parent[self._parent == n] = TRAINER
        self._dirty = True

    def stop(self, n: int) -> None:
        """End the transfer of server ``n``, and reads from it."""
        self.leave(n)
        self._active[n], self._dirty = False, True

    def next_end(self, now: float) -> float:
        """Return when the next transfer ends if none begins or stops; inf without any."""
        if self._dirty:
            self._share(now)
        return self._ends_at

    def take_arrived(self, now: float) -> list[int]:
        """Return the servers whose transfer has ended by ``now``, once each."""
        self._move(now)
        self._dirty = True
        done = self._active & (self._left <= np.maximum(DONE_BYTES, self._rate * 1e-6))
        self._active &= ~done
        self._sent_at[done & (self._parent == TRAINER)] = now
        return [int(n) for n in np.flatnonzero(done)]

    def _share(self, now: float) -> None:
        """Compute the rates of all transfers from now on, and their limits."""
        self._move(now)
        self._dirty = False
        active = np.flatnonzero(self._active)
        self._rate[:] = 0.0
        self._ends_at = float("inf")
        self._bounding[:] = self._trainers_rate = 0
        if not active.size:
            return
        hosts, parent = self._hosts[active], self._parent[active]
        relayed = parent != TRAINER
        beside = relayed & (self._hosts[parent] == hosts)
        counts = np.bincount(hosts[~beside], minlength=hosts.max() + 1)
        link = np.where(beside, np.inf, self._s.link_rate / np.maximum(1, counts[hosts]))
        slow = self._factor[active]
        slow = np.where(relayed, np.minimum(slow, self._factor[parent]), slow)
        bound = np.minimum(link, self._s.reader_rate) * slow
        # Each transfer's limit, as an index into LIMITS.
        limit = np.where(slow < 1, SLOW, np.where(link < self._s.reader_rate, LINK, READERS))
        share = np.full(active.size, np.inf)
        others = relayed & ~beside
        readers = np.bincount(self._hosts[parent[others]], minlength=self._hosts.max() + 1)
        share[others] = self._sends / readers[self._hosts[parent[others]]]
        own = ~relayed
        weight = self._weight[active[own]]
        share[own] = weight * water_level(bound[own], weight, self._source_rate)
        limit[share < bound] = SENDERS
        limit[own & (share < bound)] = SOURCE
        rate = np.minimum(bound, share)
        self._trainers_rate = float(rate[own].sum())
        self._rate[active], self._limit[active] = rate, limit
        behind = np.flatnonzero(relayed & self._active[parent])
        above, me, most = parent[behind], active[behind], rate[behind]
        pace = self._left[me] / (self._left[above] + self._s.hop_bytes)
        for _ in range(DEPTH if behind.size else 0):
            before, paced = self._rate[me], self._rate[above] * pace
            self._rate[me] = np.minimum(most, paced)
            self._limit[me] = np.where(paced < most, self._limit[above], limit[behind])
            if np.array_equal(self._rate[me], before):
                break
        self._bounding = np.bincount(self._limit[active], minlength=len(self._limits))
        rate = self._rate[active]
        moving = rate > 0
        if moving.any():
            left = self._left[active][moving] / rate[moving]
            self._ends_at = now + max(0.0, float(left.min()))

    def _move(self, now: float) -> None:
        seconds = now - self._moved_at
        self._moved_at = now
        if seconds > 0:
            self._left -= self._rate * seconds
            self.sent_bytes += self._trainers_rate * seconds
            for name, count in zip(self._limits, self._bounding, strict=True):
                if count:
                    self.busy_s[name] = self.busy_s.get(name, 0.0) + float(count) * seconds


def water_level(bounds: Vector, weights: Vector, total: float) -> float:
    """Return the level L at which the sum of min(bound, weight * L) is ``total``; inf if the sum of
    the bounds is less.

    >>> water_level(np.array([1.0, 5.0, 5.0]), np.array([1.0, 1.0, 2.0]), 7.0)
    2.0
    """
    order = np.argsort(bounds / weights)
    bounds, weights = bounds[order], weights[order]
    before = np.concatenate(([0.0], np.cumsum(bounds)[:-1]))
    levels = (total - before) / np.cumsum(weights[::-1])[::-1]
    reached = np.flatnonzero(levels * weights <= bounds)
    return float(levels[reached[0]]) if reached.size else float("inf")
