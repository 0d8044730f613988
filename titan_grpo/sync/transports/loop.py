"""A thread that waits in a selector: for sockets, and for what other threads give it to do."""

import os
import selectors
import threading
from collections.abc import Callable
from typing import Any


def _nothing() -> None:
    """No deadline, and nothing to do."""


class Loop:
    """One such thread. It sleeps while nothing comes and nothing is to be done."""

    def __init__(
        self,
        name: str,
        ready: Callable[[Any], object],
        tidy: Callable[[], float | None] = _nothing,
        at_end: Callable[[], object] = _nothing,
    ) -> None:
        """Start it. On it, ``ready`` is called with the data of a socket in ``selector`` that is
        ready; ``tidy`` before each wait, for the longest time of the wait in seconds; ``at_end``
        last. OSError or RuntimeError where the system has no further descriptor or thread now."""
        self.selector: selectors.BaseSelector = selectors.DefaultSelector()
        """The thread's own, with data of each socket that is not None."""
        self._ready, self._tidy, self._at_end = ready, tidy, at_end
        self._lock = threading.Lock()
        self._todo: dict[tuple[Any, ...], None] = {}
        self._stopping = self._ended = False
        self._bell = -1
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        try:
            self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
            self.selector.register(self._bell, selectors.EVENT_READ)
            self._thread.start()
        except (OSError, RuntimeError):
            self._close()
            raise

    def soon(self, work: Callable[..., object], *about: Any) -> None:
        """Have the thread call ``work``, after all that it was given before. Once, where it has not
        called it since the last time. Never waits. Nothing happens once the thread has ended."""
        task = (work, *about)
        with self._lock:
            if self._ended:
                return
            silent = not self._todo
            self._todo.pop(task, None)
            self._todo[task] = None
            if silent:  # else the thread has yet to hear the bell
                os.eventfd_write(self._bell, 1)

    def close(self, timeout_s: float) -> None:
        """End the thread; it has ``timeout_s`` seconds. Idempotent."""
        self.soon(self._stop)
        self._thread.join(timeout_s)

    def _stop(self) -> None:
        self._stopping = True

    def _run(self) -> None:
        while not self._stopping:
            # no deadline: where tidy() names none; a socket that is ready and soon() end it, and
            # the thread is a daemon
            ready = [entry.data for entry, _ in self.selector.select(self._tidy())]
            for data in ready:
                if data is not None:
                    self._ready(data)
            # Last: what is to be done may close a socket that was ready too.
            if None in ready:
                self._do()
        self._at_end()
        self._close()

    def _do(self) -> None:
        os.eventfd_read(self._bell)  # before the list is taken: what is added after rings again
        with self._lock:
            todo, self._todo = self._todo, {}
        for work, *about in todo:
            work(*about)

    def _close(self) -> None:
        with self._lock:  # soon() rings an open bell or none
            self._ended = True
            if self._bell >= 0:
                os.close(self._bell)
        self.selector.close()
