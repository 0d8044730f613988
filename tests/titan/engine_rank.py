"""One rank of a trainer without rollouts, on either torchtitan. Not a test module itself.

``engine_rank.py RANK WORLD PORT KIND FOLDER STEPS [--SECTION.KEY=VALUE ..]`` goes on from the
checkpoint in FOLDER, if there is one, to STEPS, saves, and publishes. Rank 0 prints one JSON line:
losses, the parameters' elements, those of the image, whether the image has the bytes of
torchtitan's own state dict, its digest.
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
from titan_grpo.algorithm.distribution import token_logprobs  # noqa: E402
from titan_grpo.sync.publisher import Snapshotter, local_shards  # noqa: E402
from titan_grpo.titan import lora  # noqa: E402
from titan_grpo.titan.data import BatchLoader  # noqa: E402
from titan_grpo.titan.flavors import FLAVORS  # noqa: E402
from titan_grpo.titan.jobconfig import check_files, parse  # noqa: E402
from titan_grpo.titan.modules import compute_head_in_fp32  # noqa: E402
from titan_grpo.titan.verify_train import image_of  # noqa: E402
from titan_grpo.titan.weight_sync import named_tensors, plan_writes, stored_tensors  # noqa: E402
from titan_grpo.verify.recording import tensor_digest  # noqa: E402

Engine: Any = compat.upstream().Engine
ROWS, LENGTH = 4, 32


class Trained(Engine):  # type: ignore[misc]
    """The engine with a loss of text."""

    def step_once(self, number: int) -> float:
        """One step on the rows of ``number``, of which each data-parallel rank has its share."""
        drawn = torch.Generator().manual_seed(number)
        batch_mesh = self.parallel_dims.get_optional_mesh("batch")
        shares = 1 if batch_mesh is None else batch_mesh.size()
        ids = torch.randint(4, 100, (ROWS, LENGTH + 1), generator=drawn)
        ids = ids[self.dataloader.dp_rank :: shares]
        self.optimizers.zero_grad()
        with self.computing():
            batch = {"input": ids[:, :-1], "labels": ids[:, 1:]}
            logits = self.logits(self.model_parts[0], batch)
            logprobs = token_logprobs(logits, ids[:, 1:], 1.0, 0)
            loss = -logprobs.sum() / (ROWS * LENGTH)
            loss.backward()
        parameters = list(self.model_parts[0].parameters())
        experts = self.parallel_dims.ep_enabled
        dist_utils.clip_grad_norm_(parameters, 1.0, foreach=True, ep_enabled=experts)
        self.checkpointer.maybe_wait_for_staging()
        self.optimizers.step()
        self.lr_schedulers.step()
        total = loss.detach()
        if batch_mesh is not None:
            dist.all_reduce(total, group=batch_mesh.get_group())
        return float(total)


def main(rank: int, world: int, port: str, job: list[str]) -> None:
    """See the module's docstring."""
    kind, place, last, *more = job
    folder, steps = Path(place), int(last)
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
        ["--job.config_file", recipe, *(f"--{k}={v}" for k, v in options.items()), *more], world
    )
    check_files(config)
    trainer = Trained(config, BatchLoader)
    if config.grpo.fp32_lm_head:
        compute_head_in_fp32(trainer.model_parts[0])
    waited = []
    staging = trainer.checkpointer.maybe_wait_for_staging

    def wait_for_staging() -> None:
        waited.append(1)
        staging()

    trainer.checkpointer.maybe_wait_for_staging = wait_for_staging
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
    merged = lora.merged_shards(model, set(plan.ops))
    shards: dict[str, Any] = {**local_shards(named_tensors(model), set(plan.ops)), **merged}
    if plan.ops:
        copier = Snapshotter(plan.ops, [image.tensor()], torch.device("cpu"), 1 << 16)
        copier.start(shards, 0).wait(60.0)
    stored = stored_tensors(model, trainer.to_hf)
    stored += [pair for pair in named_tensors(model) if lora.is_adapter(pair[0])]
    full = {n: t.full_tensor() if hasattr(t, "full_tensor") else t for n, t in stored}
    for name, layer in lora.adapted(model):
        up, down = (full[name + end].double() for end in (lora.B, lora.A))
        weight = full[f"{name}.weight"].double()
        full[f"{name}.weight"] = (weight + layer.scale * (up @ down)).float()
    trained = {n for n, p in model.named_parameters() if p.requires_grad}
    exported = {n: t.detach().contiguous() for n, t in trainer.to_hf(full).items()}
    dist.barrier()
    if rank == 0:
        planned = {n for n, _ in named_tensors(model) if not lora.is_adapter(n)}
        held = image.tensor()
        print(
            json.dumps(
                {
                    "losses": losses,
                    "waited": len(waited),
                    "elements": sum(t.numel() for n, t in named_tensors(model) if n in planned),
                    "adapters_alone_trained": trained == {n for n in trained if lora.is_adapter(n)},
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
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4:])
