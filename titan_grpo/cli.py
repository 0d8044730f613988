"""``titan-grpo``: the table of commands, which get the command line and the environment from
here."""

import errno
import importlib
import os
import select
import signal
import sys
from collections.abc import Callable

from titan_grpo import __version__
from titan_grpo.errors import ConfigError, TitanGrpoError

OLDEST = (3, 11)
"""Oldest Python version for the trainer and the tools."""

COMMANDS = {
    "quickstart": "train a tiny model on this machine beside real servers",
    "init": "write the TOML file of a job, or convert one of the older trainer",
    "verify": "prove that a real server serves exactly the trainer's weights",
    "doctor": "check versions, memory, ports, environment and servers before a run",
    "plan": "say what a cluster's sizes and links make of a run: memory, time, lag, limits",
    "config": "print every configuration key with its meaning",
    "servers": "show, add and remove the servers of a running trainer",
    "rollouts": "make the rollouts of a run whose trainer is elsewhere",
    "report": "write one HTML page about a run: words, curves, a timeline of every server",
    "watch": "follow a run in the terminal, from any shell that sees its folder",
    "evaluate": "run the [[evaluation]] tables of a job on a checkpoint, or on a server",
    "export": "write a checkpointed version as HF safetensors",
    "completion": "print what bash and zsh need to complete these commands",
}
"""Command -> help. Each is a module of titan_grpo.commands with ``run(argv: list[str], env:
Mapping[str, str]) -> int``, imported only when called."""


def usage() -> str:
    """Format the table of commands."""
    head = (
        "usage: titan-grpo COMMAND [arguments]   (titan-grpo COMMAND --help; titan-grpo --version)"
    )
    return "\n".join([head, "", *(f"  {name:<10}  {text}" for name, text in COMMANDS.items())])


def guarded(run: Callable[[list[str], dict[str, str]], int], argv: list[str], name: str) -> int:
    """Run a command, and print our errors in one line. Return 0 for success, 1 if it failed or
    found a problem, 2 for a mistake in the configuration, or a file that cannot be read or
    written, 130 on Ctrl-C."""
    try:
        return run(argv, dict(os.environ))
    except ConfigError as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 2
    except TitanGrpoError as error:
        print(f"{name}: {type(error).__name__}: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        if error.filename is None:
            raise  # not a file that the user named
        # Of a copy to a full disk, the first name is that of the file that was read.
        full = error.errno == errno.ENOSPC and error.filename2
        print(f"{name}: {full or error.filename} cannot be used: {error.strerror}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


def command(argv: list[str]) -> int:
    """Run the command that the first argument names; see ``guarded`` for the exit code."""
    if argv[:1] == ["--version"]:
        print(f"titan_grpo {__version__}")
        return 0
    if not argv or argv[0] in ("-h", "--help"):
        print(usage())
        return 0 if argv else 2
    if sys.version_info < OLDEST:
        found = ".".join(map(str, sys.version_info[:3]))
        print(
            f"titan-grpo needs Python 3.11 or newer, this is {found}: make the trainer's"
            " environment with one (what servers load of titan_grpo runs on 3.10 too)",
            file=sys.stderr,
        )
        return 2
    if argv[0] not in COMMANDS:
        known = ", ".join(COMMANDS)
        print(f"titan-grpo: unknown command {argv[0]!r}; there are {known}", file=sys.stderr)
        return 2
    name = f"titan-grpo {argv[0]}"

    def run(rest: list[str], env: dict[str, str]) -> int:
        return int(importlib.import_module(f"titan_grpo.commands.{argv[0]}").run(rest, env))

    try:
        return guarded(run, argv[1:], name)
    except ModuleNotFoundError as error:
        # A missing module of the user's own raises a ConfigError and does not come here.
        if error.name is None or error.name.partition(".")[0] == __package__:
            raise
        print(
            f"{name} needs the package {error.name}, which this environment"
            f" ({sys.prefix}) lacks: pip install 'titan_grpo[train]', or call the trainer's"
            " titan-grpo",
            file=sys.stderr,
        )
        return 2


def main(argv: list[str] | None = None) -> int:
    """Run ``command``; if the reader of the output has closed it, exit quietly as by SIGPIPE."""
    try:
        code = command(sys.argv[1:] if argv is None else argv)
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        output = select.poll()
        output.register(sys.stdout, 0)
        if not output.poll(0):
            raise  # another pipe broke
        # Otherwise the interpreter flushes the rest of the output at its end, and fails again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE


if __name__ == "__main__":
    sys.exit(main())
