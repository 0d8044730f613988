"""What processes hold and do, read from /proc: memory, descriptors, threads, shared memory,
children, wakes. Linux only."""

import os
from collections.abc import Container, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

PROC = Path("/proc")


@dataclass(frozen=True, slots=True)
class Holdings:
    """What one process holds. ``rss`` and ``pss`` in bytes: ``pss`` counts a page that n processes
    map as 1/n of one."""

    rss: int
    pss: int
    fds: int
    memfds: int
    threads: int


def holdings(pid: int) -> Holdings | None:
    """What process ``pid`` holds now; None if it is gone."""
    try:
        process = psutil.Process(pid)
        memory, links = process.memory_full_info(), list(_links(pid))
        memfds = sum(link.startswith("/memfd:") for link in links)
        return Holdings(memory.rss, memory.pss, len(links), memfds, process.num_threads())
    except (OSError, psutil.Error):
        return None  # it ended while it was read


def _links(pid: int) -> Iterator[str]:
    for entry in os.scandir(PROC / str(pid) / "fd"):
        with suppress(OSError):  # closed while it was read
            yield os.readlink(entry.path)


def wakes(pid: int, threads: Container[int] | None = None) -> int:
    """How often all threads of process ``pid``, or those, went to sleep up to now."""
    count = 0
    for task in os.scandir(PROC / str(pid) / "task"):
        if threads is None or int(task.name) in threads:
            with suppress(OSError):  # it ended while it was read
                status = Path(task.path, "status").read_text()
                count += int(status.partition("\nvoluntary_ctxt_switches:")[2].split()[0])
    return count


def children(pid: int) -> list[int]:
    """Process ids of the living children of ``pid``."""
    return _below(pid, recursive=False)


def descendants(pid: int) -> list[int]:
    """Process ids of the living children of ``pid``, their children, and so on."""
    return _below(pid, recursive=True)


def _below(pid: int, recursive: bool) -> list[int]:
    found = []
    with suppress(psutil.NoSuchProcess):
        for process in psutil.Process(pid).children(recursive):
            with suppress(psutil.NoSuchProcess):
                if process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process.pid)
    return sorted(found)


def in_group(group: int) -> list[psutil.Process]:
    """The processes of a group that have not ended."""
    found = []
    for process in psutil.process_iter():
        with suppress(ProcessLookupError, psutil.NoSuchProcess):
            if os.getpgid(process.pid) == group and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def cpu_seconds(group: int) -> float:
    """Processor seconds of all processes of a group, up to now."""
    total = 0.0
    for process in in_group(group):
        with suppress(psutil.NoSuchProcess):
            total += sum(process.cpu_times()[:2])
    return total


def shm_of(pid: int) -> set[str]:
    """Names in /dev/shm of what process ``pid`` maps or holds open."""
    prefix = "/dev/shm/"
    with suppress(OSError):
        maps = (PROC / str(pid) / "maps").read_text().splitlines()
        paths = [line.partition(prefix)[2] for line in maps if prefix in line]
        paths += [link.removeprefix(prefix) for link in _links(pid) if link.startswith(prefix)]
        return {path.removesuffix(" (deleted)") for path in paths}
    return set()


def shm_entries() -> set[str]:
    with suppress(OSError):
        return {entry.name for entry in os.scandir("/dev/shm")}
    return set()
