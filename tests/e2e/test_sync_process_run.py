"""A real trainer on two ranks whose sync process is killed and stopped: as many steps, and the
server, which has no engine, ends on the newest version."""

import os
import signal

import psutil
import pytest

from tests.rigs.server_handle import ServerProcess, served
from titan_grpo.protocol.messages import Label

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

STEPS = 120


def sync_process(training) -> psutil.Process:
    """The one that runs now."""
    (found,) = [
        process
        for process in psutil.Process(training.process.pid).children(recursive=True)
        if "titan_grpo.sync.sync_main" in process.cmdline()
    ]
    return found


def test_a_run_whose_sync_process_is_killed_takes_all_steps_and_ends_on_the_newest_version(
    runs, make_replay, tmp_path
):
    replay = make_replay(tmp_path / "replay.jsonl", prompts=2, group=4, tokens=8).write(STEPS)
    arguments = [*replay.arguments, f"--training.steps={STEPS}"]
    with ServerProcess() as server:
        with runs.start(tmp_path, [server.url], *arguments, nproc=2) as training:
            training.wait_step(5)
            killed = sync_process(training)
            killed.send_signal(signal.SIGKILL)
            training.wait_step(10)
            assert training.wait_until(lambda: any("is started again" in s for s in training.shown))
            os.kill(sync_process(training).pid, signal.SIGSTOP)
            training.wait_step(training.step + 10)
            os.kill(sync_process(training).pid, signal.SIGCONT)
            assert training.finish() == 0, training.log
        shown = Label.parse(server.run(served())["visible"][-1][0])
    summary = runs.summary(tmp_path)
    assert summary["steps"] == STEPS
    assert shown is not None
    assert shown.version == STEPS
    assert any("the sync process ended with exit code -9" in error for error in summary["errors"])
