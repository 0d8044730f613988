"""Threads for lanes that have something to do: an idle lane has none.

One thread waits for all idle lanes of a process, until something wakes one (a new image, the end of
its connection, a stop) or its time comes. Each lane that works has a thread of its own: a server
that stands still holds up no other lane.
"""

import logging
import math
import threading
import time
from typing import Protocol

REST_S = 1.0
"""Back-off where a thread cannot be started, in seconds."""

log = logging.getLogger(__name__)


class Workable(Protocol):
    """What has work now and then: a lane."""

    url: str

    def work(self) -> float | None:
        """Work until there is nothing to do; when to call again at the latest (monotonic clock), or
        None: never."""


class LaneThreads:
    """Calls ``work`` of each lane on a thread, one call at a time."""

    def __init__(self) -> None:
        """The waiting thread starts with the first ``wake``."""
        self._changed = threading.Condition()
        self._due: dict[Workable, float] = {}
        """When each lane is to work; a lane that works already does so again afterwards."""
        self._working: set[Workable] = set()
        self._thread: threading.Thread | None = None
        self._closing = False

    def wake(self, lane: Workable) -> None:
        """Have the lane work now, or again if it works. Any thread; never waits."""
        with self._changed:
            self._due[lane] = -math.inf
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="lanes", daemon=True)
                self._thread.start()
            self._changed.notify()

    def close(self) -> None:
        """Call no lane any more. Idempotent; does not wait for those that work."""
        with self._changed:
            self._closing = True
            self._changed.notify()

    def _run(self) -> None:
        """Thread: the idle lanes."""
        while True:
            with self._changed:
                while not (ready := self._take()) and not self._closing:
                    idle = [due for lane, due in self._due.items() if lane not in self._working]
                    # no deadline without idle lanes: wake(), a lane that has worked, and close()
                    # notify
                    self._changed.wait(max(0.0, min(idle) - time.monotonic()) if idle else None)
                if self._closing:
                    return
            for lane in ready:
                name = f"lane {lane.url}"
                thread = threading.Thread(target=self._work, args=(lane,), name=name, daemon=True)
                try:
                    thread.start()
                except RuntimeError as error:  # the system has no further thread for us now
                    log.warning("%s waits for a thread: %s", name, error)
                    self._worked(lane, time.monotonic() + REST_S)

    def _take(self) -> list[Workable]:
        """Under the lock: the lanes whose time has come; they work from now on."""
        now = time.monotonic()
        ready = [
            lane for lane, due in self._due.items() if due <= now and lane not in self._working
        ]
        for lane in ready:
            del self._due[lane]
        self._working.update(ready)
        return ready

    def _work(self, lane: Workable) -> None:
        """Thread: one lane, until it is idle."""
        self._worked(lane, lane.work())

    def _worked(self, lane: Workable, again: float | None) -> None:
        with self._changed:
            self._working.discard(lane)
            if again is None:
                self._due.pop(lane, None)
            else:
                self._due[lane] = min(again, self._due.get(lane, math.inf))
            self._changed.notify()
