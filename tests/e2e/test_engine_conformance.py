"""Both engines pass one suite, on real servers: tests/conformance says what it is and what
a third engine needs."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.conformance import commits, crowd, engine, kv, pieces, streaming
from tests.conformance.engine import EngineUnderTest, remake
from tests.conformance.reference import Reference
from tests.e2e.conftest import Site
from tests.rigs.trainer_handle import TrainerProcess
from tests.rigs.trainer_process import Settings
from titan_grpo.engines.generation import INTERVAL, Sampling
from titan_grpo.protocol.lane import Point
from titan_grpo.protocol.messages import UNUSABLE, ServerState, Standing
from titan_grpo.rollout.client import RolloutClient
from titan_grpo.rollout.messages import RolloutSpec

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def vllm(site: Site, tmp_path_factory: pytest.TempPathFactory) -> EngineUnderTest:
    """The server that all end-to-end tests share."""
    e = EngineUnderTest(site.server, tmp_path_factory.mktemp("vllm"))
    commits.bring_back(e)
    return e


@pytest.fixture(scope="module")
def sglang(sglang_site: Site, tmp_path_factory: pytest.TempPathFactory) -> EngineUnderTest:
    folder = tmp_path_factory.mktemp("sglang")
    e = EngineUnderTest(sglang_site.server, folder, restart=sglang_site.restart)
    commits.bring_back(e)
    return e


def remake_without_end(seed: int, folder: Path) -> Path:
    return crowd.without_end(remake(seed, folder))


def named(checks: tuple[Callable[[EngineUnderTest], None], ...]) -> dict[str, Any]:
    return {"argvalues": checks, "ids": [check.__name__ for check in checks]}


@pytest.mark.parametrize(
    "check", **named(engine.CHECKS + pieces.CHECKS + commits.CHECKS + kv.CHECKS)
)
def test_vllm(check: Callable[[EngineUnderTest], None], vllm: EngineUnderTest) -> None:
    check(vllm)


@pytest.mark.parametrize(
    "check", **named(engine.CHECKS + pieces.CHECKS + commits.CHECKS + kv.CHECKS)
)
def test_sglang(
    check: Callable[[EngineUnderTest], None], sglang: EngineUnderTest, sglang_site: Site
) -> None:
    check(sglang)
    assert sglang_site.kernel_calls == [], (
        "the stand-in for SGLang's compiled kernels takes part in nothing"
    )


@pytest.mark.long
@pytest.mark.parametrize("check", **named(streaming.CHECKS + streaming.DIGEST_CHECKS))
def test_vllm_with_streamed_weights(
    check: Callable[[EngineUnderTest], None], vllm: EngineUnderTest
) -> None:
    check(vllm)


@pytest.mark.long
def test_what_a_trainer_killed_half_way_through_a_streamed_version_left_the_next_one_repairs(
    vllm: EngineUnderTest, tmp_path: Path
) -> None:
    url, model = vllm.access.url, remake(61, tmp_path / "model")
    settings = Settings(
        str(model), [url], str(tmp_path / "run"), 1,
        apply="streamed", api_key=vllm.access.api_key, guarded=False,
    )  # fmt: skip
    with TrainerProcess(settings, tmp_path / "log", os.environ) as dead:
        dead.tell("hold", url, Point.EXTENT, 20)
        dead.wait(lambda event: event["event"] == "held_at", 180.0, "its twentieth bucket")
    with streaming.trainer(vllm) as run:
        weights, path = run.make(62)
        run.start(weights.manifest)
        run.until(Standing.QUARANTINED)
        with vllm.control() as control:
            assert (control.label(), control.paused()) == (UNUSABLE, True)
        run.publish(1, weights)
        run.until(Standing.HOLDS, 1)
        assert commits.difference(vllm, path) <= engine.MAX_DIFFERENCE


KEY_VARIABLE, WAIT_S = "TITAN_GRPO_TEST_BROKEN_KEY", 120.0
SAMPLED = RolloutSpec(
    model_dir="",
    base_version=13,
    prompts_per_step=2,
    group_size=6,
    max_completion_tokens=1000,
    max_staleness=0,
    api_key_env=KEY_VARIABLE,
)
"""Completions of version 13, none of which is short enough to be done before the server is
killed."""


@pytest.fixture
def client(sglang: EngineUnderTest, monkeypatch: pytest.MonkeyPatch) -> Iterator[RolloutClient]:
    monkeypatch.setenv(KEY_VARIABLE, sglang.access.api_key)
    one = RolloutClient(replace(SAMPLED, model_dir=str(sglang.model)))
    one.start(WAIT_S)
    yield one
    one.close()


def test_sglang_killed_under_requests_which_vllm_finishes_and_restarted(
    sglang: EngineUnderTest, sglang_site: Site, vllm: EngineUnderTest, client: RolloutClient
) -> None:
    """The server dies in a pause of a commit, by SIGKILL. What it has sent goes on elsewhere, and
    it is another one later."""
    long = [replace(e, remake=remake_without_end) for e in (sglang, vllm)]
    with commits.sender(long[0]) as first, commits.sender(long[1]) as second:
        labels, weights = (first.label(13), second.label(13)), first.sync(13, 13)
        second.sync(13, 13)
    url = sglang.access.url
    client.set_server(ServerState(url, 13, True, labels[0], "sglang"))
    deadline = time.monotonic() + WAIT_S
    while client.in_flight().get(url, 0) < SAMPLED.prompts_per_step * SAMPLED.group_size:
        assert time.monotonic() < deadline, "no requests were made"
    client.set_server(ServerState(url, 13, False, labels[0], "sglang"))  # and no more than these
    # Behind them in the queue: once these have their tokens, those have some. More than one, since
    # the first may overtake some of them.
    for seed in range(4):
        sampling = Sampling(2 * INTERVAL, ignore_eos=True)
        sglang.run(sglang.speak.generate(crowd.prompt(seed), sampling, WAIT_S))
    with sglang.control() as control:
        control.pause()  # as the commit would in a moment

    def kill_and_restart() -> None:
        sglang_site.server.signal(signal.SIGKILL)
        client.set_server(ServerState(vllm.access.url, 13, True, labels[1], "vllm"))
        sglang_site.restart()

    for check in commits.RESTART_CHECKS:
        check(replace(sglang, restart=kill_and_restart))
    groups, counters = client.next_batch(13, SAMPLED.prompts_per_step, WAIT_S), client.counters()
    assert counters["outages"] >= 1, counters
    assert counters["resumed"] >= 1, counters
    assert counters["resumed_tokens"] >= INTERVAL, counters
    reference, servers = Reference(weights), set()
    for completion, prompt in [
        (c, list(g.prompt.token_ids)) for g in groups for c in g.completions
    ]:
        assert (completion.version_first, completion.version_last) == (13, 13)
        assert (
            len(completion.token_ids) == len(completion.logprobs) <= SAMPLED.max_completion_tokens
        )
        computed = reference.logprobs([*prompt, *completion.token_ids])[len(prompt) - 1 :]
        assert engine.furthest(completion.logprobs, computed) <= engine.MAX_DIFFERENCE, completion
        servers.add(completion.server)
    assert vllm.access.url in servers
