"""Code in an interpreter of its own."""

import os
import shlex
import subprocess
import sys
from pathlib import Path

DEADLINE_S = 240.0


def python(
    *arguments: str, interpreter: str = sys.executable, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run ``interpreter`` with ``arguments`` and these environment variables beside ours. What it
    printed and its exit code; TimeoutExpired past DEADLINE_S."""
    return subprocess.run(
        [interpreter, *arguments],
        env=os.environ | variables,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )


def wrapper(path: Path, *command: str) -> str:
    """A program that runs ``command`` with its own arguments behind: an interpreter inside another
    command (in a namespace, say). Its path."""
    path.write_text(f'#!/bin/sh\nexec {shlex.join(command)} "$@"\n')
    path.chmod(0o755)
    return str(path.resolve())
