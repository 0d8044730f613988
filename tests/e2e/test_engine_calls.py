"""Versions are committed to real servers by calls that a rollout service makes: checks of the engines' suite, through it."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from titan_grpo.engines.control import ServerControl
from titan_grpo.engines.controls import AUTO
from titan_grpo.rollout.client import RolloutClient
from titan_grpo.rollout.remote import RemoteLink
from titan_grpo.rollout.service import Service
from titan_grpo.rollout.spec import RolloutSpec
from titan_grpo.testing.suites import commits
from titan_grpo.testing.suites.engine import EngineUnderTest
from titan_grpo.titan.tiny import write_tiny_model

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

ANY = "127.0.0.1:0"
KEYS = ("TITAN_GRPO_TEST_FAR_API_KEY", "TITAN_GRPO_TEST_FAR_ADMIN_KEY")
"""Variables of the service's environment; nobody else reads them."""


@dataclass(frozen=True)
class Through(EngineUnderTest):
    """A server whose control plane only the service has the keys of."""

    client: RolloutClient | None = None

    @contextmanager
    def control(self) -> Iterator[ServerControl]:
        assert self.client is not None
        control = self.client.control(AUTO, replace(self.access, api_key="", admin_key=""))
        try:
            yield control
        finally:
            control.close()


def remake(seed: int, folder: Path) -> Path:
    return write_tiny_model("qwen3", folder, seed, std=0.05, dtype="bfloat16")


@contextmanager
def through(site, folder: Path, patch: pytest.MonkeyPatch, says_versions: bool) -> Iterator[Through]:
    model, engine = Path(site.server.spec.model), site.server.spec.engine
    for name, key in zip(KEYS, (site.access.api_key, site.access.admin_key), strict=True):
        patch.setenv(name, key)
    spec = RolloutSpec(model_dir=str(model), api_key_env=KEYS[0], admin_key_env=KEYS[1])
    service = Service(ANY, "", 30.0, lambda _: None)
    client = RolloutClient(spec, "", RemoteLink(f"http://{service.address}", "", ANY))
    try:
        client.start(60.0)
        yield Through(engine, site.access, model, remake, folder, says_versions, says_versions, client=client)
        assert client.counters().get("late_engine_answers", 0) == 0
    finally:
        client.close()
        service.close()


@pytest.mark.parametrize(
    "check",
    [
        commits.the_server_computes_what_was_committed_also_the_second_time,
        commits.requests_run_over_a_commit_and_none_is_lost,
        commits.a_version_with_a_tensor_that_the_model_has_not_is_refused_whole,
        commits.an_update_that_a_dead_trainer_left_open_is_taken_over,
    ],
    ids=lambda check: check.__name__,
)
def test_vllm(check, site, tmp_path, monkeypatch) -> None:
    with through(site, tmp_path, monkeypatch, False) as server:
        check(server)


def test_sglang_which_takes_pauses_and_weights_with_the_admin_key_only(sglang_site, tmp_path, monkeypatch) -> None:
    with through(sglang_site, tmp_path, monkeypatch, True) as server:
        commits.the_server_computes_what_was_committed_also_the_second_time(server)
        commits.an_update_that_a_dead_trainer_left_open_is_taken_over(server)
