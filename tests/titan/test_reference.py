"""The moving reference model: the average is exact, and a forward pass after it sees it."""

from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from titan_grpo.errors import ProtocolError
from titan_grpo.titan import compat

compat.prepare()

from titan_grpo.titan.modules import move_reference  # noqa: E402 - the patches come first


def make(seed: int) -> torch.nn.Sequential:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))


@pytest.fixture
def mesh(tmp_path: Path) -> Iterator[DeviceMesh]:
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group(
        "gloo", store=store, rank=0, world_size=1, timeout=timedelta(seconds=30)
    )
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def test_a_sharded_reference_moves_in_place_and_its_next_forward_sees_it(mesh: DeviceMesh) -> None:
    reference, policy = make(1), make(2)
    for model in (reference, policy):
        fully_shard(model[0], mesh=mesh)
        fully_shard(model, mesh=mesh)
    x = torch.randn(2, 4)
    with torch.no_grad():
        # Leaves the root's parameters gathered, as every forward without backward does.
        before = reference(x)
        move_reference(reference, policy, 0.75)
        after = reference(x)
        for module in (reference[0], reference):
            assert isinstance(module, FSDPModule)
            module.reshard()
        again = reference(x)
    average, new = make(1), make(2)
    with torch.no_grad():
        for mine, theirs in zip(average.parameters(), new.parameters(), strict=True):
            mine.lerp_(theirs, 0.25)
    torch.testing.assert_close(after, average(x))
    assert torch.equal(policy(x), new(x)), "the policy stays"
    assert torch.equal(again, after), "the average must be in the shards, not in a gathered copy"
    assert (after - before).abs().max() > 1e-3


def test_models_that_are_not_sharded_alike_are_refused() -> None:
    with pytest.raises(ProtocolError, match="sharded alike"):
        move_reference(make(1), torch.nn.Linear(4, 8), 0.5)
