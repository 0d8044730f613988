"""Running torchrun as a child that never outlives us, and showing of its output what people want to
see."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from titan_grpo.errors import ConfigError, TitanGrpoError
from titan_grpo.observe import terminal
from titan_grpo.subprocesses import wait_process

GRACE_S = 20.0
"""Between SIGTERM and SIGKILL: the trainer stops its rollout process, its lanes and its servers in
that time."""

CONFIG_EXIT = 2
"""Exit code of a rank whose configuration was refused."""


class TrainingFailed(TitanGrpoError):
    """torchrun ended with an error; the message has its cause and the log file."""


def torchrun(nproc: int, config_file: str, arguments: Sequence[str]) -> list[str]:
    """Command line of a training run on this host, on a port that torchrun finds itself."""
    launcher = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc_per_node={nproc}",
    ]
    return [*launcher, "-m", "titan_grpo.train", "--job.config_file", config_file, *arguments]


def run_logged(
    command: Sequence[str],
    log: Path,
    env: Mapping[str, str],
    show: Callable[[str], None] | None = print,
) -> None:
    """Run a command in a process group of its own, everything into ``log``, the lines for people to
    ``show``.

    Raises ConfigError if it exits with 2 (torchrun: if a rank does), TrainingFailed if it fails
    otherwise; both in one line. On any exception here (Ctrl-C, say) the group is ended first.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    cause = terminal.Cause()
    with log.open("w") as file:
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            text=True,
            errors="replace",
            env=dict(env),
            start_new_session=True,
        )

        def pump() -> None:
            assert process.stdout is not None
            for line in process.stdout:
                file.write(line)
                file.flush()
                cause.read(line)
                text = terminal.status_of(line)
                if show is not None and text is not None:
                    show(text)

        try:
            pump()
            # no deadline: a command in the foreground, which lasts as long as the training; Ctrl-C
            process.wait()
        finally:
            end_group(process)
            # What a stopped run said last (its table) is in the pipe; all writers are gone, so this
            # ends.
            pump()
    if process.returncode == CONFIG_EXIT or cause.exitcode == CONFIG_EXIT:
        raise ConfigError(cause.text)
    if process.returncode != 0:
        raise TrainingFailed(
            f"{cause.text} (exit code {process.returncode}; everything it said is in {log})"
        )


def end_group(process: "subprocess.Popen[str]") -> None:
    """End a process and everything below it: SIGTERM, then SIGKILL after the grace. Idempotent."""
    # Looked up while the parents live: torchrun starts every rank in a session, so in a group, of
    # its own.
    below = descendants(process.pid) if process.poll() is None else []
    for number, wait_s in ((signal.SIGTERM, GRACE_S), (signal.SIGKILL, 5.0)):
        if process.poll() is None:
            _signal_group(process.pid, number)
            try:
                wait_process(process, wait_s)
            except subprocess.TimeoutExpired:
                continue
    _signal_group(process.pid, signal.SIGKILL)
    for pidfd in below:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        os.close(pidfd)


def descendants(pid: int) -> list[int]:
    """A pidfd, which no reuse of pids can mislead, of every process below ``pid``."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            # The name in brackets may hold anything; the parent is the second field after it.
            children.setdefault(int(stat.read_text().rpartition(")")[2].split()[1]), []).append(
                int(stat.parent.name)
            )
    out: list[int] = []
    pending = list(children.get(pid, ()))
    while pending:
        child = pending.pop()
        pending += children.get(child, ())
        with suppress(OSError):
            out.append(os.pidfd_open(child))
    return out


def _signal_group(group: int, number: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(group, number)


def stop_on_sigterm() -> None:
    """Let SIGTERM end a command the way Ctrl-C does, so that its ``finally`` blocks run."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, lambda *_: (_ for _ in ()).throw(KeyboardInterrupt()))
