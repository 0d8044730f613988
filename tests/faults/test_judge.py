"""What counts as a violation in the fault matrix, on made-up observations."""

from dataclasses import replace

import pytest

from tests.faults import report
from tests.faults.cases import select
from tests.faults.judge import (
    Sample,
    backwards,
    compare,
    judge_lag,
    judge_steps,
    lies,
    served,
    wrong_bytes,
)
from tests.rigs.trainer_handle import Step
from titan_grpo.verify.outcome import Committed

RUN, LATER = "0000000003e8-aaaaaaaa", "0000000007d0-bbbbbbbb"


def commit(
    version: int, run: str = RUN, ok: bool = True, tensors: tuple[str, ...] = ("a", "b")
) -> Committed:
    return Committed(
        run, 0, version, ok, f"f{version}", {name: f"{name}{version}" for name in tensors}
    )


def sample(label: str, commits: int, steady: bool = True) -> Sample:
    return Sample(0.0, label, not steady, commits, steady)


def steps(wall: float, count: int = 40, **parts: float) -> list[Step]:
    step = Step(0.0, wall, 0.0, 0.0, wall)
    return [replace(step, t=float(i), **parts) for i in range(count)]


def test_a_server_whose_label_is_that_of_its_weights_is_right() -> None:
    commits = [commit(1), commit(2)]
    seen = [sample("default", 0), sample(f"{RUN}:1:f1", 1), sample(f"{RUN}:2:f2", 2)]
    assert lies(seen, commits) == []
    assert backwards(seen) == []


def test_an_old_label_over_new_weights_is_a_lie_only_while_the_server_generates() -> None:
    assert lies([sample(f"{RUN}:1:f1", 2, steady=False)], [commit(1), commit(2)]) == []
    (found,) = lies([sample(f"{RUN}:1:f1", 2)] * 3, [commit(1), commit(2)])
    assert "it generated on v2" in found
    assert "labelled v1" in found


def test_a_label_over_weights_of_its_own_is_a_lie() -> None:
    (found,) = lies([sample(f"{RUN}:1:f1", 0)], [])
    assert "weights of its own" in found


def test_half_loaded_weights_may_not_generate_under_any_label() -> None:
    commits = [commit(1), commit(2, ok=False)]
    assert served(commits) == "unusable"
    (found,) = lies([sample("unusable", 2)], commits)
    assert "half loaded" in found


def test_a_refused_commit_that_touched_nothing_leaves_the_old_version() -> None:
    assert str(served([commit(1), commit(2, ok=False, tensors=())])) == f"{RUN}:1:f1"


@pytest.mark.parametrize(
    ("first", "then"), [(f"{RUN}:2:f2", f"{RUN}:1:f1"), (f"{LATER}:1:f1", f"{RUN}:9:f9")]
)
def test_a_label_never_goes_back_to_an_older_version_or_run(first: str, then: str) -> None:
    assert len(backwards([sample(first, 0), sample(then, 0), sample(then, 0)])) == 1
    assert backwards([sample(then, 0), sample(first, 0)]) == []


def test_commits_are_compared_with_what_the_run_made() -> None:
    def expected(run: str, version: int) -> dict[str, str] | None:
        return {"a": f"a{version}", "b": f"b{version}"} if run == RUN else None

    assert wrong_bytes([commit(1), commit(2, ok=False, tensors=("a",))], expected) == []
    (found,) = wrong_bytes([replace(commit(3), tensors={"a": "a3", "b": "b2"})], expected)
    assert found == "version 3: 1 of 2 tensors are not the trainer's (b, ...)"
    assert "unknown run" in wrong_bytes([commit(1, LATER)], expected)[0]


def test_the_noise_is_how_far_the_parts_of_the_time_without_a_fault_are_apart() -> None:
    ratio = compare([1.0] * 10 + [1.1] * 10 + [1.0] * 20, [1.0] * 20)
    assert ratio.noise == pytest.approx(0.1)
    assert not ratio.tells
    assert not compare([1.0] * 3, [1.0] * 9).enough


def test_steps_that_wait_are_held_against_the_fault() -> None:
    ratio, wrong, _ = judge_steps(steps(0.1), steps(0.11, ran=0.1), 3.0)
    assert ratio.value == pytest.approx(1.1)
    assert wrong == ["steps took 1.100 times as long: +10.0% waiting, +0.0% in the sync"]


def test_steps_without_a_core_are_the_machines() -> None:
    _, wrong, note = judge_steps(steps(0.1), steps(0.2, no_core=0.1, ran=0.1), 3.0)
    assert wrong == []
    assert "+100.0% without a core" in note


def test_a_wait_on_a_machine_without_a_spare_core_is_the_machines_unless_for_a_server() -> None:
    during = steps(0.2, no_core=0.08, ran=0.1)
    _, wrong, note = judge_steps(steps(0.1), during, 3.0)
    assert wrong == []
    assert "+20.0% waiting" in note
    assert "no core for 40%" in note
    _, wrong, _ = judge_steps(steps(0.1), [*during, Step(99.0, 1.6, 0.0, 1.5, 0.1)], 3.0)
    assert "the trainer waited for a server" in wrong[0]


def test_one_step_that_waits_half_a_deadline_is_a_wait_for_a_server() -> None:
    during = [*steps(0.1), Step(99.0, 1.6, 0.0, 1.5, 0.1)]
    _, wrong, _ = judge_steps(steps(0.1), during, 3.0)
    assert "the trainer waited for a server" in wrong[0]


def test_another_servers_lag_counts_in_versions_and_in_seconds_where_the_machine_can_tell() -> None:
    assert judge_lag([0.1] * 8, [0.1] * 8, (0.0, 0.0))[1:] == ([], "")
    assert "4 versions behind" in judge_lag([0.1] * 8, [0.1] * 8, (1.0, 4.0))[1][0]
    _, wrong, note = judge_lag([0.1] * 8, [0.1] * 8, (1.0, 4.0), "the trainer had no core for 50%")
    assert wrong == []
    assert "4 versions behind" in note
    assert "no core for 50%" in note
    assert "1.50 times" in judge_lag([0.1] * 8, [0.15] * 8, (0.0, 0.0))[1][0]
    _, wrong, note = judge_lag([0.1, 0.2] * 8 + [0.3] * 8, [0.4] * 8, (0.0, 0.0))
    assert wrong == []
    assert "cannot tell" in note


def test_the_report_counts_every_case_and_says_what_could_not_run() -> None:
    cases = select("receiver-kill@staged,receiver-kill@sent,link-delay")
    results = [report.Result(cases[0]), report.Result(cases[1], violations=["left paused"])]
    results.append(report.Result(cases[2], skipped="tc netem: unknown"))
    text = report.table(results)
    assert "FAILED" in text
    assert "tc netem: unknown" in text
    assert report.summary(results, 1.0, 3).startswith(
        "FAILED: 3 of 3 cases, 1 passed, 1 failed, 1 skipped"
    )
    assert report.summary(results[:1], 1.0, 3).startswith("FAILED: 1 of 3 cases"), (
        "an interrupted matrix has not passed"
    )
    record = report.outcome(results, {"device": "cpu", "engine": "vllm"})
    assert record["counts"] == {"passed": 1, "failed": 1, "skipped": 1}
    assert not record["passed"]
    assert all(line["reason"] for line in record["no_case"])
