"""How a fault run's lane is stopped at a point of the protocol until it is told how to go on."""

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from titan_grpo.errors import TransferFailed
from titan_grpo.protocol.lane_events import LaneEvent, Point

HOLD_S = 120.0
"""Longest time that a lane is held, in seconds: whoever asked for it may have gone."""

Emit = Callable[[Mapping[str, Any]], None]
Strike = Callable[[Mapping[str, Any]], None]
"""Does what ``go`` asks for in the lane's thread."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """Hold the lane to ``url`` at its ``occurrence``-th passing of ``point`` from now on."""

    url: str
    point: Point
    occurrence: int

    @property
    def between_epochs(self) -> bool:
        """Whether the point is passed by a new epoch only, which an idle, healthy lane never
        opens."""
        return self.point in (Point.GREET, Point.CONNECTED)


class Holder:
    """Observer of a fault run's lanes. Decides nothing: it stops where it is told, says so, and
    waits."""

    def __init__(self, emit: Emit, strike: Strike) -> None:
        self._emit, self._strike = emit, strike
        self._changed = threading.Condition()
        self._wanted: Wanted | None = None
        self._passed = 0
        self._answer: Mapping[str, Any] | None = None

    def want(self, wanted: Wanted | None) -> None:
        """Watch for it; None: for nothing. Any thread."""
        with self._changed:
            self._wanted, self._passed, self._answer = wanted, 0, None

    def go(self, answer: Mapping[str, Any]) -> None:
        """Let the held lane go on as ``answer["with"]`` says. Any thread."""
        with self._changed:
            self._answer = answer
            self._changed.notify_all()

    def __call__(self, passing: LaneEvent) -> None:
        """See protocol.lane_events.Observer; here it blocks, which only a fault run may."""
        if not self._due(passing):
            return
        self._emit(
            {"event": "held_at", "point": passing.point.value, "url": passing.url} | _of(passing)
        )
        with self._changed:
            self._changed.wait_for(lambda: self._answer is not None, HOLD_S)
            answer, self._answer = self._answer or {"with": "continue"}, None
        if answer["with"] == "fail":
            raise TransferFailed("planted: the transfer ends here")
        if answer["with"] != "continue":
            self._strike(answer)

    def _due(self, passing: LaneEvent) -> bool:
        with self._changed:
            wanted = self._wanted
            if wanted is None or passing.url != wanted.url:
                return False
            if wanted.between_epochs and passing.point is Point.BEGIN:
                raise TransferFailed("planted: the epoch ends here, so that the next one begins")
            self._passed += passing.point is wanted.point
            if passing.point is not wanted.point or self._passed < wanted.occurrence:
                return False
            self._wanted = None
            return True


def _of(passing: LaneEvent) -> dict[str, Any]:
    return {"epoch": passing.epoch, "version": passing.version, "run_id": passing.run_id}
