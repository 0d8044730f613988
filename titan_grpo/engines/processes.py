"""Waiting for a child process: subprocess has no wait with a deadline that does not ask again every 50 ms."""

import os
import select
import subprocess
from contextlib import suppress
from typing import Any


def wait_process(process: "subprocess.Popen[Any]", timeout_s: float) -> int:
    """As ``process.wait(timeout_s)``, asleep until it ends: its exit status, or subprocess.TimeoutExpired.

    Several threads may wait for one process.
    """
    if process.poll() is None and not _ends(process.pid, timeout_s):
        raise subprocess.TimeoutExpired(process.args, timeout_s)
    return process.wait()


def _ends(pid: int, timeout_s: float) -> bool:
    with suppress(ProcessLookupError):  # another thread has met its end
        pidfd = os.pidfd_open(pid)
        try:
            poll = select.poll()
            poll.register(pidfd, select.POLLIN)
            return bool(poll.poll(max(0.0, timeout_s) * 1000.0))
        finally:
            os.close(pidfd)
    return True
