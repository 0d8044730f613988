"""One of two ranks of a run that cannot start: ``refused_rank.py RANK FOLDER PORT ARGUMENTS PORT
ARGUMENTS ..``, two words for each run, to which the ranks are dealt in order. Not a test module
itself.

Prints one JSON line: type and text of the error that ends this rank.
"""

import json
import sys
from pathlib import Path

from tests.titan.pipeline_rank import job_of
from titan_grpo.titan.tiny import write_tiny_model
from titan_grpo.titan.trainer import run


def main(number: int, folder: Path, *runs: str) -> None:
    of, rank = divmod(number, 2)
    port, argument = runs[2 * of : 2 * of + 2]
    model = write_tiny_model("qwen3", folder / f"model{number}", seed=1)
    job = (
        *(f"--model.hf_assets_path={model}", f"--job.dump_folder={folder / f'run{of}'}"),
        "--rollout.servers=http://127.0.0.1:9",
    )
    try:
        run(job_of(rank, 2, port, *job, *argument.split()))
    except Exception as error:  # noqa: BLE001 - whatever it is
        print(json.dumps([type(error).__name__, str(error)]))


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:])
