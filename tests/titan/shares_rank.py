"""One of two ranks that plan a model's image together: ``shares_rank.py RANK FOLDER``. Not a test
module itself.

Prints one JSON line: the parameters that this rank has had converted, the bytes of one slot that it
has mapped, the slot's size, and the error where the last parameter cannot be converted.
"""

import json
import re
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from titan_grpo.config import WeightSync
from titan_grpo.errors import ConfigError
from titan_grpo.titan.compat import prepare
from titan_grpo.titan.weight_sync import Stages, TrainerSync

prepare()  # once for both ranks, which are forked after this

LAYERS, WIDTH = 6, 1024


def mapped_bytes() -> int:
    """Memory of the first slot in this process's page tables."""
    said = Path("/proc/self/smaps").read_text()
    found = re.findall(r"titan_grpo slot 0.*?^Rss: +(\d+) kB", said, re.DOTALL | re.MULTILINE)
    return 1024 * sum(map(int, found))


def main(rank: int, folder: Path) -> None:
    """See the module's docstring."""
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2
    )
    model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH, False) for _ in range(LAYERS)))
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    converted: set[str] = set()
    last = f"{LAYERS - 1}.weight"

    def to_hf(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        converted.update(state)
        return dict(state)

    def to_hf_but_last(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {name: value for name, value in state.items() if name != last}

    sync = TrainerSync(Stages([model], model), to_hf, WeightSync(), torch.device("cpu"))
    said = [sorted(converted), mapped_bytes(), sync.plan.manifest.total_bytes]
    names = [tensor.name for tensor in sync.plan.manifest.tensors]
    assert names == [f"{layer}.weight" for layer in range(LAYERS)], "in the model's order"
    sync.close()
    try:
        TrainerSync(Stages([model], model), to_hf_but_last, WeightSync(), torch.device("cpu"))
    except ConfigError as error:
        print(json.dumps([*said, str(error)]))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
