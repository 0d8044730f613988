"""Status lines of a training run: its steps, what its start waits for, and why it failed.

torchtitan, torch and torchrun write a lot to the same streams. Our lines carry a mark, so that a
command that runs torchrun can show them and leave the rest to the log file.
"""

import os
import re
import shlex
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from titan_grpo.subprocesses import how_ended

MARK = "titan-grpo| "
"""Start of a status line."""

ERROR = "titan-grpo: "
"""Start of the one line that names why a rank ended."""

_EXCEPTION = re.compile(r"^(?:\[rank\d+\]:\s*)?((?:\w+\.)*\w*(?:Error|Exception)(?::.*)?)$")
_EXITCODE = re.compile(r"failed \(exitcode: (-?\d+)\)")
_REPORT = "ChildFailedError"
_CONSEQUENCE = re.compile(
    r"Connection (closed|reset)|Broken pipe|gloo|NCCL|DistNetworkError|DistStoreError"
)
"""Errors of the other ranks after one has ended."""


def is_consequence(error: str) -> bool:
    """Return whether this is what a rank says of a collective after another one has ended. Pure."""
    return bool(_CONSEQUENCE.search(error))


def next_command(*words: str) -> str:
    """Return the line that names the next command, ready for a shell: with the path of titan-grpo
    if it is not on PATH (environment not activated), and with paths quoted.

    Example: "report", "outputs/my run" -> "next: .venv/bin/titan-grpo report 'outputs/my run'".
    """
    there = os.path.join(os.path.dirname(sys.executable), "titan-grpo")
    found = shutil.which("titan-grpo") or not os.path.exists(there)
    return f"next: {'titan-grpo' if found else os.path.relpath(there)} {shlex.join(words)}"


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return rows of cells as lines with columns two spaces apart."""
    widths = [max(map(len, cells)) for cells in zip(*rows, strict=True)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]


def print_status(text: str) -> None:
    """Print marked lines, one write each, since other processes write to the same pipe."""
    _print([f"{MARK}{line}\n" for line in text.splitlines()])


def print_error(text: str) -> None:
    """Print why this rank ends. Only the first line carries the mark (a log may follow)."""
    _print([f"{ERROR}{text}\n"])


def _print(lines: Sequence[str]) -> None:
    # What takes stderr may fail: a disk is full, a reader was killed. That must end neither the run
    # nor, silently, a thread that says what it does.
    with suppress(OSError):
        for line in lines:
            sys.stderr.write(line)
        sys.stderr.flush()


def status_of(line: str) -> str | None:
    """Return the line without its mark; None if it has none.

    >>> status_of("titan-grpo| step 1/6"), status_of("[titan] - INFO - step 1")
    ('step 1/6', None)
    """
    return line.removeprefix(MARK).rstrip() if line.startswith(MARK) else None


@dataclass
class Cause:
    """Why a run failed: ``read`` every line of its output, then take ``text``."""

    exitcode: int | None = None
    """Exit code of the rank that failed first, as torchrun reports it; negative: the signal that
    ended it."""
    _error: str = ""
    _exception: str = ""
    _consequence: str = ""

    def read(self, line: str) -> None:
        if line.startswith(ERROR):
            # The first rank's error is the cause; the others lose their connection to it.
            self._error = self._error or line.removeprefix(ERROR).strip()
        elif (found := _EXITCODE.search(line)) and self.exitcode is None:
            self.exitcode = int(found.group(1))
        elif (found := _EXCEPTION.match(line.rstrip())) and _REPORT not in line:
            if is_consequence(line):
                self._consequence = found.group(1)
            else:
                self._exception = found.group(1)

    @property
    def text(self) -> str:
        """One line: the rank's own error, else an exception, else the signal that ended it."""
        if reason := self._error or self._exception or self._consequence:
            return reason
        if self.exitcode is not None and self.exitcode < 0:
            return f"a rank was ended by {how_ended(self.exitcode)}"
        return "no rank gave a reason"


EVERY_S = 10.0
BAR = 20


def waiting_line(what: str, passed_s: float, deadline_s: float | None) -> str:
    """Return the status line of a wait that began ``passed_s`` ago; its bar is the used share of
    the deadline. Pure.

    >>> waiting_line("the first commit", 30, 120)
    'waiting for the first commit: 30 s of at most 120 s [#####...............]'
    """
    line = f"waiting for {what}: {passed_s:.0f} s"
    if deadline_s is None:
        return line
    done = min(BAR, int(BAR * passed_s / deadline_s))
    return f"{line} of at most {deadline_s:.0f} s [{'#' * done}{'.' * (BAR - done)}]"


@contextmanager
def waiting(
    what: str,
    deadline_s: float | None = None,
    say: Callable[[str], None] = print_status,
    every_s: float = EVERY_S,
    why: Callable[[], str] = str,
) -> Iterator[None]:
    """Print what the body waits for: at its start, then every ``every_s`` seconds until it ends,
    with what ``why`` returns then, if anything.

    The lines come from a thread, because the body may be one blocking call.
    """
    began, over = time.monotonic(), threading.Event()
    say(f"waiting for {what}")

    def repeat() -> None:
        while not over.wait(every_s):
            line = waiting_line(what, time.monotonic() - began, deadline_s)
            say("; ".join(filter(None, (line, why()))))

    thread = threading.Thread(target=repeat, name="waiting", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(every_s)
