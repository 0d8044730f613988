"""Turns of the lanes that commit, so that a server stands still for the calls of its own commit and
not for those of all others."""

import threading
import time

from titan_grpo.protocol.lane import AT_WORK

TURN_S = 0.25
"""How long a lane counts as at work, in seconds. One that needs longer waits for its server, and a
server that stands still must cost the other lanes nothing."""


class Turns:
    """Of all lanes of a run: AT_WORK have one at a time. They make their calls in one process,
    whose processor they share: if hundreds began to commit at once, all their servers would be
    paused until the last call.

    A lane waits for its turn before it pauses its server. While an engine loads, other lanes have
    the turn; once it has loaded, its lane goes on without waiting, and new ones begin later.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._began: dict[str, float] = {}

    def wait(self, url: str) -> None:
        """Begin when fewer than AT_WORK are at work. A commit has two turns, before and after the
        load: each lane that began before holds this one up for 2 * TURN_S / AT_WORK at most."""
        with self._changed:
            while len(self._at_work()) >= AT_WORK:
                self._changed.wait(min(self._began.values()) + TURN_S - time.monotonic())
            self._began[url] = time.monotonic()

    def go_on(self, url: str) -> None:
        """Begin at once: the server is paused. Never waits."""
        with self._changed:
            self._began[url] = time.monotonic()

    def end(self, url: str) -> None:
        """The lane makes no calls for now. Idempotent; never waits."""
        with self._changed:
            self._began.pop(url, None)
            self._changed.notify()

    def _at_work(self) -> dict[str, float]:
        since = time.monotonic() - TURN_S
        self._began = {url: began for url, began in self._began.items() if began > since}
        return self._began
