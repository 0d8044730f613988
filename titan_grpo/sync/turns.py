"""Turns of committing lanes: a server is paused for its own commit's calls, not for all others'."""

import threading
import time

from titan_grpo.protocol.lane import AT_WORK, TURN_S


class Turns:
    """Turns of a run's lanes: at most AT_WORK begin at a time. Their calls share one process's CPU:
    if hundreds committed at once, all their servers would be paused until the last call.

    A lane waits for a turn before it pauses its server, and ends it while the engine loads. After
    the load it takes a turn without waiting; lanes that want to begin wait for it.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._began: dict[str, float] = {}

    def wait(self, url: str) -> None:
        """Wait for a turn, and begin it. A commit has two, before and after the load, so each
        earlier lane delays this one by 2 * TURN_S / AT_WORK seconds at most."""
        with self._changed:
            while len(self._at_work()) >= AT_WORK:
                self._changed.wait(min(self._began.values()) + TURN_S - time.monotonic())
            self._began[url] = time.monotonic()

    def go_on(self, url: str) -> None:
        """Begin a turn at once: the server is paused. Never waits."""
        with self._changed:
            self._began[url] = time.monotonic()

    def end(self, url: str) -> None:
        """End the lane's turn. Idempotent; never waits."""
        with self._changed:
            self._began.pop(url, None)
            self._changed.notify()

    def _at_work(self) -> dict[str, float]:
        since = time.monotonic() - TURN_S
        self._began = {url: began for url, began in self._began.items() if began > since}
        return self._began
