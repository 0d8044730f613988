"""One rank of a trainer without rollouts that trains with the GRPO loss on made-up groups. Not a
test module itself.

``pipeline_rank.py RANK FOLDER PORT WORLD STEPS ARGUMENTS FOLDER PORT ...``: five words for each
run, to which the ranks are dealt in order. A run goes on from the checkpoint in its folder, if
there is one, to STEPS, saves, and publishes. Its rank 0 prints one JSON line.
"""

import json
import os
import shlex
import sys
from array import array
from itertools import chain
from pathlib import Path
from random import Random
from typing import Any

from titan_grpo.titan import compat

compat.prepare()

import torch  # noqa: E402 - the patches come first
import torch.distributed as dist  # noqa: E402
from safetensors.torch import load_file  # noqa: E402

from tests.sync.snapshot_ranks import share_image  # noqa: E402
from titan_grpo.algorithm.batch import plan  # noqa: E402
from titan_grpo.samples import Completion, Group, Prompt  # noqa: E402
from titan_grpo.sync.publisher import Snapshotter, local_shards  # noqa: E402
from titan_grpo.titan import lora  # noqa: E402
from titan_grpo.titan.checkpoints import checkpoint_of  # noqa: E402
from titan_grpo.titan.data import Share, StepWork, batch_options  # noqa: E402
from titan_grpo.titan.export import export_version  # noqa: E402
from titan_grpo.titan.jobconfig import check_files, parse  # noqa: E402
from titan_grpo.titan.modules import route_width  # noqa: E402
from titan_grpo.titan.optimizer_step import reduce_metrics  # noqa: E402
from titan_grpo.titan.step_records import sequences  # noqa: E402
from titan_grpo.titan.trainer import GRPOTrainer, token_cost  # noqa: E402
from titan_grpo.titan.verify_train import image_of  # noqa: E402
from titan_grpo.titan.weight_sync import named_tensors  # noqa: E402
from titan_grpo.verify.recording import tensor_digest  # noqa: E402

RECIPE = "titan_grpo/titan/recipes/quickstart_cpu.toml"


def job_of(rank: int, world: int, port: str, *arguments: str) -> Any:
    """The job of one rank, which then has torchrun's environment."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "CUDA_VISIBLE_DEVICES": ""}
    return parse(["--job.config_file", RECIPE, *arguments], world)


def groups_of(step: int, routed: bool = False) -> list[Group]:
    """Eight groups of four completions of 1 to 14 tokens, the same for the same step; ``routed``:
    each token with two of eight experts in each of two layers."""
    draw, draw_routes = Random(step), Random(step)

    def routes(tokens: int) -> bytes:
        pairs = [draw_routes.sample(range(8), 2) for _ in range(2 * tokens)]
        return array("h", chain.from_iterable(pairs)).tobytes()

    def completion(version: int, prompt: tuple[int, ...]) -> Completion:
        count = draw.randint(1, 14)
        ids = tuple(draw.randint(4, 100) for _ in range(count))
        logprobs = tuple(-4.8 + draw.random() / 5 for _ in ids)
        reward, experts = draw.random(), routes(len(prompt) + count - 1) if routed else b""
        return Completion(
            ids, logprobs, "stop", version, version, "s", reward=reward, routes=experts
        )

    prompts = [tuple(draw.randint(4, 100) for _ in range(draw.randint(2, 9))) for _ in range(8)]
    version = max(step - 1, 0)
    return [
        Group(Prompt(number, prompt), tuple(completion(version, prompt) for _ in range(4)))
        for number, prompt in enumerate(prompts)
    ]


def train_to(trainer: GRPOTrainer, steps: int) -> list[dict[str, Any]]:
    """Train on made-up groups; what each step says, the same on every rank."""
    config = trainer.job_config
    routed = config.grpo.router_replay
    width = route_width(trainer.whole) if routed else 0
    args = trainer.model_args
    options = batch_options(config, token_cost(args, trainer.whole), args.vocab_size, width)
    batches = trainer.batch_generator(trainer.dataloader)
    said = []

    def prepare() -> StepWork:
        batch = plan(groups_of(trainer.step, routed), trainer.loader.num_shares, options)
        return Share(batch.steps), batch.rows

    while trainer.step < steps:
        trainer.step += 1
        share: Share = trainer.loader.fetch(prepare if dist.get_rank() == 0 else None)
        outcome = trainer._stepper.run(batches, share.steps, trainer.version, False)
        assert outcome.taken == outcome.steps, outcome.unhealthy
        trainer._make_version(outcome, None)
        values = reduce_metrics(outcome, trainer.parallel_dims)
        assert outcome.first is not None
        shown = {str(ids): logprobs for ids, logprobs in sequences(outcome.first).items()}
        said.append({"values": values | {"grad_norm": outcome.grad_norm}, "shown": shown})
    trainer.checkpointer.save(steps, last_step=True)
    return said


def published(trainer: GRPOTrainer) -> torch.Tensor:
    """The bytes of an image that all ranks write their parts of."""
    plan = trainer.sync.plan
    image = share_image(plan.manifest.total_bytes, dist.get_rank())
    shards: dict[str, Any] = {**local_shards(named_tensors(trainer.model_parts), set(plan.ops))}
    for part in trainer.model_parts:
        shards |= lora.merged_shards(part, set(plan.ops))
    if plan.ops:
        copier = Snapshotter(plan.ops, [image.tensor()], torch.device("cpu"), 1 << 16)
        copier.start(shards, 0).wait(60.0)
    dist.barrier()
    held = image.tensor().clone()
    image.close()
    return held


def main(rank: int, world: int, port: str, folder: Path, steps: int, arguments: list[str]) -> None:
    """One rank of one run."""
    config = job_of(rank, world, port, *arguments)
    check_files(config)
    trainer = GRPOTrainer(config)
    trainer.controller = None  # which has started nothing yet
    trainer.checkpointer.load(-1)
    said = train_to(trainer, steps)
    held = published(trainer)
    writing: list[Any] = [None] * world
    dist.all_gather_object(writing, len(trainer.sync.plan.ops))
    if rank == 0:
        out = folder / "exported" / str(steps)
        export_version(config, checkpoint_of(Path(config.job.dump_folder), steps), out, "float32")
        exported = load_file(out / "model.safetensors")
        same = bytes(held.numpy()) == bytes(image_of(exported, trainer.sync.plan.manifest))
        weights = [t for n, t in named_tensors([trainer.whole]) if not lora.is_adapter(n)]
        trains = [n for n, p in trainer.whole.named_parameters() if p.requires_grad]
        line = {
            "said": said,
            "digest": tensor_digest(held),
            "same_as_export": same,
            "elements": sum(t.numel() for t in weights),
            "in_image": sum(t.numel() for t in exported.values()),
            "adapters_alone_trained": all(map(lora.is_adapter, trains)),
            "writing": writing,
            "out": str(out),
        }
        print(json.dumps(line))
    dist.barrier()
    trainer.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    number = int(sys.argv[1])
    runs = sys.argv[2:]
    while runs:
        folder, port, world, steps, arguments, *runs = runs
        if number < int(world):
            main(number, int(world), port, Path(folder), int(steps), shlex.split(arguments))
            break
        number -= int(world)
