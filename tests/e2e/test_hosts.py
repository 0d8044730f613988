"""Hosts, which are namespaces of this machine: weights sharded over two of them reach servers on a
third; and servers whose host the network loses. Needs root."""

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from itertools import starmap
from pathlib import Path

import pytest
import torch

from tests.conformance.commits import difference
from tests.conformance.crowd import REQUEST_S, prompt
from tests.conformance.engine import MAX_DIFFERENCE, EngineUnderTest, furthest
from tests.e2e.conftest import Replay, Runs
from tests.faults.netns import Hosts, NotAllowed
from tests.faults.site import Record, engineless_launcher, launcher
from titan_grpo.engines.launch import Server
from titan_grpo.observe import names
from titan_grpo.observe.recorder import read_metrics
from titan_grpo.protocol.messages import Label
from titan_grpo.titan.tiny import write_tiny_model
from titan_grpo.verify.recording import tensor_digest
from titan_grpo.verify.server import Devices, recorded

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.timeout(600)]

APART = "198.51.100.{}"
"""Addresses of another network (RFC 5737) on the hosts' switch."""

PORT = 29_511
STEPS = 3


@pytest.fixture
def hosts(nothing_outlives_the_tests: None, request: pytest.FixtureRequest) -> Iterator[Hosts]:
    """As many as the test asks for, or two."""
    if os.geteuid() != 0:
        pytest.skip("namespaces of hosts need root")
    try:
        with Hosts(getattr(request, "param", 2)) as made:
            yield made
    except NotAllowed as error:
        pytest.skip(str(error))


Node = Callable[[Hosts, int], tuple[str, ...]]
"""torchrun's arguments for one of the two hosts, by its number."""


def static(hosts: Hosts, number: int) -> tuple[str, ...]:
    node = f"--node_rank={number} --master_addr={hosts.hosts[0].address} --master_port={PORT}"
    return ("--nnodes=2", *node.split())


def dynamic(hosts: Hosts, number: int) -> tuple[str, ...]:
    """The hosts' names are alike and lead nowhere, so each says its address."""
    first, own = hosts.hosts[0].address, hosts.hosts[number].address
    node = f"--rdzv_backend=c10d --rdzv_id=7 --rdzv_endpoint={first}:{PORT}"
    node += f" --local_addr={own} --rdzv_conf=is_host={int(number == 0)}"
    return ("--nnodes=2", *node.split())


def train(
    runs: Runs, hosts: Hosts, node: Node, out: Path, urls: list[str], arguments: list[str]
) -> None:
    """Two ranks on each of the first two hosts, to the end."""
    with ExitStack() as stack:
        nodes = []
        for number, host in enumerate(hosts.hosts[:2]):
            words = node(hosts, number)
            start = runs.start(out, urls, *arguments, nproc=2, inside=host.inside, node=words)
            nodes.append(stack.enter_context(start))
        assert [each.finish(400.0) for each in nodes] == [0, 0], nodes[0].log + nodes[1].log


def digests(exported: dict[str, torch.Tensor]) -> dict[str, str]:
    """Of what servers get of these."""
    return {name: tensor_digest(t.to(torch.bfloat16)) for name, t in exported.items()}


def go_on(
    runs: Runs,
    hosts: Hosts,
    ranks: int,
    folders: tuple[Path, Path],
    urls: list[str],
    *arguments: str,
) -> None:
    """Resume step 2 of a run of two hosts, in another folder, on one: it ends with the same
    weights."""
    whole, resumed = folders
    shutil.copytree(whole / "checkpoint/step-2", resumed / "checkpoint/step-2")
    one = hosts.hosts[0]
    node = ("--nnodes=1", f"--master_addr={one.address}", f"--master_port={PORT + 1}")
    again = runs.start(resumed, urls, *arguments, nproc=ranks, inside=one.inside, node=node)
    with again as training:
        assert training.finish(400.0) == 0, training.log
    assert runs.summary(resumed)["steps"] == 1
    expected, got = runs.weights(whole / "hf"), runs.weights(resumed / "hf")
    begun = runs.weights(runs.model)
    moved = max(float((expected[n].float() - begun[n].float()).abs().max()) for n in expected)
    apart = max(float((expected[n].float() - got[n].float()).abs().max()) for n in expected)
    print(f"moved by {moved:.3g}, apart by {apart:.3g}")
    assert apart < moved / 100  # sums over other ranks are rounded otherwise


