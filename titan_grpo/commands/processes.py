"""Helpers of commands that run torchrun as a subprocess: its end, its status lines, recipes, and
checks of what options name."""

import argparse
import io
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from titan_grpo.errors import ConfigError, StorageError, TitanGrpoError
from titan_grpo.observe import terminal
from titan_grpo.subprocesses import ENDING, Guarded

GRACE_S = 20.0
"""Seconds between SIGTERM and SIGKILL, for the trainer to end rollouts, lanes and servers."""

CONFIG_EXIT = 2
"""Exit code of a rank that refused its configuration."""


class TrainingFailed(TitanGrpoError):
    """torchrun failed; the message has the cause and the log file."""


def torchrun(
    nproc: int,
    config_file: str,
    arguments: Sequence[str],
    module: Sequence[str] = ("titan_grpo.train",),
) -> list[str]:
    """Return the command line of a training run on this host, on a port that torchrun chooses.
    ``module``: the trainer's module, with its own arguments."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    job = ["--job.config_file", config_file, *arguments]
    return [*launcher, f"--nproc_per_node={nproc}", "-m", *module, *job]


def run_logged(
    command: Sequence[str],
    log: Path,
    env: Mapping[str, str],
    show: Callable[[str], None] | None,
) -> None:
    """Run a command whose process tree ends with this process. All output goes into ``log``, status
    lines also to ``show``.

    Raises ConfigError if it (for torchrun: a rank) exits with 2, TrainingFailed if it fails
    otherwise, and StorageError if the log cannot be written; all messages are one line. On any
    exception here, such as Ctrl-C, the command is ended first.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    cause = terminal.Cause()
    # Unbuffered: what a full disk refused would be written, and refused, once more at the end.
    with log.open("wb", buffering=0) as file:
        guarded = Guarded(command, env, GRACE_S, stdout=subprocess.PIPE)
        assert guarded.guard.stdout is not None
        output = io.TextIOWrapper(guarded.guard.stdout, errors="replace")

        def pump() -> None:
            for line in output:
                try:
                    file.write(line.encode())
                except OSError as error:
                    raise StorageError(
                        f"the log {log} must be writable, got {error.strerror}, so the run was"
                        " ended: free space there, or name another folder (--out)"
                    ) from error
                cause.read(line)
                text = terminal.status_of(line)
                if show is not None and text is not None:
                    show(text)

        with output:
            try:
                pump()
                # no deadline: training may take any time, and Ctrl-C ends it.
                guarded.guard.wait()
            finally:
                guarded.stop()
                # The pipe may still hold a stopped run's table. All writers have ended, so this
                # returns.
                pump()
    status = guarded.guard.returncode
    if status == CONFIG_EXIT or cause.exitcode == CONFIG_EXIT:
        raise ConfigError(cause.text)
    if status != 0:
        raise TrainingFailed(f"{cause.text} (exit code {status}; all output is in {log})")


def new_folder(out: str, kind: str) -> Path:
    """Return the folder of a run's evidence: ``out``, or if that is empty one by time and process
    (a run that starts in the same second has another one). Raises ConfigError if it is not new."""
    own = f"outputs/{kind}-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    folder = Path(out or own)
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"--out must be a new directory, {folder} is a file: name another")
    if folder.exists() and any(folder.iterdir()):
        raise ConfigError(
            f"--out must be a new directory, {folder} has files in it: remove it or name another"
        )
    return folder


def print_progress(text: str) -> None:
    """Print a progress line at once, to stderr: stdout has the command's result."""
    print(text, file=sys.stderr, flush=True)


def stop_on_signals() -> None:
    """Make the first signal that ends a job raise KeyboardInterrupt, as Ctrl-C does, so that
    ``finally`` blocks run, and ignore those after it, which would interrupt these blocks. Signals
    that are ignored already, as under nohup, stay so."""

    def stop(*_: object) -> None:
        for each in handled:
            signal.signal(each, signal.SIG_IGN)
        raise KeyboardInterrupt

    handled = [each for each in ENDING if signal.getsignal(each) is not signal.SIG_IGN]
    if threading.current_thread() is threading.main_thread():
        for each in handled:
            signal.signal(each, stop)


