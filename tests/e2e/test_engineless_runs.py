"""Real runs on a server without an engine: the completions that a trainer keeps, and what is shown
of the run elsewhere; and one whose sync process is killed and stopped."""

import signal
from contextlib import suppress
from pathlib import Path

import httpx
import psutil
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.conformance.engine import furthest
from tests.conformance.reference import Reference
from tests.e2e.conftest import WAIT_S, Replay, Runs, Training
from tests.faults.site import engineless_launcher
from tests.rigs.present import present
from tests.rigs.server_handle import ServerProcess, served
from tests.rigs.sockets import free_port
from tests.rigs.trainer_handle import wait_until
from titan_grpo.commands import report
from titan_grpo.observe import names
from titan_grpo.protocol.messages import Label
from titan_grpo.views.run import read_run

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

MANY = 1000
"""Steps of a run that a test ends: more than any machine makes meanwhile."""


def wanted_in(page: str, url: str) -> bool:
    """Whether a page of metrics has a step, and the lag of the server at ``url``."""
    lag = f'titan_grpo_server_lag{{server="{url.removeprefix("http://")}"}}'
    return "titan_grpo_step " in page and lag in page


def test_kept_completions_have_the_trainers_log_probabilities(runs: Runs, tmp_path: Path) -> None:
    replay = Replay(tmp_path / "replay.jsonl", 4, 4, 16).write(MANY)
    server = engineless_launcher(runs.model)(tmp_path / "server")
    out = tmp_path / "run"
    arguments = [f"--training.steps={MANY}", "--rollout.sample_every=3"]
    address = f"127.0.0.1:{free_port()}"
    arguments.append(f"--dashboards.metrics-address={address}")

    def shown() -> bool:
        with suppress(httpx.TransportError):
            page = httpx.get(f"http://{address}/metrics", trust_env=False)
            return page.status_code == 200 and wanted_in(page.text, server.url)
        return False

    try:
        server.wait_healthy(60.0)
        with runs.start(out, [server.url], *replay.arguments, *arguments, nproc=2) as training:
            # The run goes on until its page was seen.
            assert training.wait_until(shown), training.log
            training.wait_step(4)
            training.stop()
    finally:
        server.stop()
    events = EventAccumulator(str(next(out.rglob("events.out*")).parent)).Reload()
    assert [each.step for each in events.Tensors("completions/text_summary")][:2] == [1, 3]
    run = read_run(out)
    assert [(kept.step, kept.version) for kept in run.samples[:2]] == [(1, 0), (3, 2)]
    first = run.samples[0].completions
    assert len(first) == 4
    reference = Reference(runs.model)
    for kept in first:
        own = reference.logprobs([*kept.prompt, *kept.tokens])[len(kept.prompt) - 1 :]
        assert furthest(own, [present(value) for value in kept.trainer]) < 2e-3
        assert kept.engine == [-4.85] * len(kept.tokens)
    row = run.rows[0]
    assert row[names.LAG_MAX] == 0
    low_and_high = row[names.CLIPPED_LOW] + row[names.CLIPPED_HIGH]
    assert low_and_high == pytest.approx(row[names.CLIP_FRACTION])
    assert row[names.POLICY_LOSS] == pytest.approx(row[names.LOSS])
    assert {names.RATIO_MAX, names.IMPORTANCE_MAX, names.LOGPROB} <= row.keys()
    assert report.run([str(out)], {}) == 0
    assert "<main" in (out / "report.html").read_text()


STEPS = 160


def sync_process(training: Training, after: int = 0) -> psutil.Process:
    """The one that runs now, which is not ``after``: the run says that it starts another one just
    before it does."""
    found: list[psutil.Process] = []

    def there() -> bool:
        for process in psutil.Process(training.process.pid).children(recursive=True):
            with suppress(psutil.Error):  # it has just ended
                ours = "titan_grpo.sync.process" in process.cmdline()
                found.extend([process] if ours and process.pid != after else [])
        return bool(found)

    assert wait_until(there, WAIT_S), training.log
    return found[-1]


@pytest.mark.long
def test_a_run_whose_last_version_gets_no_slot_ends_in_order_and_says_so(
    runs: Runs, tmp_path: Path
) -> None:
    replay = Replay(tmp_path / "replay.jsonl", prompts=2, group=4, tokens=8).write(STEPS)
    arguments = [*replay.arguments, f"--training.steps={STEPS}"]
    # The first slot needs the sync process to be loaded: the wait for a slot must be longer.
    deadlines = {"lane": 25, "commit": 10, "shutdown": 5}
    arguments += [f"--weight_sync.{name}_deadline_s={s}" for name, s in deadlines.items()]
    with ServerProcess() as server, runs.start(tmp_path, [server.url], *arguments) as training:
        training.wait_step(5)
        sync_process(training).send_signal(signal.SIGSTOP)
        assert training.finish() == 0, training.log
    summary = runs.summary(tmp_path)
    assert (summary["steps"], summary["ended_by"]) == (STEPS, "")
    text = "\n".join(summary["errors"])
    assert f"no slot became free for version {STEPS}, the last" in text
    assert f"version {STEPS} is not saved: its image is not complete" in text
    # The flush waits for what servers can still get.
    assert f"did not hold version {STEPS} " not in text
    assert (tmp_path / "hf" / "model.safetensors").exists()


@pytest.mark.long
def test_a_run_whose_sync_process_is_killed_takes_all_steps_and_ends_on_the_newest_version(
    runs: Runs, tmp_path: Path
) -> None:
    replay = Replay(tmp_path / "replay.jsonl", prompts=2, group=4, tokens=8).write(STEPS)
    arguments = [*replay.arguments, f"--training.steps={STEPS}"]
    with ServerProcess() as server:
        with runs.start(tmp_path, [server.url], *arguments, nproc=2) as training:
            training.wait_step(5)
            killed = sync_process(training)
            killed.send_signal(signal.SIGKILL)
            training.wait_step(10)
            assert training.wait_until(lambda: any("is started again" in s for s in training.shown))
            stopped = sync_process(training, after=killed.pid)
            stopped.send_signal(signal.SIGSTOP)
            training.wait_step(training.step + 10)
            stopped.send_signal(signal.SIGCONT)
            assert training.finish() == 0, training.log
        shown = Label.parse(server.run(served())["visible"][-1][0])
    summary = runs.summary(tmp_path)
    assert summary["steps"] == STEPS
    assert shown is not None
    assert shown.version == STEPS
    assert any("the sync process ended with exit code -9" in error for error in summary["errors"])
