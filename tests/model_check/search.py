"""All reachable states of one trainer and its servers: breadth first, with commuting steps in one
order, checked for what must never be and for what must always remain possible.

The trainer's side and every server are machines of their own (trainer.py, server.py). They touch
each other in three moves: a lane pins an image, drops it, or the trainer is replaced, with all its
lanes at once.

Two reductions. Servers are interchangeable, so a state is kept with its servers in order. And steps
of one server that touch nothing else (calls, loads, failures, reconnecting) commute with all
others: a server that is in the middle of them goes on until it meets the trainer's side again; the
states that only differ in how far *other* parts got meanwhile are reached afterwards. Each
invariant is about one server or about the trainer's side, so none can hide in that order. Where
such a step leads only to states already known, everything is expanded, so that no cycle puts
anybody off for ever."""

import gc
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from tests.model_check import server as srv
from tests.model_check import trainer as trn
from tests.model_check.machines import Machines
from tests.model_check.tables import Tables, Violation
from titan_grpo.errors import ProtocolError
from titan_grpo.protocol import lane as lanes

PROGRESS_S = 5.0
"""Least time between two lines of progress, in seconds."""

World = tuple[int, ...]
"""Faults so far, the number of the trainer's state, then one per server."""

Successor = tuple[str, World, bool]
"""Name of the move, the world after it, whether it is a fault."""


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


