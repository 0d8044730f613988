"""A real run of two ranks whose rollouts are made by a service, which is killed and started again
in the middle of it."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.e2e.conftest import Runs, Site
from tests.rigs.sockets import free_port
from titan_grpo.commands.rollouts import KEY_VARIABLE
from titan_grpo.observe import names
from titan_grpo.observe.recorder import read_metrics

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


def test_a_run_outlives_the_service_that_makes_its_rollouts(
    runs: Runs, site: Site, service: ServiceProcess, gate: Path, tmp_path: Path
) -> None:
    out, record = tmp_path / "out", tmp_path / "record.jsonl"
    arguments = [
        f"--rollout.controller=http://{service.address}",
        f"--rollout.controller_key_env={KEY_VARIABLE}",
        "--rollout.task=gated:Gated",
        "--rollout.task_timeout_s=200",
        f"--rollout.prompts_per_step={PROMPTS}",
        "--rollout.max_completion_tokens=8",
        f"--rollout.record_path={record}",
        f"--training.steps={STEPS}",
    ]
    with runs.start(out, [site.url], *arguments) as training:
        training.wait_step(2)
        service.kill()
        service.start()
        gate.touch()
        assert training.finish() == 0, training.log
    assert any("the service lost this run's session" in line for line in training.lines), (
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
