"""``titan-grpo completion``: shell completion of commands, options and a job's keys."""

import argparse
from collections.abc import Mapping

from titan_grpo.commands.config import SECTIONS, keys

JOBS = ("quickstart", "verify", "doctor", "evaluate", "export")
"""Commands that take a job's keys."""

BASH = """# Completion of titan-grpo, for bash and zsh.
if [ -n "${{ZSH_VERSION-}}" ]; then
    autoload -Uz compinit bashcompinit && compinit && bashcompinit
fi
_titan_grpo() {{
    local word="${{COMP_WORDS[COMP_CWORD]}}" command="${{COMP_WORDS[1]}}" words=""
    if [ "$COMP_CWORD" -eq 1 ]; then
        words="$("${{COMP_WORDS[0]}}" --help 2>/dev/null | sed -n 's/^  \\([a-z]*\\)  .*/\\1/p')"
    elif [ "${{word#-}}" != "$word" ]; then
        # A command's own options are asked of it, so that they are those of the version in use.
        words="$("${{COMP_WORDS[0]}}" "$command" --help 2>/dev/null |
            grep -oE -- '--[a-z][a-z-]*' | sort -u)"
        case "$command" in {jobs}) words="$words {keys}" ;; esac
    fi
    COMPREPLY=($(compgen -W "$words" -- "$word"))
}}
complete -o default -F _titan_grpo titan-grpo
"""


def script() -> str:
    """Return the shell functions."""
    known = [
        f"--{name}.{key.name}"
        for name, section in SECTIONS.items()
        if not name.startswith("[")
        for key in keys(section)
    ]
    return BASH.format(jobs="|".join(JOBS), keys=" ".join(known))


def run(argv: list[str], env: Mapping[str, str]) -> int:
    """Print the script."""
    argparse.ArgumentParser(
        prog="titan-grpo completion",
        description="Print what bash and zsh need to complete titan-grpo's commands and options.",
        epilog='In ~/.bashrc or ~/.zshrc: eval "$(titan-grpo completion)"',
    ).parse_args(argv)
    print(script(), end="")
    return 0
