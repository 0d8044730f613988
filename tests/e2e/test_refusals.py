"""What a run says, and with which exit code, when it cannot start."""

import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from scripts.common import keys
from tests.e2e.conftest import Replay, Runs
from tests.rigs.server_handle import ServerProcess
from tests.rigs.sockets import free_port
from tests.rigs.tasks import UNREADY
from titan_grpo.titan.flavors import FLAVORS
from titan_grpo.titan.tiny import write_tiny_model

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

STARTUP_S = 15


@pytest.mark.long
def test_a_trainer_that_torchrun_did_not_start_says_so_in_one_line(runs: Runs) -> None:
    command = [sys.executable, "-m", "titan_grpo.train", f"--job.config_file={runs.recipe}"]
    env = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
    done = subprocess.run(
        [*command, f"--model.hf_assets_path={runs.model}"],
        capture_output=True,
        text=True,
        cwd=runs.root,
        timeout=120,
        check=False,
        env=env,
    )
    assert done.returncode == 2
    (line,) = [each for each in done.stderr.splitlines() if each.startswith("titan-grpo: ")]
    assert all(word in line for word in ("by torchrun", "LOCAL_WORLD_SIZE", "MASTER_PORT"))


def test_under_torchrun_one_rank_says_it_also_where_it_comes_last(
    runs: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    late = "import os, threading\nif os.environ.get('RANK') == '0': threading.Event().wait(4)\n"
    (tmp_path / "late").mkdir()
    (tmp_path / "late" / "sitecustomize.py").write_text(late)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "late"), prepend=os.pathsep)
    arguments = ["--parallelism.context_parallel_degree=2"]
    with runs.start(tmp_path / "run", ["http://127.0.0.1:9"], *arguments, nproc=2) as training:
        assert training.finish() != 0
    complaints = [line for line in training.lines if line.startswith("titan-grpo: ")]
    assert len(complaints) == 1, training.log
    assert "parallelism.context_parallel_degree must be 1" in complaints[0]
    assert training.cause == complaints[0].removeprefix("titan-grpo: ")
    assert training.exitcode == 2


def test_a_signal_before_the_task_is_ready_leaves_a_summary(runs: Runs, tmp_path: Path) -> None:
    words = [f"--rollout.task={UNREADY}", "--training.steps=2"]
    with runs.start(tmp_path, ["http://127.0.0.1:9"], *words) as training:
        assert training.wait_until(lambda: "waiting for task" in "".join(training.shown))
        assert training.stop() != 0
    summary = runs.summary(tmp_path)
    assert (summary["ended_by"], summary["steps"]) == ("SIGTERM", 0), training.log


def test_a_server_that_is_not_there_is_named_with_what_was_tried(
    runs: Runs, small_replay: Replay, tmp_path: Path
) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    arguments = [
        *small_replay.arguments,
        # The sync process tries it after its imports.
        f"--weight_sync.startup_deadline_s={STARTUP_S}",
        "--weight_sync.backoff_s=0.2",
    ]
    with runs.start(tmp_path, [url], *arguments, "--training.steps=2") as training:
        assert training.finish() != 0
    said = f"no server committed version 0 within {STARTUP_S} s"
    assert said in training.cause, training.log
    assert f"tried {url}" in training.cause
    assert "/model_info failed" in training.cause
    assert "Connection refused" in training.cause
    waits = [line for line in training.shown if line.startswith("waiting for the first commit")]
    assert re.search(r"\]; http\S+: connect failed: .*Connection refused", waits[-1])


@pytest.mark.long
def test_a_run_ends_at_once_where_every_server_refuses_it_for_good(
    runs: Runs, tmp_path: Path
) -> None:
    write_tiny_model("qwen3_moe", tmp_path / "model", seed=1)
    name, flavor = FLAVORS["qwen3_moe"]
    settings = {"model.name": name, "model.flavor": flavor}
    settings |= {"weight_sync.startup_deadline_s": "3600"}
    words = [*keys(settings), "--grpo.router_replay"]
    run = replace(runs, model=tmp_path / "model")
    with (
        ServerProcess(args=["--no-routes"]) as server,
        run.start(tmp_path / "run", [server.url], *words) as training,
    ):
        assert training.finish() != 0  # long before startup_deadline_s
    assert "no server can serve this run" in training.cause, training.log
    assert f"{server.url}: this server does not send the experts" in training.cause
