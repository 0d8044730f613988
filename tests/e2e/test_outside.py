"""A run fed by an environment through a real Atropos API: the environment samples on the run's own
vLLM server."""

import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager

import pytest

from tests.rigs.atropos_api import AtroposApi, until
from titan_grpo.engines.generation import Sampling, salt
from titan_grpo.engines.http import SyncDriver
from titan_grpo.errors import PeerError
from titan_grpo.observe import names
from titan_grpo.observe.recorder import read_metrics
from titan_grpo.protocol.messages import Label

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

MASKED, SENTINEL = -100, 1.0
GROUP, PROMPTS, TOKENS, STEPS = 4, 4, 12, 5
AHEAD = 8
"""Groups that the environment lets wait in the API."""


class Environment:
    """Samples groups and scores the share of digits: it knows the engine, not the trainer."""

    def __init__(self, api: AtroposApi, site) -> None:
        self._api, self._site, self._before = api, site, site.driver.run(site.speak.label())
        self._ended = threading.Event()
        self.error: PeerError | None = None

    def _work(self) -> None:
        with closing(SyncDriver(self._site.url, self._site.access.api_key)) as driver:
            try:
                until(
                    lambda: driver.run(self._site.speak.label()) != self._before,
                    "the run has published its first version",
                )
                number = self._api.environment(GROUP)
                while not self._ended.is_set():
                    if self._api.ask("GET", "/status")["queue_size"] >= AHEAD:
                        self._ended.wait(0.05)
                    else:
                        self._api.post(self._group(driver, number))
            except PeerError as error:
                self.error = error

    def _group(self, driver: SyncDriver, number: int) -> dict:
        label = driver.run(self._site.speak.label())
        prompt = [1, 40, 41, 42]
        sampling = Sampling(max_tokens=TOKENS, cache_salt=salt(label))
        samples = [
            driver.run(self._site.speak.generate(prompt, sampling, 30.0)) for _ in range(GROUP)
        ]
        return {
            "tokens": [[*prompt, *s.token_ids] for s in samples],
            "masks": [[MASKED] * len(prompt) + list(s.token_ids) for s in samples],
            # Ids 21 to 30 are the digits of the tiny vocabulary.
            "scores": [sum(21 <= i <= 30 for i in s.token_ids) / len(s.token_ids) for s in samples],
            "inference_logprobs": [[SENTINEL] * len(prompt) + list(s.logprobs) for s in samples],
            "group_overrides": {"policy_version": Label.parse(label).version},
            "env_id": number,
        }

    @contextmanager
    def at_work(self) -> Iterator["Environment"]:
        thread = threading.Thread(target=self._work, daemon=True)
        thread.start()
        try:
            yield self
        finally:
            self._ended.set()
            thread.join(30)


def test_a_run_trains_on_what_an_environment_sampled_and_the_log_probabilities_fit_their_tokens(
    runs, site, atropos_python, tmp_path
):
    settings = {
        "rollout.source": "atropos",
        "rollout.prompts_per_step": PROMPTS,
        "rollout.group_size": GROUP,
        "rollout.max_completion_tokens": TOKENS,
        "rollout.max_staleness": 3,
        "training.steps": STEPS,
    }
    with AtroposApi(atropos_python) as api:
        arguments = [
            f"--{key}={value}"
            for key, value in {**settings, "rollout.atropos_url": api.url}.items()
        ]
        environment = Environment(api, site)
        with runs.start(tmp_path, [site.url], *arguments) as training, environment.at_work():
            assert training.finish() == 0, training.log
    assert environment.error is None
    summary = runs.summary(tmp_path)
    assert summary["versions_committed"][site.url]["last"] == STEPS
    metrics = read_metrics(tmp_path / "metrics.jsonl")
    assert [row["step"] for row in metrics] == list(range(1, STEPS + 1))
    # The first step is on-policy. Moved by one token, the gap would be that of two different
    # tokens.
    assert metrics[0][names.STALENESS_MAX] == 0
    assert metrics[0][names.LOGPROB_GAP] < 0.02
    assert max(row[names.STALENESS_MAX] for row in metrics) <= 3
