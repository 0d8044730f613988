"""What a run makes of a weight sync that fails, and of a threshold of [alerts]: it says so at the
next step, and stops where it is told to."""

import sys
from pathlib import Path

import pytest

from tests.e2e.conftest import Replay, Runs, Site
from tests.rigs.proxy import Act, Proxy, address_of
from tests.rigs.server_handle import ServerProcess
from tests.rigs.sockets import free_port
from titan_grpo.observe.recorder import read_metrics

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]


def test_with_stop_the_first_failed_sync_ends_the_run_with_server_and_version(
    runs: Runs, site: Site, tmp_path: Path
) -> None:
    replay = Replay(tmp_path / "replay.jsonl", prompts=2, group=4, tokens=8).write(3000)
    arguments = [*replay.arguments, "--training.steps=3000", "--weight_sync.on_sync_error=stop"]
    with Proxy(address_of(site.url)) as between:
        with runs.start(tmp_path, [between.url], *arguments) as training:
            training.wait_step(2)
            between.script(Act.FAIL, "/update_weights")
            assert training.finish() != 0
        site.assert_serves()
    assert training.exitcode == 1
    assert "SyncError" in training.cause, training.log
    assert f"{between.url}, version " in training.cause
    assert "/update_weights was refused with 500" in training.cause


def test_a_server_without_the_last_version_at_the_end_is_an_error_of_the_summary(
    runs: Runs, small_replay: Replay, tmp_path: Path
) -> None:
    absent = f"http://127.0.0.1:{free_port()}"
    steps = ["--training.steps=2", "--weight_sync.backoff_s=0.2"]
    with (
        ServerProcess(log_path=tmp_path / "server.log") as server,
        runs.start(tmp_path, [server.url, absent], *small_replay.arguments, *steps) as training,
    ):
        assert training.finish() == 0, training.log
    summary = runs.summary(tmp_path)
    assert (
        [e for e in summary["errors"] if "did not hold version 2 at the end" in e]
        == [e for e in summary["errors"] if e.startswith(f"{absent} did not")]
        != []
    )
    assert summary["versions_committed"][server.url]["last"] == 2
    (error,) = [e for e in summary["errors"] if e.startswith(f"{absent} did not")]
    # A server of unknown state is not waited for, and the deadline is 60 s.
    assert float(error.split(" at the end, after ")[1].split(" s;")[0]) < 60, error
    assert "last error: connect failed: " in error


@pytest.mark.long
def test_a_run_that_an_alert_stops_saves_its_state_and_goes_on_from_it(
    runs: Runs, site: Site, tmp_path: Path
) -> None:
    out, told = tmp_path / "out", tmp_path / "told"
    script = tmp_path / "tell.py"
    script.write_text(f"import sys\nopen({str(told)!r}, 'a').write(sys.argv[1] + '\\n')\n")
    size = ["--training.steps=8", "--rollout.prompts_per_step=2", "--rollout.group_size=2"]
    alerts = [
        "--alerts.run=version >= 1",
        f"--alerts.command={sys.executable} {script}",
        "--alerts.stop=reward/mean >= 0 for 4",
    ]
    with runs.start(out, [site.url], *size, *alerts, nproc=2) as training:
        assert training.finish() != 0, training.log
        assert "alerts.stop reward/mean >= 0 for 4" in training.cause
    assert [row["step"] for row in read_metrics(out / "metrics.jsonl")] == [1, 2, 3, 4]
    assert (out / "checkpoint" / "step-4" / ".metadata").is_file()
    errors = runs.summary(out)["errors"]
    assert [text.partition(" (")[0] for text in errors] == [
        "alert at step 2: version >= 1",
        "alert at step 4: reward/mean >= 0 for 4",
    ]
    assert told.read_text().startswith("step 2: version >= 1")

    summary = runs.complete(out, [site.url], *size, nproc=2)
    assert (summary["steps"], summary["resumes"]) == (8, [5])
