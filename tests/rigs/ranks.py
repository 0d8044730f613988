"""A script that is run as every rank of a process group."""

import os
import runpy
import subprocess
import sys
import tempfile
from pathlib import Path

from titan_grpo.subprocesses import end, end_with_parent

ROOT = Path(__file__).resolve().parents[2]
DEADLINE_S = 240.0


def run_ranks(script: Path, count: int, *arguments: str, python: str = sys.executable) -> list[str]:
    """What each of ``count`` ranks prints, by rank; started with its rank and the arguments."""
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    with tempfile.TemporaryDirectory() as folder:
        process = subprocess.Popen(
            [python, "-m", "tests.rigs.ranks", str(script), str(count), folder, *arguments],
            env=environment,
            start_new_session=True,
        )
        try:
            code = process.wait(DEADLINE_S)
        finally:
            end(process, 0.0)
        ranks = sorted(Path(folder).iterdir(), key=lambda path: int(path.name))
        outputs = [path.read_text() for path in ranks]
    assert code == 0, "\n".join(outputs)
    return outputs


def main(script: str, count: int, folder: str, *arguments: str) -> int:
    """Import what the script imports, once, and go on as its ranks. How many of them failed."""
    end_with_parent()  # in a session of its own, it and its ranks would outlive killed tests
    runpy.run_path(script, run_name="imported")
    ranks = []
    for rank in range(count):
        ranks.append(os.fork())
        if not ranks[-1]:
            end_with_parent()
            os.dup2(os.open(f"{folder}/{rank}", os.O_CREAT | os.O_WRONLY), 1)
            sys.argv[:] = [script, str(rank), *arguments]
            runpy.run_path(script, run_name="__main__")
            sys.stdout.flush()
            os._exit(0)
    return sum(os.waitpid(rank, 0)[1] != 0 for rank in ranks)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2]), *sys.argv[3:]))
