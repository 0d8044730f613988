"""A trainer on two hosts, which are namespaces of this machine: weights sharded over both reach
servers on a third. Needs root."""

import os
import shutil
from contextlib import ExitStack

import pytest
import torch

from tests.faults.instances import Record, engineless_launcher, recorded
from tests.faults.netns import Hosts, NotAllowed
from titan_grpo.layout.digest import tensor_digest

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.timeout(600)]

PORT = 29_511
STEPS = 3


@pytest.fixture
def hosts(nothing_outlives_the_tests):
    if os.geteuid() != 0:
        pytest.skip("namespaces of hosts need root")
    try:
        with Hosts(2) as made:
            yield made
    except NotAllowed as error:
        pytest.skip(str(error))


def meeting(rendezvous: str, first: str, own: str, number: int) -> tuple[str, ...]:
    """torchrun's arguments for one of the two hosts. Their names are alike and lead nowhere, so
    each says its address."""
    if rendezvous == "static":
        return (
            "--nnodes=2",
            f"--node_rank={number}",
            f"--master_addr={first}",
            f"--master_port={PORT}",
        )
    where = f"--rdzv_endpoint={first}:{PORT}"
    return (
        "--nnodes=2",
        "--rdzv_backend=c10d",
        "--rdzv_id=7",
        where,
        f"--local_addr={own}",
        f"--rdzv_conf=is_host={int(number == 0)}",
    )


def train(runs, hosts, rendezvous, out, urls, arguments) -> None:
    """Two ranks on each of the two hosts, to the end."""
    with ExitStack() as stack:
        nodes = []
        for number, host in enumerate(hosts.hosts):
            node = meeting(rendezvous, hosts.hosts[0].address, host.address, number)
            start = runs.start(out, urls, *arguments, nproc=2, inside=host.inside, node=node)
            nodes.append(stack.enter_context(start))
        assert [node.finish(400.0) for node in nodes] == [0, 0], nodes[0].log + nodes[1].log


@pytest.mark.parametrize("rendezvous", ["static", "c10d"])
def test_servers_hold_every_version_of_a_run_on_two_hosts(
    runs, make_replay, hosts, tmp_path, rendezvous
):
    replay = make_replay(tmp_path / "replay.jsonl", 4, 4, 16).write(STEPS)
    launch = engineless_launcher(runs.model, hosts.address)
    folders = [tmp_path / "a", tmp_path / "b"]
    out = tmp_path / "run"
    with ExitStack() as stack:
        servers = [launch(folder) for folder in folders]
        for server in servers:
            stack.callback(server.stop)
            server.wait_healthy(60.0)
        urls = [server.url for server in servers]
        arguments = [*replay.arguments, f"--training.steps={STEPS}"]
        train(runs, hosts, rendezvous, out, urls, arguments)
    held = [{c.version: c.tensors for c in Record(recorded(f)).commits()} for f in folders]
    assert set(held[0]) == set(held[1]) == set(range(STEPS + 1))
    assert held[0] == held[1]
    exported = runs.weights(out / "hf")
    last = held[0][STEPS]
    on_the_wire = {name: tensor_digest(t.to(torch.bfloat16)) for name, t in exported.items()}
    assert on_the_wire == {name: last[name] for name in exported}
    sent = [host.moved()[0] for host in hosts.hosts]
    print("bytes that left each host:", sent)


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_run_of_two_hosts_is_resumed_on_one_and_ends_with_the_same_weights(
    runs, make_replay, hosts, tmp_path, ranks
):
    replay = make_replay(tmp_path / "replay.jsonl", 4, 3, 16).write(STEPS)
    arguments = [*replay.arguments, f"--training.steps={STEPS}", "--checkpoint.interval=2"]
    server = engineless_launcher(runs.model, hosts.address)(tmp_path / "server")
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    with ExitStack() as stack:
        stack.callback(server.stop)
        server.wait_healthy(60.0)
        train(runs, hosts, "static", whole, [server.url], arguments)
        shutil.copytree(whole / "checkpoint/step-2", resumed / "checkpoint/step-2")
        one = hosts.hosts[0]
        node = ("--nnodes=1", f"--master_addr={one.address}", f"--master_port={PORT + 1}")
        again = runs.start(
            resumed, [server.url], *arguments, nproc=ranks, inside=one.inside, node=node
        )
        with again as training:
            assert training.finish(400.0) == 0, training.log
    assert runs.summary(resumed)["steps"] == 1
    expected, got = runs.weights(whole / "hf"), runs.weights(resumed / "hf")
    begun = runs.weights(runs.model)
    moved = max(float((expected[n].float() - begun[n].float()).abs().max()) for n in expected)
    apart = max(float((expected[n].float() - got[n].float()).abs().max()) for n in expected)
    print(f"moved by {moved:.3g}, apart by {apart:.3g}")
    assert apart < moved / 100  # sums over other ranks are rounded otherwise
    last = Record(recorded(tmp_path / "server")).commits()[-1]
    assert last.version == STEPS
    on_the_wire = {name: tensor_digest(t.to(torch.bfloat16)) for name, t in got.items()}
    assert on_the_wire == {name: last.tensors[name] for name in got}
