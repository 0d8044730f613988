"""Weights of a real model, sharded over several hosts: each has its part, hashes and serves it; a
server gets the whole. The hosts are groups of processes on this machine with an address each."""

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.rigs.ranks import run_ranks
from titan_grpo.config import WeightSync
from titan_grpo.errors import ConfigError
from titan_grpo.layout import memory
from titan_grpo.titan.weight_sync import Stages, TrainerSync

SCRIPT = Path(__file__).with_name("host_ranks.py")

WAYS = {
    "fsdp": ("aabb", [[0, 1], [2, 3]]),
    "hsdp": ("abcd", [[0], [1]]),
    "fsdp_tensor_parallel": ("abab", [[0, 2], [1, 3]]),
}
"""How the model is sharded: the host of each rank, and which ranks write."""


@pytest.mark.long
@pytest.mark.timeout(420)
def test_a_server_holds_every_version_that_the_hosts_hold_in_parts(tmp_path: Path) -> None:
    arguments = [word for way, (hosts, _) in WAYS.items() for word in (way, hosts)]
    outputs = run_ranks(SCRIPT, 4, str(tmp_path), *arguments)
    said = [[json.loads(line) for line in out.splitlines() if line[:1] == "{"] for out in outputs]
    for number, (hosts, writing) in enumerate(WAYS.values()):
        first = said[0][number]
        assert first["wrong"] == []
        assert [one[number]["error"] for one in said] == [""] * len(hosts)
        assert first["hosts"] == writing
        held = sum(first["owned"])
        assert first["total"] <= held <= 2 * first["total"], "the parts' pages, and no others"


def test_the_ranks_of_a_host_share_the_conversion_and_map_their_own_pages(tmp_path: Path) -> None:
    script = Path(__file__).with_name("shares_rank.py")
    said = [json.loads(out.splitlines()[-1]) for out in run_ranks(script, 2, str(tmp_path))]
    converted, mapped, sizes, errors = zip(*said, strict=True)
    assert converted == ([f"{n}.weight" for n in (0, 2, 4)], [f"{n}.weight" for n in (1, 3, 5)])
    assert mapped[0] == sizes[0], "rank 0 has allocated all of it"
    # The kernel also maps what is there around a fault: 64 KiB a tensor.
    assert sizes[1] / 2 <= mapped[1] <= 0.6 * sizes[1]
    assert errors[0] == errors[1]
    assert "5.weight becomes none" in errors[0]


@pytest.mark.parametrize(("slots", "remedy"), [(10**12, "use fewer of them, a"), (2, "use a")])
def test_images_that_the_memory_does_not_hold_are_refused_with_the_rank_and_the_size(
    slots: int, remedy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two slots are the least: fewer were the remedy."""
    monkeypatch.setattr(memory, "available_memory", lambda: 100)
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    model, wrong = torch.nn.Linear(4, 4), f"rank 0: weight_sync.slots = {slots} version image.*"
    try:
        with pytest.raises(ConfigError, match=f"{wrong}; {remedy} machine or container"):
            TrainerSync(Stages([model], model), dict, WeightSync(slots=slots), torch.device("cpu"))
    finally:
        dist.destroy_process_group()
