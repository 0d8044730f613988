"""``titan-grpo``: a table of commands. Besides train.py the only reader of the command line and the
environment."""

import importlib
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass

from titan_grpo.errors import ConfigError, TitanGrpoError


@dataclass(frozen=True, slots=True)
class Command:
    """A module with ``run(argv: list[str], env: Mapping[str, str]) -> int``, imported when it is
    called."""

    module: str
    help: str


COMMANDS = {
    "quickstart": Command(
        "titan_grpo.commands.quickstart",
        "train a tiny model on this machine beside real vLLM servers",
    ),
    "verify": Command(
        "titan_grpo.commands.verify",
        "prove that a real server serves exactly the trainer's weights",
    ),
    "doctor": Command(
        "titan_grpo.commands.doctor",
        "check versions, memory, ports, environment and servers before a run",
    ),
    "config": Command(
        "titan_grpo.commands.config", "print every configuration key with its meaning"
    ),
    "servers": Command(
        "titan_grpo.commands.servers", "show, add and remove the servers of a run that goes on"
    ),
    "rollouts": Command(
        "titan_grpo.commands.rollouts", "make the rollouts of a run whose trainer is elsewhere"
    ),
    "export": Command(
        "titan_grpo.commands.export", "write a checkpointed version as HF safetensors"
    ),
}
"""Name -> command."""


def usage() -> str:
    """The table as text."""
    width = max(len(name) for name in COMMANDS)
    lines = [f"  {name:<{width}}  {command.help}" for name, command in COMMANDS.items()]
    return "\n".join(
        [
            "usage: titan-grpo COMMAND [arguments]   (titan-grpo COMMAND --help for its arguments)",
            "",
            *lines,
        ]
    )


def guarded(run: Callable[[list[str], dict[str, str]], int], argv: list[str], name: str) -> int:
    """Run a command: errors of ours in one line. 0: success; 1: it failed or found a problem; 2: a
    mistake in the configuration."""
    try:
        return int(run(argv, dict(os.environ)))
    except ConfigError as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 2
    except TitanGrpoError as error:
        print(f"{name}: {type(error).__name__}: {error}", file=sys.stderr)
        return 1


def main(argv: list[str] | None = None) -> int:
    """Run the command that the first argument names; see ``guarded`` for the exit code."""
    argv = sys.argv[1:] if argv is None else argv
    if not argv or argv[0] in ("-h", "--help"):
        print(usage())
        return 0 if argv else 2
    if argv[0] not in COMMANDS:
        print(
            f"titan-grpo: unknown command {argv[0]!r}; there are {', '.join(COMMANDS)}",
            file=sys.stderr,
        )
        return 2
    module = importlib.import_module(COMMANDS[argv[0]].module)
    return guarded(module.run, argv[1:], f"titan-grpo {argv[0]}")


if __name__ == "__main__":
    sys.exit(main())
