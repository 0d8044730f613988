"""The local machines with every state computed once and known by a number, and the three moves in
which they meet."""

from array import array
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

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


class Rows:
    """Steps one behind the other, as columns."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self._columns = {name: array("q") for name in ("after", "fault", "unpins")}

    def add(self, made: Sequence[Step]) -> tuple[int, int]:
        """Append; (first row, count)."""
        first = len(self.names)
        self.names += [step.name for step in made]
        for name, column in self._columns.items():
            column.extend(int(getattr(step, name)) for step in made)
        return first, len(made)

    def __getitem__(self, name: str) -> NDArray[np.int64]:
        """A copy: what is viewed cannot grow."""
        return np.array(self._columns[name], dtype=np.int64)


class Machines:
    """States of servers and of the trainer's side by number, and their steps by row. ``doing`` is
    the move under way, for a violation's trace. What was made of a number is made once."""

    def __init__(self, tables: Tables, versions: int) -> None:
        self.tables, self.versions, self.doing = tables, versions, "start"
        self.servers: list[srv.Server] = []
        self.trainers: list[trn.Trainer] = []
        self.rows = Rows()
        self._server_numbers: dict[srv.Server, int] = {}
        self._trainer_numbers: dict[trn.Trainer, int] = {}
        self.server_rows, self.trainer_rows = cache(self._server_rows), cache(self._trainer_rows)
        self.orphans, self.renamed = cache(self._orphans), cache(self._renamed)
        self.pin, self.unpin = cache(self._pin), cache(self._unpin)

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

    def _server_rows(self, number: int) -> tuple[int, int, bool, bool]:
        """What one server can do by itself, faults included: (first row, count); whether none of it
        touches the trainer's side; whether its lane wants an image."""
        state, made = self.servers[number], []
        for name, after, effect, fault in steps.moves(state, self.tables):
            self.doing = name
            made.append(Step(name, self.server(after), fault, effect == "unpin"))
        wants = steps.wants_newer(state)
        return (*self.rows.add(made), not wants and not state.lane.pinned, wants)

    def _trainer_rows(self, number: int) -> tuple[int, int]:
        """What the trainer's side can do by itself: (first row, count)."""
        made = []
        for name, after, fault in trn.moves(self.trainers[number], self.versions, self.tables):
            self.doing = name
            made.append(Step(name, self.trainer(after), fault))
        return self.rows.add(made)

    def _orphans(self, number: int) -> tuple[int, int]:
        """The server after the trainer was replaced: its last request comes late, or is lost."""
        self.doing = "the trainer is replaced"
        made = [self.server(s) for s in steps.orphans(self.servers[number], self.tables)]
        return made[0], made[-1]

    def _pin(self, trainer: int, index: int, number: int) -> tuple[int, int]:
        """Both sides after lane ``index``, which wants an image, pinned a newer one; (-1, -1) if
        there is none."""
        self.doing = f"lane {index} pins"
        state = self.servers[number]
        held = state.lane.entry.held
        side, version = trn.pin(self.trainers[trainer], str(index), held, self.tables)
        if version is None:
            return -1, -1
        after = steps.pin(state, version, self.tables)
        return self.trainer(side), self.server(after)

    def _unpin(self, trainer: int, index: int) -> int:
        """The trainer's side after lane ``index`` dropped its image."""
        self.doing = f"lane {index} unpins"
        return self.trainer(trn.unpin(self.trainers[trainer], str(index), self.tables))

    def _renamed(self, trainer: int, order: tuple[int, ...]) -> int:
        """The trainer's side with its lanes' pins named anew: ``order[new] = old``, both from 0."""
        names = {str(old + 1): str(new) for new, old in enumerate(order, start=1)}
        side = self.trainers[trainer]
        slots = tuple(
            b.Slot(s.phase, s.version, frozenset(names[p] for p in s.pins), s.missing)
            for s in side.table.slots
        )
        return self.trainer(side._replace(table=b.SlotTable(slots, side.table.finished)))
