"""Lines for people among the output of a training run, and why it failed.

torchtitan, torch and torchrun write pages to the same streams. What we say ourselves carries a
mark, so that a command that runs torchrun can show that and leave the rest to the log file.
"""

import re
import sys
from dataclasses import dataclass

MARK = "titan-grpo| "
"""Before a line that a person wants to see while the run goes on."""

ERROR = "titan-grpo: "
"""Before the one line that says why a rank ended."""

_EXCEPTION = re.compile(r"^(?:\[rank\d+\]:\s*)?((?:\w+\.)*\w*(?:Error|Exception)(?::.*)?)$")
_EXITCODE = re.compile(r"failed \(exitcode: (-?\d+)\)")
_REPORT = "ChildFailedError"
_CONSEQUENCE = re.compile(
    r"Connection (closed|reset)|Broken pipe|gloo|NCCL|DistNetworkError|DistStoreError"
)
"""What the other ranks say when one has ended."""


def say(text: str) -> None:
    """Show lines to whoever watches the run. One write per line: other processes write to the same
    pipe."""
    for line in text.splitlines():
        sys.stderr.write(f"{MARK}{line}\n")
    sys.stderr.flush()


def complain(text: str) -> None:
    """Say why this rank ends: the first line carries the mark, further ones (a server's log, say)
    follow it."""
    sys.stderr.write(f"{ERROR}{text}\n")
    sys.stderr.flush()


def shown(line: str) -> str | None:
    """The line without its mark if it is for people, else None.

    >>> shown("titan-grpo| step 1/6"), shown("[titan] - INFO - step 1")
    ('step 1/6', None)
    """
    return line.removeprefix(MARK).rstrip() if line.startswith(MARK) else None


@dataclass
class Cause:
    """Why a run failed, found while its output passes by: ``see`` every line, then ask ``text``."""

    exitcode: int | None = None
    """Exit code of the rank that failed first, as torchrun reports it; negative: the signal that
    ended it."""

    _complaint: str = ""
    _exception: str = ""
    _consequence: str = ""

    def see(self, line: str) -> None:
        """Take one line of output into account."""
        if line.startswith(ERROR):
            # The first rank that complains is the cause; the others lose their connection to it.
            self._complaint = self._complaint or line.removeprefix(ERROR).strip()
        elif (found := _EXITCODE.search(line)) and self.exitcode is None:
            self.exitcode = int(found.group(1))
        elif (found := _EXCEPTION.match(line.rstrip())) and _REPORT not in line:
            if _CONSEQUENCE.search(line):
                self._consequence = found.group(1)
            else:
                self._exception = found.group(1)

    @property
    def text(self) -> str:
        """One line; what the rank said itself, else an exception, else the signal that ended it."""
        said = self._complaint or self._exception or self._consequence
        if said:
            return said
        if self.exitcode is not None and self.exitcode < 0:
            return f"a rank was ended by signal {-self.exitcode}" + (
                " (out of memory, maybe)" if self.exitcode == -9 else ""
            )
        return "no rank said why"
