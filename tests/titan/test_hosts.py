"""Weights of a real model, sharded over several hosts: each has its part, hashes and serves it; a
server gets the whole. The hosts are groups of processes on this machine with an address each."""

import json
from pathlib import Path

import pytest

from tests.rigs.ranks import run_ranks

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
