"""One of two gloo ranks, started by test_two_ranks.py: RANK STORE_FILE. Prints one JSON line of figures."""

import json
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from titan_grpo.algorithm.batch import BatchOptions, assemble
from titan_grpo.algorithm.logprobs import token_logprobs
from titan_grpo.algorithm.loss import grpo_loss
from titan_grpo.algorithm.metrics import accumulate, pack, summarize, unpack
from titan_grpo.config import GRPO
from titan_grpo.errors import ConfigError
from titan_grpo.samples import Completion, Group, Prompt

WORDS = 11  # odd: the two vocabulary shards have 6 and 5 columns


def make_logits():
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(0, WORDS, (3, 5), generator=generator)
    labels[0, :2] = -100
    return torch.randn(3, 5, WORDS, generator=generator), labels, torch.randn(3, 5, generator=generator)


def vocabulary_parallel(mesh):
    """Largest differences, in value and in gradient, between sharded and whole logits."""
    logits, labels, upstream = make_logits()
    whole = logits.clone().requires_grad_()
    expected = token_logprobs(whole, labels, 0.7, 4)
    expected.backward(upstream)
    differences = []
    for placement in (Shard(2), Replicate()):
        sharded = distribute_tensor(logits, mesh, [placement]).requires_grad_()
        out = token_logprobs(sharded, labels, 0.7, 4)
        assert not isinstance(out, DTensor)
        out.backward(upstream)
        assert sharded.grad.placements == (placement,)
        differences += [(out - expected).abs().max().item(), (sharded.grad.full_tensor() - whole.grad).abs().max().item()]
    return differences


def refusal(mesh):
    logits, labels, _ = make_logits()
    try:
        token_logprobs(distribute_tensor(logits, mesh, [Shard(1)]), labels, 1.0, 0)
    except ConfigError as error:
        return str(error)
    return ""


def make_groups():
    groups = []
    for index in range(5):
        tokens = [tuple((index * 3 + k * 5 + t) % WORDS for t in range(1 + (index + k) % 4)) for k in range(3)]
        completions = tuple(Completion(t, (-1.5,) * len(t), "stop", 0, 0, "s", float(k)) for k, t in enumerate(tokens))
        groups.append(Group(Prompt(index, (1, 2, 3)), completions))
    return groups


def train_step(num_ranks, rank):
    """(loss, gradient, metrics) of this rank's micro-batches of a step over ``num_ranks``."""
    table = torch.arange(WORDS * WORDS, dtype=torch.float64).view(WORDS, WORDS).sin().requires_grad_()
    total, parts = torch.zeros((), dtype=torch.float64), []
    for batch in assemble(make_groups(), num_ranks, BatchOptions(token_budget=16, max_len=8)).ranks[rank]:
        loss, metrics = grpo_loss(token_logprobs(table[batch["inputs"]], batch["labels"], 1.0, 0), batch, GRPO())
        loss.backward()
        total += loss.detach()
        parts.append(metrics)
    return total, table.grad, accumulate(parts)


def main():
    rank = int(sys.argv[1])
    torch.set_num_threads(1)
    store = dist.FileStore(sys.argv[2], 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=60))
    mesh = init_device_mesh("cpu", (2,))
    figures = {"vocabulary": vocabulary_parallel(mesh), "refusal": refusal(mesh)}

    loss, gradient, metrics = train_step(2, rank)
    sums, maxima = pack(metrics)
    for tensor, op in (
        (loss, dist.ReduceOp.SUM),
        (gradient, dist.ReduceOp.SUM),
        (sums, dist.ReduceOp.SUM),
        (maxima, dist.ReduceOp.MAX),
    ):
        dist.all_reduce(tensor, op=op)
    alone_loss, alone_gradient, alone_metrics = train_step(1, 0)
    two, one = summarize(unpack(list(metrics), sums, maxima)), summarize(alone_metrics)
    figures["loss"] = (loss - alone_loss).abs().item()
    figures["gradient"] = (gradient - alone_gradient).abs().max().item()
    figures["metrics"] = max(abs(two[name] - one[name]) for name in one)
    figures["scale"] = alone_gradient.abs().max().item()
    print(json.dumps(figures))
    dist.destroy_process_group()


main()
