"""What a run makes of a weight sync that fails, and of a threshold of [alerts]: it says so at the
next step, and stops where it is told to."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.conftest import Replay, Runs, Site
from tests.rigs.proxy import Act, Proxy, address_of
from tests.rigs.server_handle import ServerProcess
from tests.rigs.sockets import free_port
from titan_grpo.observe.recorder import read_metrics

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

MAX_LAG = 200
"""So many versions that their lane has long met the failure when the run ends."""


@pytest.fixture
def between(site: Site) -> Iterator[Proxy]:
    """A proxy in front of the shared server."""
    with Proxy(address_of(site.url)) as proxy:
        yield proxy
        proxy.open()
        site.assert_serves()


def newest_held(lines: list[str]) -> int:
    """The version that the only server holds, as the last progress line says; -1: unknown."""
    held = [
        line.rpartition("=")[2] for line in lines if line.startswith("step") and "versions" in line
    ]
    return int(held[-1]) if held and held[-1].isdigit() else -1


@pytest.fixture
def endless(tmp_path: Path) -> list[str]:
    """Arguments of a run on more recorded steps than any test waits for."""
    replay = Replay(tmp_path / "replay.jsonl", prompts=2, group=4, tokens=8).write(3000)
    return [*replay.arguments, "--training.steps=3000"]


def test_with_stop_the_first_failed_sync_ends_the_run_with_server_and_version(
    runs: Runs, between: Proxy, endless: list[str], tmp_path: Path
) -> None:
    with runs.start(
        tmp_path, [between.url], *endless, "--weight_sync.on_sync_error=stop"
    ) as training:
        training.wait_step(2)
        between.script(Act.FAIL, "/update_weights")
        assert training.finish() != 0
    assert training.exitcode == 1
    assert "SyncError" in training.cause, training.log
    assert f"{between.url}, version " in training.cause
    assert "/update_weights was refused with 500" in training.cause


@pytest.mark.long
def test_with_continue_it_is_said_counted_and_tried_again(
    runs: Runs, between: Proxy, endless: list[str], tmp_path: Path
) -> None:
    with runs.start(
        tmp_path, [between.url], *endless, "--weight_sync.on_sync_error=continue"
    ) as training:
        training.wait_step(2)
        between.script(Act.FAIL, "/update_weights")
        assert training.wait_until(
            lambda: any("weight sync: http" in line for line in training.shown)
        ), training.log
        failed_at = training.step
        assert training.wait_until(lambda: newest_held(training.shown) > failed_at), training.log
        training.stop()
    # The alert of made-up log-probabilities may come before it.
    errors = runs.summary(tmp_path)["errors"]
    error = next(each for each in errors if not each.startswith("alert "))
    assert f"{between.url}, version " in error
    assert "500" in error


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


@pytest.mark.long
def test_a_fleet_that_commits_nothing_for_max_lag_versions_stops_the_run_naming_every_server(
    runs: Runs, between: Proxy, endless: list[str], tmp_path: Path
) -> None:
    with runs.start(
        tmp_path, [between.url], *endless, f"--weight_sync.max_lag={MAX_LAG}"
    ) as training:
        training.wait_step(3)
        between.shut()
        assert training.finish() != 0
    assert training.exitcode == 1
    assert (
        f"no server has committed anything for {MAX_LAG} versions (weight_sync.max_lag)"
        in training.cause
    ), training.log
    assert f"{between.url} unknown, last error: " in training.cause
    steps = [row["step"] for row in read_metrics(tmp_path / "metrics.jsonl")]
    last = runs.summary(tmp_path)["versions_committed"][between.url]["last"]
    assert steps[-1] - last <= MAX_LAG + 2, "the commit may be noticed one boundary late"


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
