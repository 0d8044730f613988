"""The local machines with every state computed once and known by a number, and the three moves in
which they meet."""

from typing import NamedTuple

from tests.model_check import server as srv
from tests.model_check import steps
from tests.model_check import trainer as trn
from tests.model_check.tables import Tables
from titan_grpo.protocol import image_slots as b


class Step(NamedTuple):
    """A move by number: its name, the state after it, and whether it is a fault. ``unpins``: it
    drops the lane's image."""

    name: str
    after: int
    fault: bool
    unpins: bool = False


class Machines:
    """States of servers and of the trainer's side by number. ``doing`` is the move under way, for a
    violation's trace."""

    def __init__(self, tables: Tables, versions: int) -> None:
        self.tables, self.versions, self.doing = tables, versions, "start"
        self.servers: list[srv.Server] = []
        self.trainers: list[trn.Trainer] = []
        self._server_numbers: dict[srv.Server, int] = {}
        self._trainer_numbers: dict[trn.Trainer, int] = {}
        self._server_steps: dict[int, tuple[Step, ...]] = {}
        self._trainer_steps: dict[int, tuple[Step, ...]] = {}
        self._local: dict[int, bool] = {}
        self._orphans: dict[int, tuple[int, ...]] = {}
        self._pins: dict[tuple[int, int, int], tuple[int, int] | None] = {}
        self._unpins: dict[tuple[int, int], int] = {}
        self._renamed: dict[tuple[int, tuple[int, ...]], int] = {}

    def server(self, state: srv.Server) -> int:
        """The number of a server's state, which is checked when it is seen first."""
        number = self._server_numbers.get(state)
        if number is None:
            srv.check(state)
            number = self._server_numbers[state] = len(self.servers)
            self.servers.append(state)
        return number

    def trainer(self, state: trn.Trainer) -> int:
        """The number of the trainer's state, which is checked when it is seen first."""
        number = self._trainer_numbers.get(state)
        if number is None:
            trn.check(state)
            number = self._trainer_numbers[state] = len(self.trainers)
            self.trainers.append(state)
        return number

    def server_steps(self, number: int) -> tuple[Step, ...]:
        """What one server can do by itself, faults included."""
        known = self._server_steps.get(number)
        if known is None:
            made = []
            for name, after, effect, fault in steps.moves(self.servers[number], self.tables):
                self.doing = name
                made.append(Step(name, self.server(after), fault, effect == "unpin"))
            known = self._server_steps[number] = tuple(made)
        return known

    def trainer_steps(self, number: int) -> tuple[Step, ...]:
        """What the trainer's side can do by itself."""
        known = self._trainer_steps.get(number)
        if known is None:
            made = []
            for name, after, fault in trn.moves(self.trainers[number], self.versions, self.tables):
                self.doing = name
                made.append(Step(name, self.trainer(after), fault))
            known = self._trainer_steps[number] = tuple(made)
        return known

    def local(self, number: int) -> bool:
        """Whether nothing that this server does next touches the trainer's side."""
        local = self._local.get(number)
        if local is None:
            state = self.servers[number]
            local = self._local[number] = not steps.wants_newer(state) and not state.lane.pinned
        return local

    def orphans(self, number: int) -> tuple[int, ...]:
        """The server after the trainer was replaced."""
        known = self._orphans.get(number)
        if known is None:
            self.doing = "the trainer is replaced"
            known = self._orphans[number] = tuple(
                self.server(after) for after in steps.orphans(self.servers[number], self.tables)
            )
        return known

    def pin(self, trainer: int, index: int, number: int) -> tuple[int, int] | None:
        """Both sides after lane ``index`` pinned a newer image; None if there is none, or it wants
        none."""
        key = (trainer, index, number)
        if key not in self._pins:
            state, found = self.servers[number], None
            if steps.wants_newer(state):
                self.doing = f"lane {index} pins"
                side, version = trn.pin(
                    self.trainers[trainer], str(index), state.entry.held, self.tables
                )
                if version is not None:
                    found = (
                        self.trainer(side),
                        self.server(steps.pin(state, version, self.tables)),
                    )
            self._pins[key] = found
        return self._pins[key]

    def unpin(self, trainer: int, index: int) -> int:
        """The trainer's side after lane ``index`` dropped its image."""
        key = (trainer, index)
        if key not in self._unpins:
            self.doing = f"lane {index} unpins"
            self._unpins[key] = self.trainer(
                trn.unpin(self.trainers[trainer], str(index), self.tables)
            )
        return self._unpins[key]

    def renamed(self, trainer: int, order: tuple[int, ...]) -> int:
        """The trainer's side with its lanes' pins named anew: ``order[new] = old``, both from 0."""
        key = (trainer, order)
        if key not in self._renamed:
            names = {str(old + 1): str(new) for new, old in enumerate(order, start=1)}
            side = self.trainers[trainer]
            slots = tuple(
                (
                    b.Slot(s.phase, s.version, frozenset(names[p] for p in s.pins), s.missing)
                    if s.pins
                    else s
                )
                for s in side.table.slots
            )
            self._renamed[key] = self.trainer(
                side._replace(table=b.SlotTable(slots, side.table.sealed))
            )
        return self._renamed[key]
