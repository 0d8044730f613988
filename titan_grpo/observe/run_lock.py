"""The lock on a run's folder. Rank 0 holds it while the run lives; readers of the folder ask for it
without taking it.

An open file description lock (fcntl(2)): unlike that of flock(2), it can be asked for, and the
kernel answers, however the process ended and whatever process has its number now.
"""

import errno
import fcntl
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from titan_grpo.errors import ConfigError

LOCK = "run.lock"
"""File that rank 0 locks while it runs. Its text names the host and the process."""

WITHOUT_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)
"""Errors of a file system, or a kernel, that has no such locks."""

FLOCK = "hhqqi0q"
"""struct flock: type, whence, start, length (0: all), process (0 for these locks)."""


_holding: set[int] = set()
"""Descriptors of the locks that this process holds."""


def _let_go() -> None:
    """Close the locks' descriptors: the last one of a process and its forks releases a lock."""
    while _holding:
        os.close(_holding.pop())


# A fork that outlives rank 0 (a task's, a data loader's worker) must not keep the lock.
os.register_at_fork(after_in_child=_let_go)


def _ask(descriptor: int, command: int) -> int:
    """Set (F_OFD_SETLK) or look for (F_OFD_GETLK) an exclusive lock; return the type that the
    kernel answers."""
    wanted = struct.pack(FLOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
    return int(struct.unpack(FLOCK, fcntl.fcntl(descriptor, command, wanted))[0])


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """Lock the dump folder for this run. Raises ConfigError if files cannot be written there or
    another run holds it. The kernel releases the lock however the process ends."""
    try:
        # It may be a link to a folder that is not there yet, which mkdir takes for a file.
        os.makedirs(os.path.realpath(folder), exist_ok=True)
        # os.open closes on exec: a subprocess that outlives the trainer must not keep the lock.
        descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise _unusable(folder, error) from error
    _holding.add(descriptor)
    try:
        _lock(folder, descriptor)
        try:
            # A full disk lets files be created and fails at the first byte. Fixed length: a short
            # name must overwrite all of a longer one.
            os.pwrite(descriptor, f"{_holder():150}\n".encode(), 0)
            os.fsync(descriptor)
        except OSError as error:
            raise _unusable(folder, error) from error
        yield
    finally:
        # not in a fork, which has closed it
        if descriptor in _holding:
            _holding.remove(descriptor)
            os.close(descriptor)


def _holder() -> str:
    text = f"{os.uname().nodename} process {os.getpid()}"
    if os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") == "0":
        return text
    return f"{text} of torchrun {os.getppid()}"


def _of_this_host(holder: str) -> str | None:
    """Return the processes that a lock's text names; None if they are another host's, or none."""
    host, found, processes = holder.partition(" process ")
    return processes if found and host == os.uname().nodename else None


def _lock(folder: Path, descriptor: int) -> None:
    try:
        _ask(descriptor, fcntl.F_OFD_SETLK)
    except BlockingIOError as error:
        holder = os.pread(descriptor, 200, 0).decode(errors="replace").strip()
        raise ConfigError(
            f"job.dump_folder must not be that of a live run, {str(folder)!r} is held by"
            f" {holder or 'another process'}: metrics and checkpoints of the two would be mixed;"
            " stop that run or choose another folder"
        ) from error
    except OSError as error:
        # A file system without locks cannot tell two runs apart; one run must still work there.
        if error.errno not in WITHOUT_LOCKS:
            raise _unusable(folder, error) from error


def _unusable(folder: Path, error: OSError) -> ConfigError:
    return ConfigError(
        "job.dump_folder must be a directory where files can be written, got"
        f" {str(folder)!r}: {error.strerror or error}; make room or choose another folder"
    )


def lives(folder: Path) -> bool | None:
    """Return whether the run of a folder holds its lock; None if unknown: no file, no locks there,
    or another host's run (a network file system may keep locks to one host)."""
    try:
        with (folder / LOCK).open("rb") as file:
            if _ask(file.fileno(), fcntl.F_OFD_GETLK) != fcntl.F_UNLCK:
                return True
            holder = file.read(200).decode(errors="replace")
    except OSError:
        return None
    return None if _of_this_host(holder) is None else False


def restarts(folder: Path) -> bool:
    """Return whether a run that has ended may be started again: it is one of a torchrun with
    --max-restarts, which is still there, on this host."""
    with suppress(OSError):
        processes = _of_this_host((folder / LOCK).read_text(errors="replace")) or ""
        agent = processes.partition(" of torchrun ")[2].strip()
        if agent.isdigit():
            # Any process may have got its number since.
            with open(f"/proc/{agent}/cmdline", "rb") as file:
                command = file.read()
            return b"torchrun" in command or b"torch.distributed" in command
    return False


def boot_id() -> str:
    """Return the identity of this host's last start; empty if it has none."""
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return ""
