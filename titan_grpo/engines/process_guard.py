"""A process between us and a launched server, so that no server outlives who started it.

``python -m titan_grpo.engines.process_guard --fd N --grace SECONDS -- COMMAND...`` starts COMMAND
in a process group of its own and writes its pid to the socket N. When the other end of that socket
closes, in whatever way its owner died, or SIGTERM comes, the whole group gets SIGTERM and, after
the grace, SIGKILL. PR_SET_PDEATHSIG alone would not do: it is tied to the *thread* that forked, and
it reaches only the leader, not the engine processes below it.

What the group then leaves in /dev/shm is removed: SGLang's schedulers leave 25 MB each at tensor
parallel 2, and containers often have 64."""

import argparse
import ctypes
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

PR_SET_PDEATHSIG = 1
SHARED = "/dev/shm/"


def _die_with_guard() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def kill_group(group: int, number: int) -> None:
    """Signal a process group that may be gone already."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


def shared_files(of: Callable[[int], bool]) -> set[str]:
    """Paths of the files in /dev/shm that are mapped by a process whose process group ``of`` is
    true for."""
    out: set[str] = set()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with suppress(OSError):
            if of(os.getpgid(int(maps.parent.name))):
                # address, permissions, offset, device, inode, path
                out |= {
                    path
                    for line in maps.read_text().splitlines()
                    if (path := line.split(None, 5)[-1]).startswith(SHARED)
                }
    return out


def main(argv: list[str]) -> int:
    """Run the command under guard; the exit status is the command's (128 + signal if one ended
    it)."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--fd", type=int, required=True)
    parser.add_argument("--grace", type=float, required=True)
    parser.add_argument("command", nargs="+")
    options = parser.parse_args(argv)
    owner = socket.socket(fileno=options.fd)
    wake_read, wake_write = socket.socketpair()
    wake_write.setblocking(False)
    signal.set_wakeup_fd(wake_write.fileno())
    signal.signal(signal.SIGTERM, lambda *_: None)
    child = subprocess.Popen(
        options.command, process_group=0, preexec_fn=_die_with_guard, stdin=subprocess.DEVNULL
    )
    pidfd = os.pidfd_open(child.pid)
    with suppress(OSError):
        owner.sendall(f"{child.pid}\n".encode())
    # no deadline: the end of the owner, a signal, or the end of the child, which is killed after
    # that
    ready, _, _ = select.select([owner.fileno(), wake_read.fileno(), pidfd], [], [])
    left = shared_files(lambda group: group == child.pid)
    if pidfd not in ready:
        kill_group(child.pid, signal.SIGTERM)
        select.select([pidfd], [], [], options.grace)
    # Also after a clean exit of the leader: its engine processes may still be there.
    kill_group(child.pid, signal.SIGKILL)
    # no deadline: the end of the owner, a signal, or the end of the child, which is killed after
    # that
    status = child.wait()
    for path in left - shared_files(lambda group: group != child.pid):
        Path(path).unlink(missing_ok=True)
    return status if status >= 0 else 128 - status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
