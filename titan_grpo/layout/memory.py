"""Memory that this process may still allocate, by the machine's and the container's limits."""

from pathlib import Path

from titan_grpo.errors import ConfigError

CGROUP_FILES = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)
"""Per cgroup version (v2, v1): limit file, usage file, and the key in memory.stat of memory that
can be reclaimed at once."""


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""  # that file does not exist under this kernel or cgroup version


def _table(text: str) -> dict[str, int]:
    """Parse lines "key[:] number ..." into a dict."""
    rows = (line.replace(":", " ").split() for line in text.splitlines())
    return {row[0]: int(row[1]) for row in rows if len(row) > 1 and row[1].isdigit()}


def _cgroup_folders(proc: Path, cgroup: Path) -> list[Path]:
    """Return every folder whose limit binds this process, its own cgroup's and its parents'."""
    folders = [cgroup, cgroup / "memory"]  # a container often mounts its own cgroup as the root
    for line in _read(proc / "self" / "cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers not in ("", "memory"):
            continue
        root = cgroup / controllers
        parts = [part for part in path.split("/") if part and part != ".."]
        folders += [root.joinpath(*parts[:depth]) for depth in range(1, len(parts) + 1)]
    return folders


def _cgroup_room(folder: Path) -> list[int]:
    room = []
    for limit_file, usage_file, reclaimable in CGROUP_FILES:
        limit, usage = _read(folder / limit_file).strip(), _read(folder / usage_file).strip()
        if limit.isdigit() and usage.isdigit():
            cache = _table(_read(folder / "memory.stat")).get(reclaimable, 0)
            room.append(int(limit) - int(usage) + cache)
    return room


def available_memory(proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the bytes that can be allocated without swapping or being killed: the least of
    MemAvailable and what each cgroup limit leaves. Raises ConfigError if nothing can be read."""
    available = _table(_read(proc / "meminfo")).get("MemAvailable")
    rooms = [] if available is None else [available * 1024]
    for folder in _cgroup_folders(proc, cgroup):
        rooms += _cgroup_room(folder)
    if not rooms:
        raise ConfigError(
            f"the available memory could not be read under {proc} or {cgroup}: titan_grpo needs"
            " Linux"
        )
    return max(0, min(rooms))


MORE = "a machine or container with more memory"


def require_memory(nbytes: int, what: str, use: str = MORE) -> None:
    """Raise ConfigError if ``nbytes`` for ``what`` are not available now. ``use``: the remedy.

    Check before the run: a page without memory is a SIGBUS or the OOM killer in mid-step.
    """
    have = available_memory()
    if nbytes > have:
        raise ConfigError(
            f"{what} needs {nbytes} bytes of host memory ({nbytes / 2**30:.2f} GiB), available are"
            f" {have} ({have / 2**30:.2f} GiB): the process would be killed when it fills them;"
            f" use {use}"
        )
