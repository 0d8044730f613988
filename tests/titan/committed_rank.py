"""One of two ranks in sync mode, whose rank 0 waits for a server that never answers:
``committed_rank.py RANK PORT FOLDER``. Not a test module itself.

Prints one JSON line: how long it waited, after it met the other rank in a group with a shorter
timeout, as a checkpoint's collectives do.
"""

import json
import sys
import time
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from tests.titan.pipeline_rank import job_of
from titan_grpo.observe.recorder import Recorder
from titan_grpo.sync.lanes import SyncOptions
from titan_grpo.sync.process import SyncProcess
from titan_grpo.titan.tiny import write_tiny_model
from titan_grpo.titan.trainer import GRPOTrainer

SHORTER_S = 4.0


def main(rank: int, port: str, folder: Path) -> None:
    model = write_tiny_model("qwen3", folder / f"model{rank}", seed=1)
    job = (
        *(f"--model.hf_assets_path={model}", f"--job.dump_folder={folder / 'run'}"),
        *("--checkpoint.no-enable", "--checkpoint.no-initial_load_in_hf"),
        *("--grpo.no-async-weight-update", "--rollout.max_staleness=0"),
        *("--weight_sync.lane_deadline_s=5", "--weight_sync.commit_deadline_s=5"),
    )
    trainer = GRPOTrainer(job_of(rank, 2, port, *job))
    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=SHORTER_S))
    with ExitStack() as ends:
        if trainer.controller is not None:
            assert trainer.sync.pool is not None
            options = SyncOptions(urls=["http://127.0.0.1:9"], engine="vllm")
            sync, recorder = trainer.job_config.weight_sync, Recorder(folder)
            worker = SyncProcess(trainer.sync.pool, sync, recorder, options)
            ends.callback(worker.close)
            worker.start()
            trainer.controller.sync_process = worker
        dist.barrier()
        begin = time.monotonic()
        trainer._wait_committed()
        dist.barrier(group=group)
        print(json.dumps(time.monotonic() - begin))
    trainer.controller = None
    trainer.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))
