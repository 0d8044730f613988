"""A real run of two ranks whose rollouts are made by a service, which is killed and started again
in the middle of it; the completions that it keeps, and what is shown of it elsewhere."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import httpx
import psutil
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from scripts.common import keys
from tests.conformance.engine import MAX_DIFFERENCE, furthest
from tests.conformance.reference import Reference
from tests.e2e.conftest import Runs, Site
from tests.rigs.present import present
from tests.rigs.sockets import free_port
from tests.rigs.trainer_handle import wait_until
from titan_grpo.commands import report
from titan_grpo.commands.rollouts import KEY_VARIABLE
from titan_grpo.observe import names
from titan_grpo.observe.recorder import read_metrics
from titan_grpo.views.run import read_run

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

STEPS, PROMPTS = 8, 4

GATED = """
import asyncio
from pathlib import Path
from titan_grpo.rollout.tasks.built_in import Digits


class Gated(Digits):
    async def reward(self, prompt, text, token_ids):
        while prompt.index >= {first} and not Path({gate!r}).exists():
            await asyncio.wait([asyncio.create_task(asyncio.Event().wait())], timeout=0.05)
        return await super().reward(prompt, text, token_ids)
"""
"""Gives no reward from one prompt on before a file is there: until then no run comes to its end."""


class ServiceProcess:
    """``titan-grpo rollouts`` at one address, which may be killed and started again."""

    def __init__(self, folder: Path, keys: dict[str, str]) -> None:
        self._log, self._env = folder / "service.log", {**os.environ, **keys}
        self.address = f"127.0.0.1:{free_port()}"
        self.start()

    def start(self) -> None:
        """Start it, and wait until it listens."""
        command = [sys.executable, "-m", "titan_grpo.cli", "rollouts", "--bind", self.address]
        self._errors = self._log.open("a")
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=self._errors, text=True, env=self._env
        )
        assert self.process.stdout is not None
        assert f"serving at http://{self.address}, with a key" in self.process.stdout.readline(), (
            self._log.read_text()
        )

    def kill(self) -> None:
        """SIGKILL; its rollout process ends by itself."""
        (child,) = psutil.Process(self.process.pid).children()
        self.process.kill()
        self.process.communicate(timeout=60)
        self._errors.close()
        psutil.wait_procs([child], timeout=60)
        assert not child.is_running()

    def stop(self) -> int:
        """SIGTERM; its exit code."""
        self.process.terminate()
        self.process.communicate(timeout=60)
        self._errors.close()
        return self.process.returncode


@pytest.fixture
def gate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file that lets the task of this run go on."""
    path = tmp_path / "gate"
    (tmp_path / "gated.py").write_text(GATED.format(first=3 * PROMPTS, gate=str(path)))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    return path