def in_foreground(command: Callable[[], int]) -> int:
    """Run a command that starts processes; return 130 if a signal ends it (see
    ``stop_on_signals``)."""
    stop_on_signals()
    try:
        return command()
    except KeyboardInterrupt:
        print("\nstopped; every process that was started has ended", file=sys.stderr)
        return 130


ROOT = Path(__file__).resolve().parents[2]
"""Root of the checkout; site-packages if installed from a wheel."""

RECIPES = ROOT / "titan_grpo" / "titan" / "recipes"

TITLES = {"vllm": "vLLM", "sglang": "SGLang"}


def in_checkout() -> bool:
    """Return whether scripts/setup.sh, which makes the engines' environments, is there."""
    return (ROOT / "scripts" / "setup.sh").is_file()


def engine_python(engine: str) -> str:
    """Return an engine's interpreter as scripts/setup.sh makes it; "" without a checkout."""
    return str(ROOT / f".venv-{engine}/bin/python") if in_checkout() else ""


def add_tiny_run(
    parser: argparse.ArgumentParser, recipe: str, steps: int, models: Sequence[str]
) -> None:
    """Add the options of a command that trains a tiny model on servers that it starts."""
    add = parser.add_argument
    add("--steps", type=int, default=steps, help=f"training steps of a run (default {steps})")
    add("--nproc", type=int, default=2, help="trainer ranks (default 2)")
    add("--model", default=models[0], choices=models, help=f"tiny model (default {models[0]})")
    for engine, title in TITLES.items():
        python = engine_python(engine)
        add(f"--{engine}-python", default=python, help=f"interpreter of {title}'s environment")
    add("--config", default=str(RECIPES / recipe), help="recipe of the job, a TOML file")


def tiny_run(
    options: argparse.Namespace,
    folder: Path,
    servers: Sequence[str],
    arguments: Sequence[str],
    module: Sequence[str] = ("titan_grpo.train",),
) -> tuple[Any, list[str]]:
    """Return the job of such a command, and the command line of its training run (see
    ``torchrun``) on the model in ``options.out``. ``arguments`` are the job's, as
    ``options.rest``. Raises ConfigError for mistakes in them."""
    # Imported here, so that --help does not load torch.
    from titan_grpo.titan import jobconfig
    from titan_grpo.titan.flavors import FLAVORS

    name, flavor = FLAVORS[options.model]
    settings = {
        "--rollout.servers": ",".join(servers),
        "--job.dump_folder": str(folder),
        "--model.hf_assets_path": str(options.out / "model"),
        "--model.name": name,
        "--model.flavor": flavor,
        "--training.steps": str(options.steps),
    }
    whole = [text for pair in settings.items() for text in pair]
    whole += [*arguments, *options.rest]
    job = jobconfig.parse(["--job.config_file", options.config, *whole], options.nproc)
    return job, torchrun(options.nproc, options.config, whole, module)


def require_file(option: str, path: Path) -> None:
    """Raise ConfigError if an option names no file that can be written whole (write_whole).
    Checked before a long run, whose figures would be lost."""
    rule = f"{option} must be a file that can be written, got {str(path)!r}"
    if path.exists() and not path.is_file():
        raise ConfigError(f"{rule}: the file would replace this device, pipe or folder")
    folder = path.resolve().parent
    if not folder.is_dir():
        raise ConfigError(f"{rule}: there is no folder {str(path.parent)!r}; make it")
    if not os.access(folder, os.W_OK):
        raise ConfigError(f"{rule}: this user may not write there; name another place")


def require_python(engine: str, path: str) -> None:
    """Raise ConfigError, with a remedy, if an engine's interpreter is no file."""
    if Path(path).is_file():
        return
    key, title = f"--{engine}-python", TITLES[engine]
    if in_checkout():
        raise ConfigError(f"{key} must be an interpreter, {path} is no file: run scripts/setup.sh")
    what = f"{path} is no file" if path else "none is named"
    raise ConfigError(
        f"{key} must be the interpreter of an environment with {title} and titan_grpo, {what}: make"
        f" one (python -m venv {engine}-env; {engine}-env/bin/pip install 'titan_grpo[{engine}]';"
        f" without a GPU as scripts/setup.sh of a checkout does), then {key}"
        f" {engine}-env/bin/python"
    )
