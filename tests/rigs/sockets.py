"""TCP connections between this process and another one of this host, cut; and a free port."""

import os
import socket
from contextlib import suppress
from pathlib import Path

ESTABLISHED = "01"


def cut(pid: int) -> int:
    """Shut every TCP connection between this process and ``pid``; how many there were."""
    theirs = {local for _, (local, _) in _connections(pid).items()}
    count = 0
    for fd, (_, remote) in _connections(os.getpid()).items():
        if remote in theirs:
            with suppress(OSError), socket.socket(fileno=os.dup(fd)) as end:
                end.shutdown(socket.SHUT_RDWR)
                count += 1
    return count


def _connections(pid: int) -> dict[int, tuple[int, int]]:
    """File descriptor -> (local port, remote port) of a process's TCP connections."""
    ports: dict[str, tuple[int, int]] = {}
    for table in ("tcp", "tcp6"):
        with suppress(OSError):
            for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == ESTABLISHED:
                    ports[fields[9]] = _port(fields[1]), _port(fields[2])
    found = {}
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):
            inode = os.readlink(link).removeprefix("socket:[").removesuffix("]")
            if inode in ports:
                found[int(link.name)] = ports[inode]
    return found


def _port(address: str) -> int:
    return int(address.rpartition(":")[2], 16)


def free_port() -> int:
    """A port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
