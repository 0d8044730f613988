"""One of two gloo ranks, started by test_loading.py: RANK STORE_FILE. Prints one JSON line: what
its loader gave, by mode."""

import hashlib
import json
import sys
from datetime import timedelta
from functools import partial
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from titan_grpo.algorithm.batch import BatchOptions, plan
from titan_grpo.config import GRPO, JobConfig
from titan_grpo.errors import DataError
from titan_grpo.samples import Completion, Group, Prompt
from titan_grpo.titan import compat

compat.prepare()

from titan_grpo.titan.data import BatchLoader, RunStopped, Share  # noqa: E402

STATE = '{"cursor": 5}'


def completion(group: int, number: int) -> Completion:
    ids = tuple(group * 7 + number * 3 + t for t in range(1 + (group + 2 * number) % 9))
    sampled = tuple(t != 1 for t in range(len(ids))) if number == 2 else ()
    return Completion(
        ids,
        tuple(-0.1 * (t + number) for t in range(len(ids))),
        "stop",
        group,
        group,
        "s",
        number,
        sampled,
    )


def groups() -> list[Group]:
    return [
        Group(Prompt(g, tuple(range(50, 52 + g))), tuple(completion(g, n) for n in range(4)))
        for g in range(5)
    ]


def work(pack: bool, single: bool) -> tuple[Share, list[Any]]:
    batch = plan(groups(), 2, BatchOptions(48, 24, pack=pack, grpo=GRPO(num_microbatches=2)))
    return Share(batch.steps, 1, STATE), batch.micro_batches() if single else batch.rows


def refusal() -> NoReturn:
    raise DataError("no batch")


def given(loader: BatchLoader, share: Share) -> list[list[tuple[str, str, str]]]:
    """(name, type, digest) of every tensor that the trainer is given, micro-batch by
    micro-batch."""
    out = []
    batches = iter(loader)
    for _ in range(sum(share.steps)):
        inputs, labels = next(batches)
        tensors = {
            name: x
            for name, x in (inputs | {"labels": labels}).items()
            if isinstance(x, torch.Tensor)
        }
        out.append(
            [
                (name, str(x.dtype), hashlib.sha256(x.numpy().tobytes()).hexdigest())
                for name, x in tensors.items()
            ]
        )
    return out


def main() -> None:
    rank = int(sys.argv[1])
    torch.set_num_threads(1)
    store = dist.FileStore(sys.argv[2], 2)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=180)
    )
    loader = BatchLoader(rank)
    loader.connect(JobConfig(), 0)
    figures: dict[str, Any] = {}
    for pack in (False, True):
        for single in (True, False):
            share = loader.fetch(partial(work, pack, single) if rank == 0 else None)
            assert (share.slot, loader.state_dict()) == (1, {"rollout": STATE})
            figures[f"{'packed' if pack else 'padded'}, {'single' if single else 'by rank'}"] = (
                given(loader, share)
            )
    try:
        loader.fetch(refusal if rank == 0 else None)
    except RunStopped as error:
        figures["stopped"] = str(error)
    print(json.dumps(figures))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
