"""The dump folder of a run: writable before anything starts, and held by one run at a time."""

import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from titan_grpo.errors import ConfigError

LOCK = "run.lock"
"""File whose lock the trainer on rank 0 holds for as long as it runs."""

_CANNOT_WRITE = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG, errno.EIO)


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """Hold the dump folder for this run. Raises ConfigError if files cannot be written there, or
    another run holds it.

    The kernel releases the lock with the process, however that ends.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # Not inherited by subprocesses (os.open closes on exec): one that outlives the trainer
        # must not keep the lock.
        descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise _unusable(folder, error) from error
    try:
        _lock(folder, descriptor)
        try:
            # A full disk lets files be made and fails at their first byte. One length, so that a
            # short name leaves nothing of a longer one before it.
            holder = f"{os.uname().nodename} process {os.getpid()}"
            os.pwrite(descriptor, f"{holder:120}\n".encode(), 0)
            os.fsync(descriptor)
        except OSError as error:
            raise _unusable(folder, error) from error
        yield
    finally:
        os.close(descriptor)


def _lock(folder: Path, descriptor: int) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        holder = os.pread(descriptor, 200, 0).decode(errors="replace").strip()
        raise ConfigError(
            f"job.dump_folder must not be that of a live run, {str(folder)!r} is held by"
            f" {holder or 'another process'}: metrics and checkpoints of the two would be mixed;"
            " stop that run or choose another folder"
        ) from error
    except OSError as error:
        # A file system without locks cannot tell two runs apart; one run must still work there.
        if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
            raise _unusable(folder, error) from error


def _unusable(folder: Path, error: OSError) -> ConfigError:
    return ConfigError(
        "job.dump_folder must be a directory where files can be written, got"
        f" {str(folder)!r}: {error.strerror or error}; make room or choose another folder"
    )


def write_failure(error: BaseException, folder: Path) -> str:
    """One line if the disk is why ``error`` was raised, also where a library wrapped it; else
    empty."""
    chain: list[Any] = [error]
    for each in chain:
        reason = ""
        if isinstance(each, OSError):
            if each.errno in _CANNOT_WRITE or str(each.filename or "").startswith(str(folder)):
                reason = each.strerror or str(each)
        elif isinstance(each, RuntimeError) and "inline_container" in str(each):
            # torch's zip writer says only this of a short write, and the OSError before it is lost
            # where torch.distributed.checkpoint pickles errors.
            reason = f"torch: {each}"
        if reason:
            return (
                f"a file of the run could not be written under {str(folder)!r} ({reason}), so the"
                " run stopped; make room and start it again: it resumes from its last complete"
                " checkpoint"
            )
        # torch.distributed.checkpoint maps ranks to (error, stack).
        failures = [failure[0] for failure in getattr(each, "failures", {}).values()]
        found = (each.__cause__, each.__context__, *failures)
        chain += [other for other in found if other is not None and other not in chain]
    return ""
