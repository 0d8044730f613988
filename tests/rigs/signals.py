"""Signals to processes that a test stops, wakes or kills."""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from types import FrameType
from typing import Any

STOP_S = 60.0
"""Deadline of a stop, in seconds: a thread of a nice process may wait so long for a core."""


def send(pid: int | None, number: int) -> None:
    """Signal a process that may be gone. After SIGSTOP return when none of its threads runs.

    The kernel stops a process when the thread that it chose for the signal runs next. Until then
    the others go on, for as long as that one waits for a core.
    """
    if pid is None:
        return
    with suppress(ProcessLookupError):
        os.kill(pid, number)
    if number == signal.SIGSTOP:
        deadline, pause = time.monotonic() + STOP_S, threading.Event()
        while _runs(pid):
            assert time.monotonic() < deadline, f"process {pid} was not stopped"
            pause.wait(0.001)


@contextmanager
def signal_at(function: Callable[..., Any], line: int) -> Iterator[None]:
    """Have SIGTERM come to this process before the main thread runs the ``line``-th line (from 0)
    in ``function``."""
    lines, before = count(), sys.gettrace()

    def at(frame: FrameType, event: str, _: Any) -> Any:
        if frame.f_code is not function.__code__:
            return None
        if event == "line" and next(lines) == line:
            signal.raise_signal(signal.SIGTERM)
        return at

    sys.settrace(at)
    try:
        yield
    finally:
        sys.settrace(before)


def _runs(pid: int) -> bool:
    """Whether a thread of the process is neither stopped nor at its end."""
    with suppress(FileNotFoundError, ProcessLookupError):  # it, or a thread, ended meanwhile
        texts = [path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/stat")]
        # The state is behind the name, which may have brackets itself.
        return any(text.rpartition(")")[2].split()[0] not in "TtZX" for text in texts)
    return Path(f"/proc/{pid}").exists()
