"""The schedule of faults and the verdicts of a soak, on numbers; and a short one with real
processes: the long one's checks except memory, which takes a long run to be told."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.rigs.census import Holdings
from tests.rigs.trainer_handle import Step
from tests.soak.faults import CALLS, Kind, calm_versions, schedule
from tests.soak.judge import JUDGED_CALMS, STALL_S, Seen, growth, judge, mismatches, went_back

URLS = ("http://a", "http://b")


def test_every_kind_comes_equally_often_and_the_first_server_is_never_restarted() -> None:
    faults = schedule(0, 800, 50, 10, 2)
    counts = {kind: sum(f.kind is kind for f in faults) for kind in Kind}
    assert set(counts.values()) == {len(faults) // len(Kind)}
    assert {f.server for f in faults if f.kind is Kind.RESTART_SERVER} == {1}
    assert all(bool(f.path) == (f.kind in CALLS) for f in faults)


@pytest.mark.parametrize(
    ("versions", "window", "calm"), [(7, 3, (3, 6, 7)), (6, 3, (3, 6)), (2, 3, (2,)), (3, 3, (3,))]
)
def test_the_last_version_is_always_calm(versions: int, window: int, calm: tuple[int, ...]) -> None:
    assert calm_versions(versions, window) == calm


def holding(**values: int) -> Holdings:
    one = Holdings(rss=100, pss=50, fds=10, memfds=2, threads=4)
    return replace(one, **values)


def healthy(calms: int = JUDGED_CALMS) -> Seen:
    return Seen(
        run_id="r",
        digests={1: "d1", 2: "d2"},
        visible={url: [("r:1:f", "d1"), ("r:2:f", "d2")] for url in URLS},
        steps=[Step(1.0, wall=0.2, no_core=0.0, blocked=0.001, ran=0.2)],
        calms=[{"trainer": holding()} for _ in range(calms)],
    )


def failed(seen: Seen) -> list[str]:
    return [verdict.what for verdict in judge(seen) if not verdict.ok]


def test_a_healthy_run_passes() -> None:
    assert failed(healthy()) == []


def test_weights_under_the_wrong_label_of_another_run_or_unusable_are_mismatches() -> None:
    for wrong in (("r:1:f", "d2"), ("other:1:f", "d1"), ("unusable", "d1"), ("r:9:f", "d1")):
        seen = healthy()
        seen.visible[URLS[0]].append(wrong)
        assert len(mismatches(seen)) == 1
        assert "served weights that are no version" in failed(seen)
    seen = healthy()
    seen.visible[URLS[0]].insert(0, ("default", "own"))
    assert mismatches(seen) == []


def test_a_version_that_goes_back_is_seen_also_over_a_restart() -> None:
    assert went_back(
        [("r:1:f", ""), ("r:3:f", ""), ("default", ""), ("r:2:f", ""), ("r:3:f", "")]
    ) == ["r:2:f"]


def test_a_step_that_waited_is_a_stall_and_one_without_a_core_is_none() -> None:
    seen = healthy()
    seen.steps.append(Step(2.0, wall=3.0, no_core=2.8, blocked=2.9, ran=0.2))
    assert failed(seen) == []
    seen.steps.append(Step(3.0, wall=0.3 + STALL_S, no_core=0.0, blocked=0.0, ran=0.2))
    assert failed(seen) == ["steps that waited"]


def test_growth_after_the_warm_up_is_judged_in_long_runs_only() -> None:
    assert growth([9, 9, 1, 2, 3, 4, 5, 6, 7, 8]) == (2.5, 6.5)
    for calms, ends in ((JUDGED_CALMS, ["memory, trainer"]), (JUDGED_CALMS - 1, [])):
        seen = healthy(calms)
        for index, calm in enumerate(seen.calms):
            calm["trainer"] = holding(rss=1000 + 20 * index)
        assert failed(seen) == ends


def test_descriptors_memfds_and_processes_left_behind_fail_a_short_run_too() -> None:
    for what, more in (("fds", 6), ("memfds", 1), ("threads", 3)):
        seen = healthy(4)
        seen.calms[-1]["trainer"] = seen.calms[-2]["trainer"] = holding(
            **{what: getattr(holding(), what) + more}
        )
        assert failed(seen) == ["handles, trainer"]
    seen = healthy(4)
    seen.strangers.append("process 1")
    assert failed(seen) == ["processes left behind"]


@pytest.mark.e2e
def test_forty_versions_under_faults_serve_nothing_wrong_and_leave_nothing_behind(
    tmp_path: Path,
) -> None:
    report = tmp_path / "soak.json"
    options = "--versions 40 --window 20 --fault-every 10 --seconds-per-version 0.15 --seed 3"
    soak = [sys.executable, "-m", "tests.soak", *options.split(), "--json", str(report)]
    done = subprocess.run(soak, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(report.read_text())
    assert (found["passed"], found["published"], sum(found["faults"].values())) == (True, 40, 4)
    assert done.stdout.splitlines()[-1].startswith("soak passed: 40 versions, 4 faults")
    judged = {row["what"]: row["demanded"] for row in found["rows"]}
    assert judged["memory, trainer"] == "not judged in a short run"
    assert judged["handles, trainer"] == "none left behind"
