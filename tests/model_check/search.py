"""All reachable states of one trainer and its servers: breadth first, with commuting steps in one
order, checked for what must never be and for what must always remain possible.

The trainer's side and every server are machines of their own (trainer.py, server.py). They touch
each other in three moves: a lane pins an image, drops it, or the trainer is replaced, with all its
lanes at once. A world is one integer, made of the numbers of its machines' states, and a level of
the search is an array of them.

Two reductions. Servers are interchangeable, so a state is kept with its servers in order. And steps
of one server that touch nothing else (calls, loads, failures, reconnecting) commute with all
others: a server that is in the middle of them goes on until it meets the trainer's side again; the
states that only differ in how far *other* parts got meanwhile are reached afterwards. Each
invariant is about one server or about the trainer's side, so none can hide in that order. A world
is only expanded that way if it is the first of its level to lead to a world that is in no level
yet: on any chain of such worlds the level grows, so each ends at a world that is expanded whole,
and no cycle puts anybody off for ever."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tests.model_check import server as srv
from tests.model_check import trainer as trn
from tests.model_check.machines import Machines
from tests.model_check.small import Result
from tests.model_check.tables import Tables, Violation
from titan_grpo.errors import ConfigError, ProtocolError
from titan_grpo.protocol import lane as lanes

PROGRESS_S = 5.0
"""Least time between two lines of progress, in seconds."""

SPENT_BITS, TRAINER_BITS, SERVERS_BITS = 4, 11, 48
"""Of a world's integer, from the top: faults so far, the number of the trainer's state, then all
servers'."""

Array = NDArray[np.int64]

NONE = 1 << 62


@dataclass(frozen=True, slots=True)
class Bounds:
    """What is explored. ``faults``: how many may happen in one run, wherever they fall; -1: any
    number."""

    ranks: int = 2
    servers: int = 2
    versions: int = 3
    slots: int = 2
    faults: int = 1
    streamed: bool = False
    deadline_s: float = 600.0


class Worlds(NamedTuple):
    """Worlds by part: int64[N], int64[N], int64[N, servers]."""

    spent: Array
    trainer: Array
    servers: Array

    def at(self, rows: Array) -> "Worlds":
        return Worlds(self.spent[rows], self.trainer[rows], self.servers[rows])


class Moves(NamedTuple):
    """One row per move: the world's row in its level, the world after it, whether it is a fault,
    the machine that moves (a server's index, TRAINER, REPLACED), and the row of its name, or -1: an
    image is pinned."""

    source: Array
    after: Array
    fault: Array
    machine: Array
    name: Array


TRAINER, REPLACED = -1, -2


