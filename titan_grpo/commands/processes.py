"""Running torchrun as a child that never outlives us, and showing of its output what people want to see."""

import os
import re
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from titan_grpo.errors import TitanGrpoError

GRACE_S = 20.0
"""Between SIGTERM and SIGKILL: the trainer stops its rollout process, its lanes and its servers in that time."""

NOISE = re.compile(
    r"\[titan\]|WARNING:|UserWarning|warnings\.warn|^\s*$|^W\d{4} |NOTE: Redirects|^\*{10,}|Setting OMP_NUM_THREADS"
)
"""Lines of torchtitan's and torch's logs; they are in the log file."""


class TrainingFailed(TitanGrpoError):
    """torchrun ended with an error; the message has the end of its output."""


def torchrun(nproc: int, config_file: str, arguments: Sequence[str]) -> list[str]:
    """Command line of a training run on this host, on a port that torchrun finds itself."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={nproc}"]
    return [*launcher, "-m", "titan_grpo.train", "--job.config_file", config_file, *arguments]


def run_logged(command: Sequence[str], log: Path, env: Mapping[str, str], show: Callable[[str], None] | None = print) -> None:
    """Run a command in a process group of its own, everything into ``log``, the interesting lines to ``show``.

    Raises TrainingFailed with the last lines if it fails. On any exception here (Ctrl-C, say) the group is ended first.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    tail: deque[str] = deque(maxlen=25)
    with log.open("w") as file:
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            text=True,
            env=dict(env),
            start_new_session=True,
        )
        try:
            assert process.stdout is not None
            for line in process.stdout:
                file.write(line)
                file.flush()
                tail.append(line.rstrip())
                if show is not None and not NOISE.search(line):
                    show(line.rstrip())
            process.wait()
        finally:
            end_group(process)
    if process.returncode != 0:
        last = "\n".join(tail)
        raise TrainingFailed(
            f"training ended with exit code {process.returncode}; the whole output is in {log}, its end:\n{last}"
        )


def end_group(process: "subprocess.Popen[str]") -> None:
    """End a process and its group: SIGTERM, then SIGKILL after the grace. Idempotent."""
    for number, wait_s in ((signal.SIGTERM, GRACE_S), (signal.SIGKILL, 5.0)):
        if process.poll() is None:
            _signal_group(process.pid, number)
            try:
                process.wait(wait_s)
            except subprocess.TimeoutExpired:
                continue
    # Children that outlived their torchrun agent (it was killed, say).
    _signal_group(process.pid, signal.SIGKILL)


def _signal_group(group: int, number: int) -> None:
    try:
        os.killpg(group, number)
    except ProcessLookupError:
        return


def stop_on_sigterm() -> None:
    """Let SIGTERM end a command the way Ctrl-C does, so that its ``finally`` blocks run."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, lambda *_: (_ for _ in ()).throw(KeyboardInterrupt()))
