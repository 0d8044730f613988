"""One rank of a trainer without rollouts, on either torchtitan. Not a test module itself.

``engine_rank.py RANK WORLD PORT KIND FOLDER STEPS`` goes on from the checkpoint in FOLDER, if there
is one, to STEPS, saves, and publishes. Rank 0 prints one JSON line: losses, the parameters'
elements, those of the image, whether the image has the bytes of torchtitan's own state dict, its
digest.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

from titan_grpo.titan import compat

compat.prepare()

import torch  # noqa: E402 - the patches come first
import torch.distributed as dist  # noqa: E402
from torchtitan.distributed import utils as dist_utils  # noqa: E402

from tests.sync.snapshot_ranks import share_image  # noqa: E402
from titan_grpo.layout.digest import tensor_digest  # noqa: E402
from titan_grpo.sync.publisher import local_shards  # noqa: E402
from titan_grpo.sync.snapshot import Snapshotter  # noqa: E402
from titan_grpo.titan.data import BatchLoader  # noqa: E402
from titan_grpo.titan.flavors import FLAVORS  # noqa: E402
from titan_grpo.titan.jobconfig import check_files, parse  # noqa: E402
from titan_grpo.titan.verify_train import image_of  # noqa: E402
from titan_grpo.titan.weight_sync import named_tensors, plan_writes  # noqa: E402

Engine: Any = compat.upstream("engine").Engine
ROWS, LENGTH = 4, 32


class Trained(Engine):
    """The engine with a loss of text."""

    def step_once(self, number: int) -> float:
        """One step on the rows of ``number``, of which each rank has its share."""
        drawn = torch.Generator().manual_seed(number)
        world = dist.get_world_size()
        ids = torch.randint(4, 100, (ROWS, LENGTH + 1), generator=drawn)[dist.get_rank() :: world]
        self.optimizers.zero_grad()
        with self.computing():
            batch = {"input": ids[:, :-1], "labels": ids[:, 1:]}
            logits = self.logits(self.model_parts[0], batch).float()
            loss = torch.nn.functional.cross_entropy(
                logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="sum"
            ) / (ROWS * LENGTH)
            loss.backward()
        parameters = list(self.model_parts[0].parameters())
        dist_utils.clip_grad_norm_(parameters, 1.0, foreach=True, ep_enabled=False)
        self.checkpointer.maybe_wait_for_staging()
        self.optimizers.step()
        self.lr_schedulers.step()
        total = loss.detach()
        dist.all_reduce(total)
        return float(total)


def main(rank: int, world: int, port: str, kind: str, folder: Path, steps: int) -> None:
    """See the module's docstring."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "CUDA_VISIBLE_DEVICES": ""}
    name, flavor = FLAVORS[kind]  # type: ignore[index]
    recipe = "titan_grpo/titan/recipes/quickstart_cpu.toml"
    options = {
        "model.name": name,
        "model.flavor": flavor,
        "model.hf_assets_path": folder / "model",
        "job.dump_folder": folder / "run",
        "optimizer.eps": 1e-2,
    }
    config = parse(
        ["--job.config_file", recipe, *(f"--{k}={v}" for k, v in options.items())], world
    )
    check_files(config)
    trainer = Trained(config, BatchLoader)
    waited = []
    staging = trainer.checkpointer.maybe_wait_for_staging
    trainer.checkpointer.maybe_wait_for_staging = lambda: (waited.append(1), staging())
    trainer.loader = trainer.dataloader
    trainer.checkpointer.load(-1)
    losses = []
    while trainer.step < steps:
        trainer.step += 1
        losses.append(trainer.step_once(trainer.step))
    trainer.checkpointer.save(steps, last_step=True)
    model = trainer.model_parts[0]
    plan = plan_writes(model, trainer.to_hf, "float32", 4096)
    image = share_image(plan.manifest.total_bytes, rank)
    shards = local_shards(named_tensors(model), set(plan.ops))
    if plan.ops:
        copier = Snapshotter(plan.ops, [image.tensor()], torch.device("cpu"), 1 << 16)
        copier.start(shards, 0).wait(30.0)
    stored = compat.upstream("models").stored_tensors(model, trainer.to_hf)
    full = {n: t.full_tensor() if hasattr(t, "full_tensor") else t for n, t in stored}
    exported = {n: t.detach().contiguous() for n, t in trainer.to_hf(full).items()}
    dist.barrier()
    if rank == 0:
        held = image.tensor()
        print(
            json.dumps(
                {
                    "losses": losses,
                    "waited": len(waited),
                    "elements": sum(p.numel() for p in model.parameters()),
                    "in_image": sum(t.numel() for t in exported.values()),
                    "same_bytes": bytes(held.numpy()) == bytes(image_of(exported, plan.manifest)),
                    "digest": tensor_digest(held),
                }
            )
        )
    dist.barrier()
    image.close()
    trainer.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(
        int(sys.argv[1]),
        int(sys.argv[2]),
        sys.argv[3],
        sys.argv[4],
        Path(sys.argv[5]),
        int(sys.argv[6]),
    )