def test_servers_hold_every_version_of_a_run_on_two_hosts(
    runs: Runs, hosts: Hosts, tmp_path: Path
) -> None:
    replay = Replay(tmp_path / "replay.jsonl", 4, 4, 16).write(STEPS)
    launch = engineless_launcher(runs.model, hosts.address)
    folders = [tmp_path / "a", tmp_path / "b"]
    out = tmp_path / "run"
    with ExitStack() as stack:
        servers = [launch(folder) for folder in folders]
        for server in servers:
            stack.callback(server.stop)
            server.wait_healthy(60.0)
        urls = [server.url for server in servers]
        # An asynchronous run skips versions where its steps are quicker than its commits.
        mode = "--grpo.no-async-weight-update"
        arguments = [*replay.arguments, f"--training.steps={STEPS}", mode]
        # changes that patches are made for
        arguments += ["--weight_sync.delta=on", "--optimizer.lr=1e-5"]
        train(runs, hosts, dynamic, out, urls, arguments)
    held = [{c.version: c.tensors for c in Record(recorded(f)).commits()} for f in folders]
    assert set(held[0]) == set(held[1]) == set(range(STEPS + 1))
    assert held[0] == held[1]
    exported = runs.weights(out / "hf")
    last = held[0][STEPS]
    assert digests(exported) == {name: last[name] for name in exported}
    assert runs.summary(out)["spared_bytes"] > 0
    sent = [host.moved()[0] for host in hosts.hosts]
    print("bytes that left each host:", sent)


@pytest.mark.parametrize("hosts", [3], indirect=True)
def test_a_server_that_the_servers_file_names_reads_from_every_trainer_host_in_its_own_network(
    runs: Runs, hosts: Hosts, tmp_path: Path
) -> None:
    """It does not reach that of MASTER_ADDR, in which all hosts but rank 0's gave their address."""
    replay = Replay(tmp_path / "replay.jsonl", 4, 4, 16).write(STEPS)
    for number, host in enumerate(hosts.hosts):
        host.give(APART.format(number + 1), instead=number == 2)
    launch = engineless_launcher(runs.model, APART.format(3), hosts.hosts[2].network)
    with ExitStack() as stack:
        server, file = launch(tmp_path / "a"), tmp_path / "servers"
        stack.callback(server.stop)
        file.write_text(f"{server.url}\n")
        arguments = [*replay.arguments, f"--training.steps={STEPS}"]
        arguments += [f"--rollout.servers_file={file}", "--weight_sync.startup_deadline_s=60"]
        train(runs, hosts, static, tmp_path / "run", [], arguments)
    assert Record(recorded(tmp_path / "a")).commits()[-1].version == STEPS


