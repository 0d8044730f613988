"""The engine-less server over real HTTP: driven by the production control and real lanes, and it
dies with its owner."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch

from tests.rigs.server_handle import ServerProcess, misbehave, served
from tests.rigs.server_process import CopiedModel
from tests.rigs.small_trainer import BLOCK_BYTES, SHAPES, SmallTrainer
from titan_grpo.config import WeightSync
from titan_grpo.engines import vllm
from titan_grpo.engines.vllm import VllmControl
from titan_grpo.errors import ServerRefused, ServerUnreachable

pytestmark = pytest.mark.e2e

WAIT_S = 60.0
CONFIG = WeightSync(
    block_bytes=BLOCK_BYTES, bucket_bytes=BLOCK_BYTES, backoff_s=0.05, backoff_max_s=0.2
)


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    """One process for all tests; each brings a trainer of its own, whose run is newer."""
    with ServerProcess() as process:
        yield process


@pytest.fixture
def trainer(server: ServerProcess, tmp_path: Path) -> Iterator[SmallTrainer]:
    one = SmallTrainer([server.url], tmp_path, CONFIG, lambda url: VllmControl(url, "", 10.0))
    one.start()
    yield one
    one.close()


def publish(trainer: SmallTrainer, version: int) -> str:
    """Step and publish; the digest that a server has to show."""
    trainer.step(version)
    slot = trainer.worker.slots.wait_reserved(WAIT_S)
    assert slot is not None
    trainer.publisher.publish(version, slot, trainer.weights)
    trainer.publisher.fence()
    return trainer.digest()


def test_commits_arrive_and_the_memory_of_the_server_is_the_trainers(server, trainer):
    for version in (1, 2, 3):
        digest = publish(trainer, version)
        assert trainer.worker.servers.wait_held(version, WAIT_S, everyone=True) == [server.url]
        now = server.run(served())
        assert (now["digest"], now["paused"], now["intact"], now["pid"]) == (
            digest,
            False,
            True,
            server.pid,
        )
        assert now["label"].startswith(f"{trainer.run_id}:{version}:")
        assert now["visible"][-1] == [now["label"], digest]
    assert [label.split(":")[1] for label in now["versions"][-3:]] == ["1", "2", "3"]
    assert server.receiver_pids == [now["receiver_pid"]]


def test_it_refuses_what_an_engine_refuses(server):
    control = VllmControl(server.url, "", 10.0)
    server.run(vllm.start_weight_update(10.0))
    with pytest.raises(ServerRefused, match="already active"):
        server.run(vllm.start_weight_update(10.0))
    server.run(vllm.finish_weight_update(None, 10.0))
    with pytest.raises(ServerRefused, match="without a matching start"):
        control.finish("x")
    with pytest.raises(ServerRefused, match="must be called before"):
        server.run(vllm.update_weights({}, 10.0))
    control.close()


def test_it_pauses_resumes_and_takes_a_label_without_an_update(server):
    control = VllmControl(server.url, "", 10.0)
    control.pause()
    assert control.paused()
    control.relabel("r:1:aa")
    assert control.label() == "r:1:aa"
    assert server.run(served())["visible"][-1:] != [["r:1:aa", server.run(served())["digest"]]]
    control.resume()
    assert not control.paused()
    assert server.run(served())["visible"][-1][0] == "r:1:aa"
    control.close()


def test_misbehaviour_strikes_one_call_and_a_lost_answer_was_done(server):
    control = VllmControl(server.url, "", 10.0)
    server.run(misbehave("fail", "/pause"))
    with pytest.raises(ServerRefused, match="500"):
        control.pause()
    assert not control.paused()
    server.run(misbehave("reset", "/pause"))
    with pytest.raises(ServerUnreachable):
        control.pause()
    assert not control.paused()
    server.run(misbehave("lose", "/pause"))
    with pytest.raises(ServerUnreachable):
        control.pause()
    assert control.paused()
    control.resume()
    control.close()


def test_a_killed_receiver_and_a_failed_call_delay_a_version_and_no_more(server, trainer):
    publish(trainer, 1)
    assert trainer.worker.servers.wait_held(1, WAIT_S, everyone=True)
    os.kill(server.receiver_pid, signal.SIGKILL)
    server.run(misbehave("fail", "/resume"))
    digest = publish(trainer, 2)
    assert trainer.worker.servers.wait_held(2, WAIT_S, everyone=False) == [server.url]
    now = server.run(served())
    assert (now["digest"], now["paused"]) == (digest, False)


def test_a_load_that_breaks_off_is_seen_in_the_memory():
    model = CopiedModel()
    old, new = (
        {name: torch.full(shape, value) for name, shape in SHAPES.items()} for value in (1.0, 2.0)
    )
    model.load(iter(old.items()))
    before = model.digest()

    def half():
        yield from list(new.items())[:2]
        raise RuntimeError("planted")

    with pytest.raises(RuntimeError):
        model.load(half())
    assert model.digest() != before
    model.load(iter(old.items()))
    assert model.digest() == before


def test_a_killed_server_comes_back_on_its_port_without_memory():
    with ServerProcess() as server:
        url, pid = server.url, server.pid
        server.run(vllm.update_weight_version("r:1:aa", 10.0))
        server.kill()
        assert not psutil.pid_exists(pid)
        server.start()
        assert (server.url, server.pid != pid) == (url, True)
        assert server.run(vllm.label()) == "default"


OWNER = """
import json, sys
from tests.rigs.server_handle import ServerProcess
server = ServerProcess()
print(json.dumps([server.pid, server.url]), flush=True)
sys.stdin.read()
"""


def test_it_dies_with_its_owner_however_that_dies():
    with subprocess.Popen(
        [sys.executable, "-c", OWNER], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as owner:
        pid, _ = json.loads(owner.stdout.readline())
        server = psutil.Process(pid)
        owner.kill()
        server.wait(WAIT_S)