@dataclass(slots=True)
class Result:
    """``violation`` is empty if there is none; ``trace`` are the moves that lead to it.
    ``complete``: in time."""

    states: int = 0
    steps: int = 0
    seconds: float = 0.0
    violation: str = ""
    trace: list[str] = field(default_factory=list)
    complete: bool = True


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
        self._at: World = ()
        self._parents: dict[World, World | None] = {}
        self._backwards: dict[World, list[World]] = {}

    def run(self) -> Result:
        """Explore until nothing is new, something is wrong, or the time is over."""
        # millions of tuples that live to the end and hold no cycle: looking for one takes a quarter
        # of the time
        collects = gc.isenabled()
        gc.disable()
        try:
            return self._run()
        finally:
            if collects:
                gc.enable()

    def _run(self) -> Result:
        start, result = time.monotonic(), Result()
        try:
            level = [self._first(trained=0, servers=(self._fresh(),) * self.bounds.servers)]
            self._parents[level[0]] = None
            while level and result.complete:
                self._say(time.monotonic() - start)
                level = list(self._expand(level, result, start + self.bounds.deadline_s))
            if result.complete:
                self._check_progress()
        except (Violation, ProtocolError) as error:
            result.violation = str(error)
            result.trace = [*self._trace(self._at), self._m.doing]
        result.states, result.seconds = len(self._parents), time.monotonic() - start
        return result

    def _fresh(self) -> int:
        return self._m.server(srv.Server(lane=lanes.Lane(streamed=self.bounds.streamed)))

    def _first(self, trained: int, servers: tuple[int, ...], spent: int = 0) -> World:
        side = trn.start(self.bounds.ranks, self.bounds.slots, self._m.tables, trained)
        return (spent, self._m.trainer(side), *sorted(servers))

    def _say(self, seconds: float) -> None:
        if self._progress is not None and seconds >= self._said + PROGRESS_S:
            self._said = seconds
            self._progress(len(self._parents), seconds)

    def _expand(self, level: list[World], result: Result, until: float) -> Iterator[World]:
        parents, backwards = self._parents, self._backwards
        for world in level:
            if time.monotonic() > until:
                result.complete = False
                return
            self._at = world
            for _, after, fault in self._successors(world):
                result.steps += 1
                if not fault:
                    backwards.setdefault(after, []).append(world)
                if after not in parents:
                    parents[after] = world
                    yield after

    def _successors(self, world: World) -> list[Successor]:
        for index in range(2, len(world)):
            if self._m.local(world[index]):
                ample = [*self._server_moves(world, index), *self._replaced(world)]
                if any(after not in self._parents for _, after, _ in ample):
                    return ample
        out = [move for index in range(2, len(world)) for move in self._server_moves(world, index)]
        return [*out, *self._trainer_moves(world), *self._replaced(world)]

    def _may_fail(self, world: World) -> bool:
        return self.bounds.faults < 0 or world[0] < self.bounds.faults

    def _spent(self, world: World, fault: bool) -> int:
        return world[0] + 1 if fault and self.bounds.faults >= 0 else world[0]

    def _server_moves(self, world: World, index: int) -> Iterator[Successor]:
        number, may_fail = world[index], self._may_fail(world)
        for step in self._m.server_steps(number):
            if step.fault and not may_fail:
                continue
            trainer = self._m.unpin(world[1], index - 1) if step.unpins else world[1]
            after = self._sorted(
                world, index, step.after, (self._spent(world, step.fault), trainer)
            )
            yield step.name, after, step.fault
        pinned = self._m.pin(world[1], index - 1, number)
        if pinned is not None:
            after = self._sorted(world, index, pinned[1], (world[0], pinned[0]))
            yield "a newer image is pinned", after, False

    def _trainer_moves(self, world: World) -> Iterator[Successor]:
        may_fail = self._may_fail(world)
        for step in self._m.trainer_steps(world[1]):
            if may_fail or not step.fault:
                yield (
                    step.name,
                    (self._spent(world, step.fault), step.after, *world[2:]),
                    step.fault,
                )

    def _replaced(self, world: World) -> Iterator[Successor]:
        """The trainer dies, or freezes, with all its lanes; another one resumes from the last
        version."""
        if not self._may_fail(world) or not any(world[2:]):
            return  # number 0 is a server that no lane has met yet
        trained = max(0, self._m.trainers[world[1]].trained - 1)
        choices = [self._m.orphans(number) for number in world[2:]]
        # with more than one server: all their last requests come late, or all are lost
        for pick in range(max(map(len, choices))):
            servers = tuple(choice[min(pick, len(choice) - 1)] for choice in choices)
            yield (
                "the trainer is replaced",
                self._first(trained, servers, self._spent(world, True)),
                True,
            )

    def _sorted(self, world: World, index: int, after: int, head: tuple[int, int]) -> World:
        """The world with one server changed, its servers in order and the pins renamed with
        them."""
        servers = list(world[2:])
        servers[index - 2] = after
        if servers == (ordered := sorted(servers)):
            return (*head, *servers)
        order = tuple(sorted(range(len(servers)), key=servers.__getitem__))
        return (head[0], self._m.renamed(head[1], order), *ordered)

    # What must always remain possible.

    def _check_progress(self) -> None:
        """From every state, without further faults: the trainer can finish, and every server gets
        the newest version."""
        versions = self.bounds.versions
        for number, side in enumerate(self._m.trainers):
            if side.trained < versions - 1 and not self._m.trainer_steps(number):
                raise Violation(f"the trainer has no step of its own: {side}")
        good = [w for w in self._parents if self._is_settled(w, versions)]
        reached = set(good)
        while good:
            for before in self._backwards.get(good.pop(), ()):
                if before not in reached:
                    reached.add(before)
                    good.append(before)
        stuck = next((w for w in self._parents if w not in reached), None)
        if stuck is not None:
            self._at, self._m.doing = (
                stuck,
                "and no way leads from here to the newest version on every server",
            )
            raise Violation("a server never gets the newest version although faults have stopped")

    def _is_settled(self, world: World, versions: int) -> bool:
        if not trn.finished(self._m.trainers[world[1]], versions):
            return False
        return all(srv.settled(self._m.servers[n], versions) for n in world[2:])

    def _trace(self, world: World) -> list[str]:
        names: list[str] = []
        while (before := self._parents.get(world)) is not None:
            names.append(
                next(name for name, after, _ in self._every_move(before) if after == world)
            )
            world = before
        return names[::-1]

    def _every_move(self, world: World) -> Iterator[Successor]:
        for index in range(2, len(world)):
            for name, after, fault in self._server_moves(world, index):
                yield f"server {index - 1}: {name}", after, fault
        yield from self._trainer_moves(world)
        yield from self._replaced(world)
