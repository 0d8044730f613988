"""What an example says of itself: the command in its first comment, and how long it is."""

import shlex
from pathlib import Path


def command_of(path: Path) -> list[str]:
    """The arguments of the command in a file's first comment, after scripts/quickstart.sh."""
    lines = []
    for line in path.read_text().splitlines():
        if not line.startswith("#"):
            break
        lines.append(line.removeprefix("#").strip())
    text = " ".join(line.removesuffix("\\") for line in lines[lines.index("") :])
    program, *arguments = shlex.split(text)
    assert program == "scripts/quickstart.sh"
    return arguments


def lines_written(path: Path, arguments: list[str]) -> int:
    """Lines that a user writes: code, and the keys that name it."""
    code = [line.strip() for line in path.read_text().splitlines()]
    code = [line for line in code if line and not line.startswith(("#", '"""'))]
    return len(code) + sum(argument.startswith("--rollout.") for argument in arguments)
