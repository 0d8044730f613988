"""A version is committed under 60 running requests of the rollout process, on a real vLLM: none is
lost, none made twice."""

import json
import threading
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from tests.conformance.commits import sender
from tests.conformance.crowd import ENDLESS, at_its_end, without_end
from tests.conformance.engine import EngineUnderTest, remake
from tests.e2e.conftest import Runs, Site
from tests.rigs.proxy import Headers, Proxy, address_of
from titan_grpo.engines.generation import Sampling
from titan_grpo.protocol.messages import ServerState
from titan_grpo.rollout.client import RolloutClient
from titan_grpo.rollout.messages import RolloutSpec

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

API_KEY_VARIABLE = "TITAN_GRPO_TEST_IN_FLIGHT_KEY"
PROMPTS, GROUP, BEFORE, AFTER = 4, 15, 40, 41
"""60 requests: the server runs 64 at once, and one more has to begin beside them."""
SPEC = RolloutSpec(
    model_dir="",
    base_version=BEFORE,
    prompts_per_step=PROMPTS,
    group_size=GROUP,
    max_completion_tokens=ENDLESS,
    max_staleness=0,
    api_key_env=API_KEY_VARIABLE,
)
WAIT_S = 300.0


def ended_by_the_update(seed: int, folder: Path) -> Path:
    """Weights whose requests are at work until the next version, which ends them: the commit meets
    all of them, however long it takes to begin."""
    return (without_end if seed == BEFORE else at_its_end)(remake(seed, folder))


class Witness(Proxy):
    """Stands before the server: which requests came by, and which answers went back. A request's
    seed is its own.

    It lets them through once all are there: the first ones would end before the last ones begin on
    a slow machine.
    """

    upstream_s = WAIT_S

    def __init__(self, site: Site) -> None:
        self.asked: list[int] = []
        self.answered: list[int] = []
        self._changed = threading.Condition()
        super().__init__(address_of(site.url))

    def forward(
        self, method: str, target: str, headers: Headers, body: bytes
    ) -> tuple[int, Headers, bytes]:
        seed = json.loads(body)["seed"]
        with self._changed:
            self.asked.append(seed)
            self._changed.notify_all()
            self._changed.wait_for(self.all_asked, WAIT_S)
        answer = super().forward(method, target, headers, body)
        with self._changed:
            self.answered.append(seed)
        return answer

    def all_asked(self) -> bool:
        return len(self.asked) >= PROMPTS * GROUP

    def wait_asked(self) -> None:
        """Until all requests came by."""
        with self._changed:
            assert self._changed.wait_for(self.all_asked, WAIT_S), len(self.asked)

    def saw_each_request_once(self) -> bool:
        return len(set(self.asked)) == len(self.asked) == PROMPTS * GROUP and sorted(
            self.asked
        ) == sorted(self.answered)


def bounds_of_all(client: RolloutClient) -> list[tuple[int, int]]:
    """Versions of the 60 completions, which are all there are."""
    groups = client.next_batch(BEFORE, PROMPTS, WAIT_S)
    completions = [c for group in groups for c in group.completions]
    assert sorted(group.prompt.index for group in groups) == list(range(PROMPTS))
    assert len(completions) == PROMPTS * GROUP
    assert all(len(c.token_ids) == len(c.logprobs) for c in completions)
    assert {c.finish_reason for c in completions} == {"stop"}
    counters = client.counters()
    assert counters["requests"] == PROMPTS * GROUP
    assert not {"outages", "interrupted", "skipped", "moved"} & set(counters), counters
    return [(c.version_first, c.version_last) for c in completions]


def test_an_update_under_60_running_requests_loses_none_and_makes_none_twice(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(API_KEY_VARIABLE, site.access.api_key)
    spec = replace(SPEC, model_dir=site.server.spec.model)
    with (
        sender(EngineUnderTest(site.server, tmp_path, remake=ended_by_the_update)) as trainer,
        closing(RolloutClient(spec)) as client,
        Witness(site) as witness,
    ):
        trainer.sync(BEFORE, BEFORE)
        client.start(WAIT_S)
        weights, _ = trainer.make(AFTER)
        with trainer.link(weights) as link:
            staged = trainer.stage(link, weights, AFTER)
            client.set_server(ServerState(witness.url, BEFORE, True, trainer.label(BEFORE)))
            witness.wait_asked()
            # Behind them: they have begun.
            behind = site.speak.generate([1, 40, 41], Sampling(max_tokens=4), WAIT_S)
            site.driver.run(behind)
            committing = ServerState(
                witness.url, BEFORE, False, trainer.label(BEFORE), committing=AFTER
            )
            client.set_server(committing)
            # Its answer says, too, that the rollouts know of the commit.
            assert client.in_flight(WAIT_S) == {witness.url: PROMPTS * GROUP}
            assert trainer.apply(link, staged, trainer.label(AFTER)).ok
            client.set_server(ServerState(witness.url, AFTER, False, trainer.label(AFTER)))
            bounds = bounds_of_all(client)
        assert set(bounds) == {(BEFORE, AFTER)}, bounds
        assert witness.saw_each_request_once()


@pytest.mark.long
def test_a_run_that_finishes_requests_before_each_commit_and_computes_kv_anew(
    runs: Runs, site: Site, tmp_path: Path
) -> None:
    """The whole path: lanes ask the rollouts to drain, the engine is asked to drop its KV, and
    training goes on."""
    out = tmp_path / "run"
    summary = runs.complete(
        out,
        [site.url],
        "--training.steps=3",
        "--rollout.no-in-flight-weight-updates",
        "--weight_sync.kv_after_update=recompute",
    )
    assert summary["steps"] == 3
    assert site.label().version == 3
    for line in (out / "metrics.jsonl").read_text().splitlines():
        assert json.loads(line)["staleness/max"] <= 1
    site.assert_serves()
