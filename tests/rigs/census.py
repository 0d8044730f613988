"""What processes hold and do, read from /proc: memory, descriptors, threads, shared memory,
children, wakes. Linux only."""

import os
from collections.abc import Container, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

PROC = Path("/proc")
KIB = 1024


@dataclass(frozen=True, slots=True)
class Holdings:
    """What one process holds. ``rss`` and ``pss`` in bytes: ``pss`` counts a page that n processes
    map as 1/n of one."""

    rss: int
    pss: int
    anonymous: int
    """Bytes that are its alone and no file's."""
    shared: int
    """Bytes of shared memory (memfds) that it maps and has touched."""
    fds: int
    memfds: int
    threads: int


def _lines(path: Path) -> dict[str, str]:
    return dict(line.split(":", 1) for line in path.read_text().splitlines() if ":" in line)


def _bytes(lines: dict[str, str], key: str) -> int:
    return int(lines[key].split()[0]) * KIB


def holdings(pid: int) -> Holdings | None:
    """What process ``pid`` holds now; None if it is gone."""
    try:
        status = _lines(PROC / str(pid) / "status")
        rollup = _lines(PROC / str(pid) / "smaps_rollup")
        links = list(_links(pid))
        return Holdings(
            rss=_bytes(status, "VmRSS"),
            pss=_bytes(rollup, "Pss"),
            anonymous=_bytes(status, "RssAnon"),
            shared=_bytes(status, "RssShmem"),
            fds=len(links),
            memfds=sum(link.startswith("/memfd:") for link in links),
            threads=int(status["Threads"]),
        )
    except (OSError, KeyError):
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
                count += int(_lines(Path(task.path, "status"))["voluntary_ctxt_switches"])
    return count


def parents() -> dict[int, int]:
    """Process id -> parent's process id, of all processes that are no zombies."""
    out = {}
    for entry in os.scandir(PROC):
        if entry.name.isdigit():
            with suppress(OSError):
                # the command, in parentheses, may contain blanks and parentheses
                fields = Path(entry.path, "stat").read_text().rpartition(")")[2].split()
                if fields[0] != "Z":
                    out[int(entry.name)] = int(fields[1])
    return out


def children(pid: int) -> list[int]:
    """Process ids of the living children of ``pid``."""
    return sorted(child for child, parent in parents().items() if parent == pid)


def descendants(pid: int) -> list[int]:
    """Process ids of the living children of ``pid``, their children, and so on."""
    known, found, ahead = parents(), [], [pid]
    while ahead:
        one = ahead.pop()
        below = [child for child, parent in known.items() if parent == one]
        found += below
        ahead += below
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
    """Names in /dev/shm."""
    with suppress(OSError):
        return {entry.name for entry in os.scandir("/dev/shm")}
    return set()
