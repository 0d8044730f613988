"""The local machines with every state computed once and known by a number, and the three moves in
which they meet."""

from array import array
from collections.abc import Sequence
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
    the move under way, for a violation's trace."""

    def __init__(self, tables: Tables, versions: int) -> None:
        self.tables, self.versions, self.doing = tables, versions, "start"
        self.servers: list[srv.Server] = []
        self.trainers: list[trn.Trainer] = []
        self.rows = Rows()
        self._server_numbers: dict[srv.Server, int] = {}
        self._trainer_numbers: dict[trn.Trainer, int] = {}
        self._server_rows: dict[int, tuple[int, int, bool, bool]] = {}
        self._trainer_rows: dict[int, tuple[int, int]] = {}
        self._orphans: dict[int, tuple[int, int]] = {}
        self._pins: dict[tuple[int, int, int], tuple[int, int]] = {}
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

    def server_rows(self, number: int) -> tuple[int, int, bool, bool]:
        """What one server can do by itself, faults included: (first row, count); whether none of it
        touches the trainer's side; whether its lane wants an image."""
        known = self._server_rows.get(number)
        if known is None:
            state, made = self.servers[number], []
            for name, after, effect, fault in steps.moves(state, self.tables):
                self.doing = name
                made.append(Step(name, self.server(after), fault, effect == "unpin"))
            wants = steps.wants_newer(state)
            known = (*self.rows.add(made), not wants and not state.lane.pinned, wants)
            self._server_rows[number] = known
        return known

    def trainer_rows(self, number: int) -> tuple[int, int]:
        """What the trainer's side can do by itself: (first row, count)."""
        known = self._trainer_rows.get(number)
        if known is None:
            made = []
            for name, after, fault in trn.moves(self.trainers[number], self.versions, self.tables):
                self.doing = name
                made.append(Step(name, self.trainer(after), fault))
            known = self._trainer_rows[number] = self.rows.add(made)
        return known

    def orphans(self, number: int) -> tuple[int, int]:
        """The server after the trainer was replaced: its last request comes late, or is lost."""
        known = self._orphans.get(number)
        if known is None:
            self.doing = "the trainer is replaced"
            made = [self.server(s) for s in steps.orphans(self.servers[number], self.tables)]
            known = self._orphans[number] = made[0], made[-1]
        return known

    def pin(self, trainer: int, index: int, number: int) -> tuple[int, int]:
        """Both sides after lane ``index``, which wants an image, pinned a newer one; (-1, -1) if
        there is none."""
        key = (trainer, index, number)
        if key not in self._pins:
            state, found = self.servers[number], (-1, -1)
            self.doing = f"lane {index} pins"
            side, version = trn.pin(
                self.trainers[trainer], str(index), state.lane.entry.held, self.tables
            )
            if version is not None:
                after = steps.pin(state, version, self.tables)
                found = self.trainer(side), self.server(after)
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