def test_both_engines_compute_what_two_hosts_train_and_what_one_host_goes_on_with(
    runs: Runs,
    hosts: Hosts,
    tmp_path: Path,
    vllm_python: str,
    sglang_python: str,
) -> None:
    replay = Replay(tmp_path / "replay.jsonl", 4, 3, 16).write(STEPS)
    arguments = [*replay.arguments, f"--training.steps={STEPS}", "--checkpoint.interval=2"]
    other = write_tiny_model("qwen3", tmp_path / "other", seed=2)
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    with ExitStack() as stack:
        servers = []
        for engine, python in (("vllm", vllm_python), ("sglang", sglang_python)):
            start = launcher(engine, python, other, Devices("cpu"), hosts.address)
            server = start(tmp_path / engine)
            assert isinstance(server, Server)
            servers.append(server)
            stack.callback(server.stop)
        for server in servers:
            server.wait_healthy(280)
        urls = [server.url for server in servers]
        engines = [EngineUnderTest(server, tmp_path) for server in servers]
        apart = [difference(e, runs.model) for e in engines]
        assert min(apart) > 4 * MAX_DIFFERENCE, "the servers must start with other weights"
        train(runs, hosts, static, whole, urls, arguments)
        apart = [difference(e, whole / "hf") for e in engines]
        print("after two hosts of two ranks:", apart)
        assert max(apart) <= MAX_DIFFERENCE
        go_on(runs, hosts, 3, (whole, resumed), urls, *arguments)
        apart = [difference(e, resumed / "hf") for e in engines]
        print("after one host of three ranks:", apart)
        assert max(apart) <= MAX_DIFFERENCE
    exported = runs.weights(resumed / "hf")
    loaded = [Record(recorded(tmp_path / e)).commits() for e in ("vllm", "sglang")]
    for commits in loaded:
        assert [c.version for c in commits].count(STEPS) == 2
        assert digests(exported) == {name: commits[-1].tensors[name] for name in exported}
    first, second = ({(c.run_id, c.version): c.tensors for c in commits} for commits in loaded)
    both = first.keys() & second.keys()
    print("versions that both loaded:", sorted(version for _, version in both))
    assert all(first[key] == second[key] for key in both)


LOST_S = 40.0
"""For longer than a trainer that waited for a transfer's or a call's deadline would stand still."""


def holds(engine: EngineUnderTest, version: int) -> bool:
    """Whether it says that it serves the version or a later one."""
    with engine.control() as control:
        label = Label.parse(control.label())
    return label is not None and label.version >= version


def scores(e: EngineUnderTest) -> list[tuple[float, ...]]:
    """Its log-probabilities of three sequences."""
    rows = (prompt(seed, 16) for seed in range(3))
    return [e.run(e.speak.score(row, REQUEST_S, "scores")) for row in rows]


MOST_S = 25.0
"""Of a step: rollouts look for a server that stands still every 2.5 s, and after 10 s."""


def test_a_lost_host_holds_up_no_step_for_long_and_its_server_comes_back(
    runs: Runs, hosts: Hosts, tmp_path: Path, vllm_python: str, sglang_python: str
) -> None:
    other = write_tiny_model("qwen3", tmp_path / "other", seed=2)
    out, arguments = tmp_path / "run", ["--training.steps=12000", "--rollout.prompts_per_step=8"]
    # long enough that some are in flight at any time
    arguments += ["--rollout.group_size=4", "--rollout.max_completion_tokens=48"]
    with ExitStack() as stack:
        engines = []
        pythons = {"vllm": vllm_python, "sglang": sglang_python}
        for host, (engine, python) in zip(hosts.hosts, pythons.items(), strict=True):
            start = launcher(engine, python, other, Devices("cpu"), host.address, host.inside)
            server = start(tmp_path / engine)
            assert isinstance(server, Server)
            engines.append(EngineUnderTest(server, tmp_path))
            stack.callback(server.stop)
        for each in engines:
            each.server.wait_healthy(280)
            assert not holds(each, 0)
        training = stack.enter_context(runs.start(out, [e.server.url for e in engines], *arguments))
        training.wait_step(10)
        for host, lost in zip(hosts.hosts, engines, strict=True):
            began = training.step
            host.lose()
            training.run_on(LOST_S)
            host.find()
            ended = training.step
            print(f"{lost.server.url} was away from step {began} to {ended}")
            assert ended >= began + 20, training.log
            assert training.wait_until(partial(holds, lost, ended)), training.log
        training.stop()
        moved = [difference(e, other) for e in engines]
        one, two = (scores(e) for e in engines)
    apart = max(starmap(furthest, zip(one, two, strict=True)))
    longest = max(row[names.STEP_S] for row in read_metrics(out / "metrics.jsonl"))
    blocked = max(row[names.BLOCKED_S] for row in read_metrics(out / "metrics.jsonl"))
    print(f"longest step {longest:.1f} s, blocked {blocked:.3f} s at most")
    print(f"moved by {moved}, apart {apart}")
    assert longest < MOST_S
    assert blocked < 1.0
    # of the same version, each rounded
    assert apart <= 2 * MAX_DIFFERENCE < min(moved) / 2
