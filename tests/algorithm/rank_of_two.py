"""One of two gloo ranks, started by test_two_ranks.py: RANK STORE_FILE. Prints one JSON line of
figures."""

import json
import sys
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from tests.algorithm.table_model import ALL_ON, Step, Tables, step
from titan_grpo.algorithm.batch import BatchOptions
from titan_grpo.algorithm.distribution import logit_mean_square, token_entropy, token_logprobs
from titan_grpo.algorithm.loss import flags, reasons, summarize, unpack
from titan_grpo.algorithm.loss import pack as pack_metrics
from titan_grpo.config import GRPO
from titan_grpo.errors import ConfigError
from titan_grpo.samples import Completion, Group, Prompt

WORDS = 11  # odd: the two vocabulary shards have 6 and 5 columns


def make_logits(words: int = WORDS) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(0, words, (3, 5), generator=generator)
    labels[0, :2] = -100
    return (
        torch.randn(3, 5, words, generator=generator),
        labels,
        torch.randn(3, 5, generator=generator),
    )


READERS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "logprobs": lambda logits, labels: token_logprobs(logits, labels, 0.7, 4),
    "entropy": lambda logits, labels: token_entropy(logits, 0.7, 4),
    "mean_square": lambda logits, labels: logit_mean_square(logits, 4),
}


def vocabulary_parallel(
    mesh: DeviceMesh, reader: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], words: int
) -> list[float]:
    """Largest differences, in value and in gradient, between sharded and whole logits."""
    logits, labels, upstream = make_logits(words)
    whole = logits.clone().requires_grad_()
    expected = reader(whole, labels)
    expected.backward(upstream)
    assert whole.grad is not None
    assert words == 1 or whole.grad.abs().max() > 1e-3
    differences = []
    for placement in (Shard(2), Replicate()):
        sharded = distribute_tensor(logits, mesh, [placement]).requires_grad_()
        out = reader(sharded, labels)
        assert not isinstance(out, DTensor)
        out.backward(upstream)
        assert isinstance(sharded.grad, DTensor)
        assert sharded.grad.placements == (placement,)
        differences += [
            (out - expected).abs().max().item(),
            (sharded.grad.full_tensor() - whole.grad).abs().max().item(),
        ]
    return differences


def refusal(mesh: DeviceMesh) -> str:
    logits, labels, _ = make_logits()
    try:
        token_logprobs(distribute_tensor(logits, mesh, [Shard(1)]), labels, 1.0, 0)
    except ConfigError as error:
        return str(error)
    return ""


def make_groups() -> list[Group]:
    groups = []
    for index in range(5):
        tokens = [
            tuple((index * 3 + k * 5 + t) % WORDS for t in range(1 + (index + k) % 4))
            for k in range(3)
        ]
        completions = tuple(
            Completion(t, (-1.5,) * len(t), "stop", 0, 0, "s", float(k))
            for k, t in enumerate(tokens)
        )
        groups.append(Group(Prompt(index, (1, 2, 3)), completions))
    return groups


def train_step(num_ranks: int, rank: int, pack: bool) -> Step:
    """This rank's part of a step over ``num_ranks``, with every term of the loss on."""
    table = torch.arange(WORDS * WORDS, dtype=torch.float64).view(WORDS, WORDS).sin()
    options = BatchOptions(16, 8, pack=pack, grpo=GRPO(num_microbatches=2))
    tables = Tables(table, table.flip(0))
    return step(make_groups(), tables, ALL_ON, options, range(rank, rank + 1), num_ranks)


def compared(rank: int, pack: bool) -> dict[str, float]:
    """How far a step over two ranks is from one on a single rank with one sequence per row."""
    loss, gradient, metrics = train_step(2, rank, pack)
    sums, maxima = pack_metrics(metrics)
    for tensor, op in (
        (loss, dist.ReduceOp.SUM),
        (gradient, dist.ReduceOp.SUM),
        (sums, dist.ReduceOp.SUM),
        (maxima, dist.ReduceOp.MAX),
    ):
        dist.all_reduce(tensor, op=op)
    alone_loss, alone_gradient, alone_metrics = train_step(1, 0, False)
    two, one = summarize(unpack(list(metrics), sums, maxima)), summarize(alone_metrics)
    return {
        "loss": (loss - alone_loss).abs().item(),
        "gradient": (gradient - alone_gradient).abs().max().item(),
        "metrics": max(abs(two[name] - one[name]) for name in one),
        "scale": alone_gradient.abs().max().item(),
    }


def agreed(rank: int) -> tuple[str, ...]:
    """What both ranks say of a step in which only the last one has a NaN, and only the first knows
    that rewards collapsed."""
    loss = torch.tensor(float("nan") if rank == 1 else 0.5)
    found = flags(loss, torch.tensor(2.0), 3.0, collapsed=rank == 0)
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return reasons(found.tolist())


def main() -> None:
    rank = int(sys.argv[1])
    torch.set_num_threads(1)
    store = dist.FileStore(sys.argv[2], 2)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=180)
    )
    mesh = init_device_mesh("cpu", (2,))
    figures = {
        **{
            f"{words} words": {
                name: vocabulary_parallel(mesh, reader, words) for name, reader in READERS.items()
            }
            for words in (WORDS, 1)  # of one word, the second rank has no column
        },
        "refusal": refusal(mesh),
        "rows": compared(rank, False),
        "packed": compared(rank, True),
        "health": agreed(rank),
    }
    print(json.dumps(figures))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
