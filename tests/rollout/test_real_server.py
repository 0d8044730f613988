"""The rollout process against a real vLLM server that our launcher started."""

import time

import psutil
import pytest

from titan_grpo.engines import vllm
from titan_grpo.engines.generation import Sampling
from titan_grpo.engines.http import SyncDriver
from titan_grpo.engines.launch import Server, ServerSpec
from titan_grpo.protocol.messages import ServerState
from titan_grpo.rollout.client import RolloutClient
from titan_grpo.rollout.messages import RolloutSpec
from titan_grpo.samples import Group
from titan_grpo.titan.tiny import write_tiny_model

pytestmark = [pytest.mark.e2e, pytest.mark.long]

PER_STEP, GROUP, TOKENS = 8, 8, 16


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return str(write_tiny_model("qwen3", tmp_path_factory.mktemp("model"), seed=3))


@pytest.fixture(scope="module")
def server(tmp_path_factory, model_dir, vllm_python):
    log = str(tmp_path_factory.mktemp("log") / "server.log")
    with Server(
        ServerSpec(python=vllm_python, model=model_dir, log_path=log, weight_transfer=False)
    ) as server:
        server.wait_healthy(240)
        group = server.group
        yield server
    assert not [p for p in psutil.process_iter(["pid"]) if _in_group(p, group)]


def _in_group(process: psutil.Process, group: int) -> bool:
    try:
        return process.pid == group or process.ppid() == group
    except psutil.NoSuchProcess:
        return False


def run_batches(url: str, model_dir: str) -> tuple[list[list[Group]], list[float]]:
    """Two steps' worth of groups, the server moving to version 1 in between, and the seconds each
    took."""
    sizes = {"prompts_per_step": PER_STEP, "group_size": GROUP, "max_completion_tokens": TOKENS}
    client = RolloutClient(RolloutSpec(model_dir=model_dir, seed=11, max_staleness=0, **sizes))
    batches, seconds = [], []
    try:
        client.start(60)
        for version in (0, 1):
            begin = time.perf_counter()
            client.set_server(ServerState(url, version, True, f"test/{version}"))
            batches.append(client.next_batch(version, PER_STEP, 120))
            seconds.append(time.perf_counter() - begin)
        assert client.counters()["requests"] == 2 * PER_STEP * GROUP
        assert client.counters().get("outages", 0) == 0
        child = psutil.Process(client._transport.pid)
    finally:
        client.close(10)
    assert not child.is_running()
    return batches, seconds


@pytest.mark.e2e
def test_batches_carry_the_servers_own_log_probabilities_and_versions(server, model_dir) -> None:
    batches, seconds = run_batches(server.url, model_dir)
    print("seconds per batch of 64 x 16 tokens:", [round(s, 2) for s in seconds])
    assert sorted(g.prompt.index for batch in batches for g in batch) == list(range(2 * PER_STEP))
    with SyncDriver(server.url) as driver:
        for version, batch in enumerate(batches):
            for group in batch:
                assert {(c.version_first, c.version_last) for c in group.completions} == {
                    (version, version)
                }
                assert len({c.token_ids for c in group.completions}) > 1
            group = batch[0]
            completion, start = group.completions[0], len(group.prompt.token_ids) - 1
            scores = driver.run(vllm.score(group.prompt.token_ids + completion.token_ids, 60))
            gaps = [abs(a - b) for a, b in zip(scores[start:], completion.logprobs, strict=True)]
            assert max(gaps) < 0.02


@pytest.mark.e2e
def test_a_request_with_the_same_seed_gives_the_same_tokens(server) -> None:
    with SyncDriver(server.url) as driver:
        call = vllm.generate([10, 11, 12], Sampling(8, seed=5, cache_salt="a"), 60)
        assert driver.run(call) == driver.run(call)
