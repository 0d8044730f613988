"""Code in an interpreter of its own."""

import os
import subprocess
import sys

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
