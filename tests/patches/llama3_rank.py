"""One rank of the test of llama3's Hugging Face names with real DTensors: ``llama3_rank.py RANK
FOLDER``, of four ranks. Not a test module itself."""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from tests.sync.snapshot_ranks import WAYS, build, fsdp
from titan_grpo.layout.plan import chunk_of


def differs(tensor: torch.Tensor, whole: torch.Tensor) -> bool:
    """Whether this rank's part is not what ``whole`` has where a checkpoint would read it."""
    assert isinstance(tensor, DTensor)
    place = tuple(slice(o, o + n) for o, n in zip(*chunk_of(tensor), strict=True))
    return not torch.equal(tensor.to_local(), whole[place])


def main(rank: int, folder: Path) -> None:
    """Print, for each way of sharding, which weights differ from those that were not sharded."""
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=4
    )
    for shard in (fsdp, *WAYS[4]):
        torch.manual_seed(7)
        model, adapter = build("llama3")
        with torch.no_grad():
            for p in model.parameters():
                p.normal_()
        full = {fqn: p.detach().clone() for fqn, p in model.named_parameters()}
        with torch.no_grad():
            params = {fqn: p.detach() for fqn, p in shard(model).items()}
            ours, wanted = adapter.to_hf(params), adapter.to_hf(full)
            read = adapter.from_hf(ours)
            wrong = [name for name in wanted if differs(ours[name], wanted[name])]
            wrong += [fqn for fqn in full if differs(read[fqn], full[fqn])]
        print(f"{shard.__name__}: wrong {wrong}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
