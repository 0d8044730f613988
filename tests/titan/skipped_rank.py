"""One rank of a trainer that has skipped versions: ``skipped_rank.py RANK PORT FOLDER``. Not a test
module itself.

Prints one JSON line: the published version, with a staleness of at most 1, after each of the
versions 0, 1 and 2, if none of them got a slot at the end of its step.
"""

import json
import sys
from contextlib import closing
from pathlib import Path

import torch.distributed as dist

from tests.titan.pipeline_rank import job_of
from titan_grpo.observe.recorder import Recorder
from titan_grpo.sync.lanes import SyncOptions
from titan_grpo.sync.process import SyncProcess
from titan_grpo.titan.tiny import write_tiny_model
from titan_grpo.titan.trainer import GRPOTrainer


def main(rank: int, port: str, folder: Path) -> None:
    model = write_tiny_model("qwen3", folder / "model", seed=1)
    job = (
        *(f"--model.hf_assets_path={model}", f"--job.dump_folder={folder / 'run'}"),
        *("--checkpoint.no-enable", "--checkpoint.no-initial_load_in_hf"),
        "--rollout.max_staleness=1",
    )
    trainer = GRPOTrainer(job_of(rank, 1, port, *job))
    assert trainer.controller is not None
    assert trainer.sync.pool is not None
    options = SyncOptions(urls=["http://127.0.0.1:9"], engine="vllm")
    config, recorder = trainer.job_config.weight_sync, Recorder(folder)
    with closing(SyncProcess(trainer.sync.pool, config, recorder, options)) as worker:
        worker.start()
        trainer.controller.sync_process = worker
        trainer.sync.start(worker.publish)
        trainer._publish_now(0)
        published = []
        for trainer.version in range(3):
            trainer._catch_up()
            published.append(trainer._published)
        print(json.dumps(published))
    trainer.controller = None
    trainer.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))