@pytest.fixture
def service(
    tmp_path: Path, site: Site, gate: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[ServiceProcess]:
    monkeypatch.setenv(KEY_VARIABLE, "the-controllers-key")
    one = ServiceProcess(tmp_path, {"TITAN_GRPO_TEST_API_KEY": site.access.api_key})
    yield one
    if one.process.poll() is None:
        one.stop()


@pytest.fixture
def page(site: Site) -> Callable[[str], bool]:
    """Whether a page of metrics has a step, and the lag of the server."""
    lag = f'titan_grpo_server_lag{{server="{site.url.removeprefix("http://")}"}}'

    def shown(address: str) -> bool:
        with suppress(httpx.TransportError):
            found = httpx.get(f"http://{address}/metrics", trust_env=False)
            return (
                found.status_code == 200 and "titan_grpo_step " in found.text and lag in found.text
            )
        return False

    return shown


def test_a_run_outlives_the_service_that_makes_its_rollouts_and_shows_what_they_are(
    runs: Runs,
    site: Site,
    service: ServiceProcess,
    gate: Path,
    page: Callable[[str], bool],
    tmp_path: Path,
) -> None:
    out, record, address = tmp_path / "out", tmp_path / "record.jsonl", f"127.0.0.1:{free_port()}"
    settings = {
        "rollout.controller": f"http://{service.address}",
        "rollout.controller_key_env": KEY_VARIABLE,
        "rollout.task": "gated:Gated",
        "rollout.task_timeout_s": 200,
        "rollout.prompts_per_step": PROMPTS,
        "rollout.max_completion_tokens": 8,
        "rollout.record_path": record,
        "rollout.sample_every": 3,
        "dashboards.metrics-address": address,
        "training.steps": STEPS,
    }
    with runs.start(out, [site.url], *keys(settings), nproc=2) as training:
        training.wait_step(2)
        assert wait_until(lambda: page(address), 60.0), training.log
        service.kill()
        service.start()
        gate.touch()
        assert training.finish() == 0, training.log
    assert any("the rollout service lost this run's session" in line for line in training.lines), (
        training.log
    )
    site.assert_serves()
    assert site.label().version == STEPS
    summary = runs.summary(out)
    assert summary["versions_committed"][site.url]["last"] == STEPS
    assert summary["digest_mismatches"] == 0
    # A commit whose calls went through the service at that moment was made again.
    assert all("the rollout service lost" in error for error in summary["errors"]), summary[
        "errors"
    ]
    for row in read_metrics(out / "metrics.jsonl"):
        # The server computes what the trainer does: it has the trainer's weights.
        assert row.get(names.ON_POLICY_GAP, 0.0) < 0.02, row
    batches = [json.loads(line)["groups"] for line in record.read_text().splitlines()]
    prompts = [group["prompt"]["index"] for groups in batches for group in groups]
    assert len({*prompts}) == len(prompts) == STEPS * PROMPTS
    assert max(prompts) < (STEPS + 2) * PROMPTS
    assert service.stop() == 0
    check_shown(out, Reference(runs.model))


def check_shown(out: Path, begun: Reference) -> None:
    """Completions that the run kept, its metrics and its page. ``begun``: its first weights."""
    events = EventAccumulator(str(next(out.rglob("events.out*")).parent)).Reload()
    assert [each.step for each in events.Tensors("completions/text_summary")][:2] == [1, 3]
    run = read_run(out)
    assert [(kept.step, kept.version) for kept in run.samples[:2]] == [(1, 0), (3, 2)]
    assert run.samples[0].completions
    for kept in run.samples[0].completions:
        own = begun.logprobs([*kept.prompt, *kept.tokens])[len(kept.prompt) - 1 :]
        assert furthest(own, [present(value) for value in kept.trainer]) < 2e-3
        assert furthest(own, kept.engine) <= MAX_DIFFERENCE
    row = run.rows[0]
    assert row[names.LAG_MAX] == 0
    low_and_high = row[names.CLIPPED_LOW] + row[names.CLIPPED_HIGH]
    assert low_and_high == pytest.approx(row[names.CLIP_FRACTION])
    assert row[names.POLICY_LOSS] == pytest.approx(row[names.LOSS])
    assert {names.RATIO_MAX, names.IMPORTANCE_MAX, names.LOGPROB} <= row.keys()
    assert report.run([str(out)], {}) == 0
    assert "<main" in (out / "report.html").read_text()


@pytest.mark.long
def test_a_run_outlives_a_killed_rollout_process_and_uses_each_prompt_once_in_order(
    runs: Runs, site: Site, tmp_path: Path
) -> None:
    out, record, steps = tmp_path / "out", tmp_path / "record.jsonl", 12
    settings = {
        "rollout.prompts_per_step": PROMPTS,
        "rollout.record_path": record,
        "training.steps": steps,
    }
    with runs.start(out, [site.url], *keys(settings), nproc=2) as training:
        training.wait_step(3)
        processes = psutil.Process(training.process.pid).children(recursive=True)
        (rollouts,) = [p for p in processes if "titan_grpo.rollout.worker" in p.cmdline()]
        rollouts.kill()
        assert training.finish() == 0, training.log
    site.assert_serves()
    summary = runs.summary(out)
    assert summary["versions_committed"][site.url]["last"] == steps
    (error,) = summary["errors"]
    assert error.startswith("the rollout process ended with signal 9 (out of memory, maybe), and")
    batches = [json.loads(line)["groups"] for line in record.read_text().splitlines()]
    prompts = [group["prompt"]["index"] for groups in batches for group in groups]
    assert prompts == [*range(steps * PROMPTS)]