class Explorer:
    """One exploration. ``run`` is the whole of it."""

    def __init__(
        self,
        bounds: Bounds,
        tables: Tables | None = None,
        progress: Callable[[int, float], None] | None = None,
    ) -> None:
        """``progress`` is told (states, seconds) now and then."""
        self.bounds = bounds
        self._m = Machines(tables or Tables(), bounds.versions)
        self._progress, self._said = progress, 0.0
        self._bits = SERVERS_BITS // max(2, bounds.servers)
        self._at = 0
        self._levels: list[Array] = []
        self._parents: list[Array] = []
        """Per level and world, the row of the world in the level before that led to it."""
        self._edges: list[tuple[NDArray[np.uint32], NDArray[np.uint32]]] = []
        """Per level, (from, to) of all moves that are no faults; a world's number is its place in
        all levels."""

    def run(self) -> Result:
        """Explore until nothing is new, something is wrong, or the time is over."""
        start, result = time.monotonic(), Result()
        try:
            self._explore(result, start)
            if result.complete:
                self._check_progress()
        except (Violation, ProtocolError) as error:
            last = self._m.doing
            result.violation, result.trace = str(error), [*self._trace(self._at), last]
        result.states, result.seconds = sum(map(len, self._levels)), time.monotonic() - start
        return result

    def _explore(self, result: Result, start: float) -> None:
        fresh = self._m.server(srv.Server(lane=lanes.Lane(streamed=self.bounds.streamed)))
        zero = np.zeros(1, np.int64)
        first = Worlds(zero, zero + self._begun(0), np.full((1, self.bounds.servers), fresh))
        known, numbers = self._pack(first), zero
        self._levels, self._parents = [known], [zero]
        while len(level := self._levels[-1]):
            seconds = time.monotonic() - start
            self._say(len(known), seconds)
            if seconds > self.bounds.deadline_s:
                result.complete = False
                return
            worlds = self._parts(level)
            rows = [self._each(level, self._m.server_rows, n) for n in worlds.servers.T]
            moves = self._moves(level, worlds, rows)
            after, target = np.unique(moves.after, return_inverse=True)
            place = np.searchsorted(known, after)
            there = np.minimum(place, len(known) - 1)
            new, number = known[there] != after, numbers[there]
            leads = new[target] & (_least(target, moves.source, len(after))[target] == moves.source)
            kept = self._kept(moves, leads, rows)
            result.steps += len(kept)
            source, target, calm = moves.source[kept], target[kept], moves.fault[kept] == 0
            parents = _least(target, source, len(after))
            found = np.flatnonzero(new & (parents < NONE))
            number[found] = len(known) + np.arange(len(found))
            ends = len(known) - len(level) + source[calm], number[target[calm]]
            self._edges.append((ends[0].astype(np.uint32), ends[1].astype(np.uint32)))
            numbers = np.insert(numbers, place[found], number[found])
            known = np.insert(known, place[found], after[found])
            self._levels.append(after[found])
            self._parents.append(parents[found])

    def _begun(self, trained: int) -> int:
        """The number of a trainer's side that has published nothing yet."""
        side = trn.start(self.bounds.ranks, self.bounds.slots, self._m.tables, trained)
        return self._m.trainer(side)

    def _say(self, states: int, seconds: float) -> None:
        if self._progress is not None and seconds >= self._said + PROGRESS_S:
            self._said = seconds
            self._progress(states, seconds)

    def _kept(self, moves: Moves, leads: Array, rows: list[Array]) -> Array:
        """The rows of the moves that are made: where one server goes on alone, its own and the
        trainer's replacement; else all."""
        alone = np.full(len(rows[0]), NONE)
        for index, columns in enumerate(rows):
            further = leads & ((moves.machine == index) | (moves.machine == REPLACED))
            can = np.zeros(len(alone), bool)
            can[moves.source[further]] = True
            alone[can & (columns[:, 2] > 0) & (alone == NONE)] = index
        chosen = alone[moves.source]
        kept: Array = np.flatnonzero(
            (chosen == NONE) | (moves.machine == chosen) | (moves.machine == REPLACED)
        )
        return kept

    # Worlds as integers.

    def _pack(self, worlds: Worlds) -> Array:
        most = self.bounds.faults, len(self._m.trainers), len(self._m.servers)
        if any(
            n >> bits > 0
            for n, bits in zip(most, (SPENT_BITS, TRAINER_BITS, self._bits), strict=True)
        ):
            raise ConfigError(
                f"a world must fit into 63 bits, these bounds have more states: {self.bounds};"
                " choose fewer servers, versions or faults"
            )
        packed = worlds.spent << TRAINER_BITS | worlds.trainer
        for numbers in worlds.servers.T:
            packed = packed << self._bits | numbers
        return packed

    def _parts(self, packed: Array) -> Worlds:
        count, mask = self.bounds.servers, (1 << self._bits) - 1
        servers = [packed >> self._bits * i & mask for i in reversed(range(count))]
        head = packed >> self._bits * count
        trainer = head & (1 << TRAINER_BITS) - 1
        return Worlds(head >> TRAINER_BITS, trainer, np.stack(servers, axis=1))

    def _each(self, level: Array, function: Callable[..., Any], *columns: Array) -> Array:
        """``function`` of each row of the columns, called once for equal ones; one row each."""
        key = columns[0]
        for column in columns[1:]:
            key = key << self._bits | column
        _, first, inverse = np.unique(key, return_index=True, return_inverse=True)
        made = []
        for row in first:
            self._at = int(level[row])  # where a violation is met
            made.append(function(*(int(column[row]) for column in columns)))
        return np.array(made, np.int64)[inverse]

    # Moves.

    def _moves(self, level: Array, worlds: Worlds, rows: list[Array]) -> Moves:
        """All of every world. ``rows``: Machines.server_rows of each server."""
        own = self._each(level, self._m.trainer_rows, worlds.trainer)
        parts = [self._steps(level, worlds, TRAINER, own)]
        for index, columns in enumerate(rows):
            parts.append(self._steps(level, worlds, index, columns))
            parts += self._pins(level, worlds, index, np.flatnonzero(columns[:, 3]))
        parts += self._replaced(level, worlds)
        return Moves(*(np.concatenate(columns) for columns in zip(*parts, strict=True)))

    def _may_fail(self, spent: Array) -> NDArray[np.bool_]:
        return (spent < self.bounds.faults) | (self.bounds.faults < 0)

    def _steps(self, level: Array, worlds: Worlds, machine: int, rows: Array) -> Moves:
        """What one machine can do by itself. ``rows``: (first row, count) per world."""
        count = rows[:, 1]
        source = np.repeat(np.arange(len(level)), count)
        within = np.arange(len(source)) - np.repeat(np.cumsum(count) - count, count)
        row = rows[source, 0] + within
        fault = self._m.rows["fault"][row]
        able = (fault == 0) | self._may_fail(worlds.spent[source])
        source, row, fault = source[able], row[able], fault[able]
        spent = worlds.spent[source] + (fault if self.bounds.faults >= 0 else 0)
        after, trainer = self._m.rows["after"][row], worlds.trainer[source]
        if machine == TRAINER:
            packed = self._pack(Worlds(spent, after, worlds.servers[source]))
        else:
            drops = np.flatnonzero(self._m.rows["unpins"][row])
            if len(drops):
                index = np.full(len(drops), machine + 1)
                trainer[drops] = self._each(
                    level[source[drops]], self._m.unpin, trainer[drops], index
                )
            servers = worlds.servers[source]
            servers[:, machine] = after
            packed = self._ordered(level[source], Worlds(spent, trainer, servers))
        return Moves(source, packed, fault, np.full(len(source), machine), row)

    def _pins(self, level: Array, worlds: Worlds, index: int, source: Array) -> list[Moves]:
        """A lane pins a newer image, in the worlds where there is one. ``source``: where it wants
        one."""
        if not len(source):
            return []
        trainer, servers = worlds.trainer[source], worlds.servers[source]
        lane = np.full(len(source), index + 1)
        sides = self._each(level[source], self._m.pin, trainer, lane, servers[:, index])
        there = sides[:, 0] >= 0
        source, servers, sides = source[there], servers[there], sides[there]
        servers[:, index] = sides[:, 1]
        after = self._ordered(level[source], Worlds(worlds.spent[source], sides[:, 0], servers))
        none = np.zeros(len(source), np.int64)
        return [Moves(source, after, none, none + index, none - 1)]

    def _replaced(self, level: Array, worlds: Worlds) -> list[Moves]:
        """The trainer dies, or freezes, with all its lanes; another one resumes from the last
        version. With more than one server: all their last requests come late, or all are lost."""
        # number 0 is a server that no lane has met yet
        met = self._may_fail(worlds.spent) & worlds.servers.any(axis=1)
        source = np.flatnonzero(met)
        if not len(source):
            return []
        spent = worlds.spent[source] + (self.bounds.faults >= 0)

        def resumed(number: int) -> int:
            return self._begun(max(0, self._m.trainers[number].trained - 1))

        trainer = self._each(level[source], resumed, worlds.trainer[source])
        servers = worlds.servers[source]
        choices = np.stack([self._each(level[source], self._m.orphans, n) for n in servers.T])
        late = choices[:, :, 0].T
        lost = choices[:, :, 1].T
        out = []
        for pick, some in ((late, slice(None)), (lost, (late != lost).any(axis=1))):
            after = Worlds(spent[some], trainer[some], np.sort(pick[some], axis=1))
            one = np.ones(len(source[some]), np.int64)
            out.append(Moves(source[some], self._pack(after), one, one * REPLACED, one * REPLACED))
        return out

    def _ordered(self, level: Array, worlds: Worlds) -> Array:
        """Worlds with their servers in order, and the pins renamed with them."""
        order = np.argsort(worlds.servers, axis=1, kind="stable")
        count = self.bounds.servers
        moved = np.flatnonzero((order != np.arange(count)).any(axis=1))
        trainer = worlds.trainer
        if len(moved):
            code = order[moved] @ count ** np.arange(count)

            def renamed(side: int, code: int) -> int:
                return self._m.renamed(side, tuple(code // count**i % count for i in range(count)))

            trainer = trainer.copy()
            trainer[moved] = self._each(level[moved], renamed, trainer[moved], code)
        servers = np.take_along_axis(worlds.servers, order, axis=1)
        return self._pack(Worlds(worlds.spent, trainer, servers))

    # What must always remain possible.

    def _check_progress(self) -> None:
        """From every state, without further faults: the trainer can finish, and every server gets
        the newest version."""
        versions = self.bounds.versions
        for number, side in enumerate(self._m.trainers):
            if side.trained < versions - 1 and not self._m.trainer_rows(number)[1]:
                raise Violation(f"the trainer has no step of its own: {side}")
        finished = np.array([trn.finished(side, versions) for side in self._m.trainers])
        settled = np.array([srv.settled(one, versions) for one in self._m.servers])
        every = np.concatenate(self._levels)
        worlds = self._parts(every)
        reached = finished[worlds.trainer] & settled[worlds.servers].all(axis=1)
        before = -1
        while before != (before := int(reached.sum())):
            for source, target in reversed(self._edges):
                reached[source[reached[target]]] = True
        if before < len(reached):
            self._at = int(every[np.argmin(reached)])
            self._m.doing = "and no way leads from here to the newest version on every server"
            raise Violation("a server never gets the newest version although faults have stopped")

    def _trace(self, world: int) -> list[str]:
        """The names of the moves that lead to a world of some level."""
        depth = next(d for d, level in enumerate(self._levels) if world in level)
        row, names = int(np.flatnonzero(self._levels[depth] == world)[0]), []
        while depth:
            row, after = int(self._parents[depth][row]), self._levels[depth][row]
            depth -= 1
            before = self._levels[depth][row : row + 1]
            worlds = self._parts(before)
            rows = [self._each(before, self._m.server_rows, n) for n in worlds.servers.T]
            moves = self._moves(before, worlds, rows)
            one = int(np.flatnonzero(moves.after == after)[0])
            names.append(self._named(int(moves.machine[one]), int(moves.name[one])))
        return names[::-1]

    def _named(self, machine: int, name: int) -> str:
        if machine == REPLACED:
            return "the trainer is replaced"
        what = self._m.rows.names[name] if name >= 0 else "a newer image is pinned"
        return what if machine == TRAINER else f"server {machine + 1}: {what}"


def _least(group: Array, value: Array, groups: int) -> Array:
    """The least value of each group; NONE of an empty one."""
    out = np.full(groups, NONE)
    np.minimum.at(out, group, value)
    return out
