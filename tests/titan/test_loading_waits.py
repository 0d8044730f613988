"""The other ranks wait for rank 0 as long as its own deadlines let it wait."""

from dataclasses import replace

import torch
import torch.distributed as dist

from titan_grpo.config import GRPO, JobConfig, Rollout, WeightSync
from titan_grpo.titan import compat, rules

compat.prepare()

from titan_grpo.titan.data import BatchLoader  # noqa: E402 - the patches come first

SHORT = JobConfig(GRPO(), Rollout(batch_timeout_s=60.0), WeightSync())


def test_the_loaders_group_outlasts_a_start_of_servers_and_a_sync(tmp_path) -> None:
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        loader = BatchLoader(0)
        loader.connect(SHORT)
        options = loader.group._get_backend(torch.device("cpu")).options
        # 600 s for servers and the first commit, 60 s for rollouts, 240 s for a sync.
        assert options._timeout.total_seconds() > 600 + 60 + 240
    finally:
        dist.destroy_process_group()


def test_a_long_flush_at_the_end_counts_too() -> None:
    slow = replace(SHORT, weight_sync=WeightSync(shutdown_deadline_s=5000.0))
    assert min(rules.rank0_waits_s(slow)) >= 5000
