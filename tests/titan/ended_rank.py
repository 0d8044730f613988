"""One rank whose run ends by an error while a thread writes its checkpoint: ``ended_rank.py RANK
PORT FOLDER``. Not a test module itself.

Prints one JSON line: the error, whether the checkpoint was whole as soon as the run had ended, and
whether its objects are left out of the interpreter's last collection.
"""

import gc
import json
import sys
import threading
from pathlib import Path
from typing import Any

from tests.titan.pipeline_rank import job_of
from titan_grpo.errors import SyncError
from titan_grpo.titan.tiny import write_tiny_model
from titan_grpo.titan.trainer import GRPOTrainer, run

ENDING = threading.Event()


class Slow:
    """State that the checkpoint's thread gets only after the run has begun to end."""

    def __getstate__(self) -> dict[str, Any]:
        if threading.current_thread() is not threading.main_thread():
            ENDING.wait(60.0)
            threading.Event().wait(0.5)
        return {}


class Ended(GRPOTrainer):
    """A trainer without rollouts that saves and fails."""

    def __init__(self, job_config: Any) -> None:
        super().__init__(job_config)
        self.controller = None  # which has started nothing yet
        self.checkpointer.states["slow"] = Slow()

    def train(self) -> None:
        """Save as after a step, and fail."""
        self.checkpointer.save(1)
        raise SyncError("no server is left")

    def close(self, error: BaseException | None = None) -> None:
        """Let the checkpoint's thread go on, and end."""
        ENDING.set()
        super().close(error)


def main(rank: int, port: str, folder: Path) -> None:
    model = write_tiny_model("qwen3", folder / "model", seed=1)
    job = (
        *(f"--model.hf_assets_path={model}", f"--job.dump_folder={folder / 'run'}"),
        *("--checkpoint.interval=1", "--checkpoint.async_mode=async"),
    )
    try:
        run(job_of(rank, 1, port, *job), Ended)
    except SyncError as error:
        whole = (folder / "run/checkpoint/step-1/.metadata").exists()
        print(json.dumps([str(error), whole, gc.get_freeze_count() > 0]))


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))
