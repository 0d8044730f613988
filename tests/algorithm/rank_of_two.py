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

from titan_grpo.algorithm.distribution import logit_mean_square, token_entropy, token_logprobs
from titan_grpo.errors import ConfigError

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
    }
    print(json.dumps(figures))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
