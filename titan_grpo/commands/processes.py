"""Run torchrun as a subprocess that ends with the command, and show the lines of its output for
people; find the recipes and the engines' interpreters that it starts."""

import argparse
import io
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from titan_grpo.errors import ConfigError, TitanGrpoError
from titan_grpo.observe import terminal
from titan_grpo.subprocesses import Guarded

GRACE_S = 20.0
"""Seconds between SIGTERM and SIGKILL, in which the trainer ends its rollouts, lanes and
servers."""

CONFIG_EXIT = 2
"""Exit code of a rank whose configuration was refused."""


class TrainingFailed(TitanGrpoError):
    """torchrun ended with an error; the message has its cause and the log file."""


def torchrun(
    nproc: int,
    config_file: str,
    arguments: Sequence[str],
    module: Sequence[str] = ("titan_grpo.train",),
) -> list[str]:
    """Command line of a training run on this host, on a port that torchrun finds itself.
    ``module``: the trainer's, with arguments of its own."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    job = ["--job.config_file", config_file, *arguments]
    return [*launcher, f"--nproc_per_node={nproc}", "-m", *module, *job]


def run_logged(
    command: Sequence[str],
    log: Path,
    env: Mapping[str, str],
    show: Callable[[str], None] | None,
) -> None:
    """Run a command whose whole tree ends with this process. All output goes into ``log``, the
    lines for people to ``show``.

    Raises ConfigError if it exits with 2 (torchrun: if a rank does), TrainingFailed if it fails
    otherwise; both in one line. On any exception here (Ctrl-C, say) the command is ended first.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    cause = terminal.Cause()
    with log.open("w") as file:
        guarded = Guarded(command, env, GRACE_S, stdout=subprocess.PIPE)
        assert guarded.guard.stdout is not None
        output = io.TextIOWrapper(guarded.guard.stdout, errors="replace")

        def pump() -> None:
            for line in output:
                file.write(line)
                file.flush()
                cause.read(line)
                text = terminal.status_of(line)
                if show is not None and text is not None:
                    show(text)

        with output:
            try:
                pump()
                # no deadline: a command in the foreground lasts as long as the training; Ctrl-C
                guarded.guard.wait()
            finally:
                guarded.stop()
                # The table of a stopped run is still in the pipe; all writers are gone, so this
                # ends.
                pump()
    status = guarded.guard.returncode
    if status == CONFIG_EXIT or cause.exitcode == CONFIG_EXIT:
        raise ConfigError(cause.text)
    if status != 0:
        raise TrainingFailed(f"{cause.text} (exit code {status}; all output is in {log})")


def print_progress(text: str) -> None:
    """Print a line at once, where the command's own result does not go."""
    print(text, file=sys.stderr, flush=True)


def stop_on_sigterm() -> None:
    """Let SIGTERM end a command the way Ctrl-C does, so that its ``finally`` blocks run."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, lambda *_: (_ for _ in ()).throw(KeyboardInterrupt()))


def in_foreground(command: Callable[[], int]) -> int:
    """Run a command that starts processes; 130 where SIGTERM or Ctrl-C ends it."""
    stop_on_sigterm()
    try:
        return command()
    except KeyboardInterrupt:
        print("\nstopped; every process that was started has ended", file=sys.stderr)
        return 130


ROOT = Path(__file__).resolve().parents[2]
"""The checkout; site-packages where the package is installed from a wheel."""

RECIPES = ROOT / "titan_grpo" / "titan" / "recipes"

TITLES = {"vllm": "vLLM", "sglang": "SGLang"}


def in_checkout() -> bool:
    """Whether scripts/setup.sh is there, which makes the engines' environments."""
    return (ROOT / "scripts" / "setup.sh").is_file()


def engine_python(engine: str) -> str:
    """Interpreter of an engine's environment, as scripts/setup.sh makes it; empty without a
    checkout."""
    return str(ROOT / f".venv-{engine}/bin/python") if in_checkout() else ""


def add_tiny_run(
    parser: argparse.ArgumentParser, recipe: str, steps: int, models: Sequence[str]
) -> None:
    """Add the options of a command that trains a tiny model beside servers that it starts."""
    add = parser.add_argument
    add("--steps", type=int, default=steps, help=f"training steps of a run (default {steps})")
    add("--nproc", type=int, default=2, help="trainer ranks (default 2)")
    add("--model", default=models[0], choices=models)
    for engine, title in TITLES.items():
        python = engine_python(engine)
        add(f"--{engine}-python", default=python, help=f"interpreter of {title}'s environment")
    add("--config", default=str(RECIPES / recipe), help="TOML file of a run")


def tiny_job(options: argparse.Namespace, model: Path, folder: Path, servers: str) -> list[str]:
    """Arguments that such a command's ``--config`` is run with. ``servers``: URLs with commas
    between them."""
    # Imported here: --help is answered before torch is loaded.
    from titan_grpo.titan.flavors import FLAVORS

    name, flavor = FLAVORS[options.model]
    settings = {
        "--rollout.servers": servers,
        "--job.dump_folder": str(folder),
        "--model.hf_assets_path": str(model),
        "--model.name": name,
        "--model.flavor": flavor,
        "--training.steps": str(options.steps),
    }
    return [text for pair in settings.items() for text in pair]


def require_python(engine: str, path: str) -> None:
    """Raise ConfigError, with what to do, where there is no interpreter of an engine's."""
    if path and Path(path).exists():
        return
    key, title = f"--{engine}-python", TITLES[engine]
    if in_checkout():
        raise ConfigError(
            f"{key} must be an interpreter, {path} does not exist: run scripts/setup.sh"
        )
    what = f"{path} does not exist" if path else "none is named"
    raise ConfigError(
        f"{key} must be the interpreter of an environment with {title} and titan_grpo, {what}: make"
        f" one (python -m venv {engine}-env; {engine}-env/bin/pip install 'titan_grpo[{engine}]';"
        f" without a GPU as scripts/setup.sh of a checkout does), then {key}"
        f" {engine}-env/bin/python"
    )
