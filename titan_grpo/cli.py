"""``titan-grpo``: a table of commands. Besides train.py the only reader of the command line and the environment."""

import importlib
import os
import sys
from dataclasses import dataclass

from titan_grpo.errors import ConfigError, TitanGrpoError


@dataclass(frozen=True, slots=True)
class Command:
    """A module with ``run(argv: list[str], env: Mapping[str, str]) -> int``, imported when it is called."""

    module: str
    help: str


COMMANDS = {
    "quickstart": Command("titan_grpo.commands.quickstart", "train a tiny model on this machine beside real vLLM servers"),
    "verify": Command("titan_grpo.commands.verify", "prove that a real server serves exactly the trainer's weights"),
    "doctor": Command("titan_grpo.commands.doctor", "check versions, memory, ports, environment and servers before a run"),
    "explore": Command(
        "titan_grpo.commands.explore", "walk through every state of the sync protocol, with faults at every step"
    ),
    "config": Command("titan_grpo.commands.config", "print every configuration key with its meaning"),
    "servers": Command("titan_grpo.commands.servers", "show, add and remove the servers of a run that goes on"),
    "rollouts": Command("titan_grpo.commands.rollouts", "make the rollouts of a run whose trainer is elsewhere"),
    "export": Command("titan_grpo.commands.export", "write a checkpointed version as HF safetensors"),
}
"""Name -> command."""


def usage() -> str:
    """The table as text."""
    width = max(len(name) for name in COMMANDS)
    lines = [f"  {name:<{width}}  {command.help}" for name, command in COMMANDS.items()]
    return "\n".join(["usage: titan-grpo COMMAND [arguments]   (titan-grpo COMMAND --help for its arguments)", "", *lines])


def main(argv: list[str] | None = None) -> int:
    """Run a command. Exit code 0 on success, 1 if it failed or found a problem, 2 for a mistake in the configuration."""
    argv = sys.argv[1:] if argv is None else argv
    if not argv or argv[0] in ("-h", "--help"):
        print(usage())
        return 0 if argv else 2
    if argv[0] not in COMMANDS:
        print(f"titan-grpo: unknown command {argv[0]!r}; there are {', '.join(COMMANDS)}", file=sys.stderr)
        return 2
    try:
        return int(importlib.import_module(COMMANDS[argv[0]].module).run(argv[1:], dict(os.environ)))
    except ConfigError as error:
        print(f"titan-grpo {argv[0]}: {error}", file=sys.stderr)
        return 2
    except TitanGrpoError as error:
        print(f"titan-grpo {argv[0]}: {type(error).__name__}: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
