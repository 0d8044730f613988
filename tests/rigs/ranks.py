"""A script that is run as every rank of a process group."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DEADLINE_S = 240.0


def run_ranks(script: Path, count: int, *arguments: str) -> list[str]:
    """What each of ``count`` ranks prints, by rank; started with its rank and the arguments."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(script), str(rank), *arguments],
            stdout=subprocess.PIPE,
            env=environment,
            text=True,
        )
        for rank in range(count)
    ]
    try:
        outputs = [rank.communicate(timeout=DEADLINE_S)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait(DEADLINE_S)
    assert [rank.returncode for rank in ranks] == [0] * count, "\n".join(outputs)
    return outputs
