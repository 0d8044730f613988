"""TCP connections of this process to another one of this host, cut; free ports; certificates; a
process that may open no more files."""

import os
import random
import resource
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
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


PORTS = 12_000
"""Ports that ``free_port`` chooses from."""


def free_port() -> int:
    """A port that is free now. The kernel gives it to no connection meanwhile: it is below those
    that it chooses from itself, unless these begin too low."""
    lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    below = range(lowest - PORTS, lowest) if lowest > PORTS + 1024 else (0,)
    while True:
        with suppress(OSError), socket.socket() as probe:
            # Another process chooses otherwise, also where a test has set the common generator.
            probe.bind(("127.0.0.1", random.SystemRandom().choice(below)))
            return int(probe.getsockname()[1])


CURVE = "ec_paramgen_curve:prime256v1"
MAKE = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", CURVE, "-nodes", "-days", "2"]


def certificate(folder: Path, name: str) -> tuple[str, str]:
    """Paths of a new certificate and its key, made by openssl as a user makes them."""
    pem, key = str(folder / f"{name}.pem"), str(folder / f"{name}.key")
    files = ["-subj", f"/CN={name}", "-keyout", key, "-out", pem]
    subprocess.run([*MAKE, *files], check=True, capture_output=True, timeout=60)
    return pem, key


@contextmanager
def descriptors_left(count: int) -> Iterator[None]:
    """This process may open so many further files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = [os.dup(0) for _ in range(count + 1)]  # the lowest ones
    for fd in free:
        os.close(fd)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free[-1], hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
