"""Real runs on a server without an engine, whose sync process is stopped, or one of whose ranks is
killed."""

import json
import signal
from pathlib import Path

import psutil
import pytest

from tests.e2e.conftest import Replay, Runs, Training
from tests.rigs.server_handle import ServerProcess, served
from titan_grpo.protocol.messages import Label

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.timeout(600)]

STEPS = 160


def sync_process(training: Training) -> psutil.Process:
    processes = psutil.Process(training.process.pid).children(recursive=True)
    (found,) = [p for p in processes if "titan_grpo.sync.process" in p.cmdline()]
    return found


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


@pytest.mark.parametrize("rank", [0, 1])
def test_torchrun_restarts_a_run_whose_rank_is_killed_from_its_last_checkpoint(
    rank: int, runs: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")  # docs/cluster.md
    # Steps so long that the run is not over when its rank is killed.
    replay = Replay(tmp_path / "replay.jsonl", prompts=8, group=8, tokens=440).write(10)
    settings = ["--training.seq_len=512", "--checkpoint.interval=2", "--training.steps=10"]
    node = ("--standalone", "--max-restarts=1")
    with ServerProcess() as server:
        with runs.start(
            tmp_path, [server.url], *replay.arguments, *settings, nproc=2, node=node
        ) as training:
            training.wait_step(4)
            (killed,) = [
                process
                for process in psutil.Process(training.process.pid).children()
                if process.environ().get("RANK") == str(rank)
            ]
            killed.kill()
            assert training.finish() == 0, training.log
        shown = Label.parse(server.run(served())["visible"][-1][0])
    assert not any("--max-restarts" in line for line in training.shown)
    summary = runs.summary(tmp_path)
    assert (summary["steps"], summary["ended_by"], len(summary["resumes"])) == (10, "", 1)
    rows = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert {json.loads(row)["step"] for row in rows} == set(range(1, 11))
    assert shown is not None
    assert shown.version == 10
