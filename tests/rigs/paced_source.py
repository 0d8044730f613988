"""A source of ranges that serves the next range only when a test lets it."""

import threading
from collections.abc import Callable

from titan_grpo.layout.manifest import Part
from titan_grpo.runkey import Key
from titan_grpo.sync.transports.range_server import RangeServer


class PacedSource(RangeServer):
    """Serves one range, and a further one for each ``go``: the others are not there yet. For a
    reader with one connection."""

    def __init__(self) -> None:
        super().__init__()
        self._turn = threading.Lock()
        self._allowed = 1
        self._ends: set[int] = set()
        """Of the ranges that may be served."""
        self._ticket = ""

    def grant(
        self,
        view: memoryview,
        fd: int | None,
        key: Key | None,
        part: Part | None = None,
        ticket: str = "",
        has: Callable[[int, int], bool] | None = None,
    ) -> str:
        with self._turn:
            self._ends.clear()
            self._ticket = super().grant(view, fd, key, part, ticket, self._may)
            return self._ticket

    def go(self) -> None:
        """Let one more range through."""
        with self._turn:
            self._allowed += 1
        self.arrived(self._ticket)

    def _may(self, offset: int, nbytes: int) -> bool:
        """Asked for what is left of a range, again and again."""
        with self._turn:
            if offset + nbytes not in self._ends and self._allowed:
                self._allowed -= 1
                self._ends.add(offset + nbytes)
            return offset + nbytes in self._ends
