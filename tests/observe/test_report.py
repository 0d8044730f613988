import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from titan_grpo.observe import names, report
from titan_grpo.observe.output import write_whole
from titan_grpo.observe.recorder import Recorder
from titan_grpo.observe.report import duration, ends, mean_max, median_p95, table
from titan_grpo.observe.schema import Change, MeanMax, MedianP95, Server, Summary

SERVERS = ("http://127.0.0.1:8000", "http://127.0.0.1:8001")


@pytest.fixture
def recorder(tmp_path: Path) -> Iterator[Recorder]:
    """A run of ten steps of half a second: one server committed every second version, the other one
    nothing."""
    ticks = iter([t / 2 for t in range(1000)])
    recorder = Recorder(tmp_path / "run", clock=lambda: next(ticks))
    for server in SERVERS:
        recorder.known_server(server)
    for step in range(1, 11):
        recorder.step(
            step,
            {
                names.REWARD: step / 10,
                names.BLOCKED_S: 0.001 * step,
                names.STALENESS: 0.5,
                names.STALENESS_MAX: 1.0,
                names.LOGPROB_GAP: 0.01,
                names.LOGPROB_GAP_MAX: 0.02,
            },
        )
        if step % 2 == 0:
            recorder.committed(SERVERS[0], step)
            recorder.count(names.SYNC_COUNT)
            recorder.observe(names.SEND_S, 0.1)
    recorder.count(names.SYNC_BYTES, 4 << 20)
    recorder.count(names.RELAYED_BYTES, 3 << 20)
    recorder.count(names.SKIPPED_VERSIONS, 5)
    for server, method in ((SERVERS[0], "fp8"), (SERVERS[1], "fp8"), (SERVERS[1], "")):
        recorder.quantised(server, method)
    recorder.joined(SERVERS[1], 3)
    recorder.left(SERVERS[1], 7)
    recorder.count(names.dropped("nan_logprobs"), 2)
    recorder.count(names.dropped("no_spread"), 0)
    for kind, longest, count in (("made", 128, 1), ("made", 16, 3), ("trained", 16, 3)):
        recorder.count(names.lengths(kind, str(longest)), count)
    yield recorder
    recorder.close()


def test_the_summary_of_a_run_says_what_happened(recorder: Recorder) -> None:
    summary = report.summarize(recorder, "run", "async")
    assert summary.steps == 10
    assert summary.steps_per_s == pytest.approx(2.0)
    assert summary.reward_first == pytest.approx(0.15)
    assert summary.reward_last == pytest.approx(0.95)
    assert summary.versions_committed == {
        SERVERS[0]: Server([2, 4, 6, 8, 10], 10),
        SERVERS[1]: Server([], None),
    }
    assert summary.membership == [
        Change(SERVERS[1], "joined", 3),
        Change(SERVERS[1], "left", 7),
    ]
    assert (summary.sync_count, summary.skipped_versions, summary.digest_mismatches) == (5, 5, 0)
    assert (summary.sync_bytes, summary.relayed_bytes) == (4 << 20, 3 << 20)
    assert summary.blocked_s.median == pytest.approx(0.0055)
    assert summary.staleness == MeanMax(0.5, 1.0)
    assert summary.dropped == {"nan_logprobs": 2, "no_spread": 0}
    assert summary.quantised == {SERVERS[0]: "fp8"}, "the other was restarted without"
    last = {names.REWARD: 1.0, names.BLOCKED_S: 0.01, names.LOGPROB_GAP_MAX: 0.02}
    assert summary.last_step.items() >= last.items()
    assert summary.lengths == {"made": {"16": 3, "128": 1}, "trained": {"16": 3}}
    table = report.final_table(summary)
    for words in (
        *SERVERS,
        "0.15 -> 0.95",
        "5 committed, 5 versions skipped",
        "of these relayed       3.0 MiB",
        "2 nan_logprobs",
        "median 5.5 ms",
        "75 % to 16, 25 % to 128 tokens",
    ):
        assert words in table
    assert "no_spread" not in table, "none were dropped for it"
    one: dict[str, Any] = {"skipped_versions": 1, "reward_window": 1}
    one["versions_committed"] = {SERVERS[0]: Server([2, 2], 2)}
    table = report.final_table(msgspec.structs.replace(summary, **one))
    for words in ("1 version skipped", "(first and last step)", "1 version, last 2"):
        assert words in table


def test_a_run_that_died_before_its_first_step_has_a_valid_summary_too(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path)
    recorder.error("server gone")
    summary = report.write_report(recorder, "run", "sync")
    assert summary.steps == 0
    assert summary.errors == ["server gone"]
    assert summary.last_step == {}
    assert "server gone" in report.final_table(summary)


def test_the_table_has_skipped_optimizer_steps_and_evaluations_if_there_were_any(
    tmp_path: Path,
) -> None:
    recorder = Recorder(tmp_path)
    assert "evaluation" not in (
        table := report.final_table(report.summarize(recorder, "r", "sync"))
    )
    assert "skipped optimizer steps" not in table
    recorder.count(names.UNHEALTHY_STEPS, 2)
    figure = {"value": 0.25, "low": 0.0, "high": 1.0}
    recorder.evaluated(
        {"name": "held_out", "version": 4, "server": "http://a:1", "prompts": 4, "samples": 2}
        | {"reward": figure, "passed": {"2": figure | {"value": 0.5}}, "tokens": figure}
        | {"refused": 0, "seconds": 1.0}
    )
    table = report.final_table(report.write_report(recorder, "r", "sync"))
    lines = [line.split(maxsplit=3) for line in table.splitlines()]
    assert ["skipped", "optimizer", "steps", "2"] in lines
    found = [line for line in table.splitlines() if line.startswith("evaluation held_out")]
    assert [line.split(maxsplit=2)[2] for line in found] == ["version 4: reward 0.25, pass@2 0.5"]


def test_a_summary_is_written_whatever_an_error_quotes(tmp_path: Path) -> None:
    """A policy can write a lone surrogate as an escape, and UTF-8 has none."""
    recorder = Recorder(tmp_path)
    recorder.error("reward of '\ud800'")
    report.write_report(recorder, "run", "async", "step 3: '\ud800'")
    read = msgspec.json.decode((tmp_path / "summary.json").read_bytes(), type=Summary)
    assert (read.errors, read.ended_by) == ([r"reward of '\ud800'"], r"step 3: '\ud800'")


def test_the_table_says_that_there_were_no_errors_only_of_a_run_that_reached_its_end(
    tmp_path: Path,
) -> None:
    whole = report.summarize(Recorder(tmp_path), "run", "async")
    ended = msgspec.structs.replace(whole, ended_by="step 3: no group came")
    last = [report.final_table(s).splitlines()[-1] for s in (whole, ended)]
    assert last[0].split() == ["errors", "none"]
    assert not last[1].startswith("error")


def test_the_table_of_a_run_with_many_errors_shows_their_number_and_the_last(
    tmp_path: Path,
) -> None:
    recorder = Recorder(tmp_path)
    for attempt in range(2000):
        recorder.error(f"attempt {attempt}: server gone")
    lines = report.final_table(report.write_report(recorder, "run", "async")).splitlines()
    assert lines[-6].endswith("2000, all in summary.json; the last 5:")
    assert [line.split()[2] for line in lines[-5:]] == ["1995:", "1996:", "1997:", "1998:", "1999:"]


def test_the_table_of_a_run_of_weeks_is_no_longer_than_a_screen_or_two(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path)
    figure = {"value": 0.25, "low": 0.0, "high": 1.0}
    common = {"name": "held_out", "server": SERVERS[0], "prompts": 4, "samples": 2, "passed": {}}
    common |= {"reward": figure, "tokens": figure, "refused": 0, "seconds": 1.0}
    for version in range(1000):
        recorder.evaluated(common | {"version": version})
        recorder.joined(SERVERS[0], version)
        recorder.left(SERVERS[0], version)
    summary = report.write_report(recorder, "run", "async")
    lines = report.final_table(summary).splitlines()
    assert len(lines) < 80
    last = [line for line in lines if line.startswith("evaluation")]
    assert (last[0].split()[:2], len(last)) == (["evaluations", "1000,"], 21)
    assert "version 999: reward 0.25" in last[-1]
    assert len(summary.evaluations) == 1000


def test_the_report_writes_a_summary_that_reads_back_and_a_picture(recorder: Recorder) -> None:
    summary = report.write_report(recorder, "run", "async")
    written = (recorder.run_dir / "summary.json").read_bytes()
    assert msgspec.json.decode(written, type=Summary) == summary
    assert (recorder.run_dir / "reward.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert list(recorder.run_dir.glob("*.partial")) == []


@pytest.mark.parametrize(("ended_by", "whole"), [("", True), ("SIGTERM", False)])
def test_a_summary_tells_whether_the_run_came_to_its_end(
    recorder: Recorder, ended_by: str, whole: bool
) -> None:
    folder = recorder.run_dir
    assert not report.came_to_its_end(folder), "there is none"
    report.write_report(recorder, "run", "async", ended_by)
    assert report.came_to_its_end(folder) is whole
    Recorder(folder).close()
    assert not report.came_to_its_end(folder), "a later process has written none yet"


def test_the_rate_of_generated_tokens_is_over_the_time_of_the_steps(tmp_path: Path) -> None:
    now = [0.0]
    recorder = Recorder(tmp_path, clock=lambda: now[0])
    for step, (at, rate) in enumerate(((5.0, 7.0), (6.0, 900.0), (15.0, 0.0)), 1):
        now[0] = at
        recorder.step(step, {names.REWARD: 0.5, names.GENERATED: rate})
    recorder.close()
    assert report.summarize(recorder, "run", "async").generated_tokens_per_s == 90.0


def test_the_rate_of_generated_tokens_counts_each_token_once(tmp_path: Path) -> None:
    """A step's rate is of the time between two steps' taking of their groups. Before, it was taken
    for that between their ends, and runs beside servers that counted had 18 to 43 % too much."""
    now = [0.0]
    recorder = Recorder(tmp_path, clock=lambda: now[0])
    # begins, takes its groups, ends; tokens since the step before took its own
    for step, (begin, took, end, rate) in enumerate(
        ((0.0, 0.0, 1.0, 7.0), (1.0, 4.0, 5.0, 400 / 4), (5.0, 5.0, 14.0, 0.0)), 1
    ):
        now[0] = end
        times = {names.STEP_S: end - begin, names.ROLLOUT_WAIT_S: took - begin}
        recorder.step(step, {names.GENERATED: rate, **times})
    recorder.close()
    assert report.summarize(recorder, "run", "async").generated_tokens_per_s == 400 / 5


def test_the_summary_of_a_resumed_run_describes_the_whole_run(tmp_path: Path) -> None:
    now = iter(float(t) for t in range(1000))
    for first in (1, 4):
        recorder = Recorder(tmp_path, clock=lambda: next(now))
        for step in range(first, first + 4):
            recorder.committed(SERVERS[0], step)
            recorder.count(names.SYNC_COUNT)
            recorder.step(step, {names.REWARD: step / 10, names.STEP_S: 1.0})
        recorder.count(names.dropped("stale"))
        summary = report.write_report(recorder, "run", "async")
    assert (summary.steps, summary.resumes) == (7, [4])
    assert (summary.reward_first, summary.reward_last) == (0.1, 0.7)
    assert summary.versions_committed[SERVERS[0]].committed == [1, 2, 3, 4, 4, 5, 6, 7]
    assert (summary.sync_count, summary.dropped) == (8, {"stale": 2})
    assert summary.steps_per_s == pytest.approx(1.0)
    # A finished job that is started again trains nothing and loses nothing.
    again = report.write_report(Recorder(tmp_path), "run", "async")
    assert again == summary


def test_evaluations_of_versions_that_a_resumed_run_makes_again_are_no_results_of_it(
    tmp_path: Path,
) -> None:
    """A run that was killed at step 9 and went on at step 6 showed the old version 8 for good."""
    figure = {"value": 0.25, "low": 0.0, "high": 1.0}
    common = {"name": "held_out", "server": SERVERS[0], "prompts": 4, "samples": 2, "passed": {}}
    common |= {"reward": figure, "tokens": figure, "refused": 0, "seconds": 1.0}
    for first, last, evaluated in ((1, 9, (0, 5, 8)), (6, 7, (7,))):
        recorder = Recorder(tmp_path)
        for step in range(first, last + 1):
            recorder.step(step, {names.REWARD: 0.5})
        for version in evaluated:
            recorder.evaluated(common | {"version": version})
        summary = report.write_report(recorder, "run", "async")
    assert [each.version for each in summary.evaluations] == [0, 5, 7]
    again = report.summarize(Recorder(tmp_path), "run", "async")
    assert again.evaluations == summary.evaluations, "as its files say"


def test_the_report_of_a_run_reads_nothing_of_it_again(tmp_path: Path) -> None:
    """torchrun kills a run 30 s after a signal: that is no time to read gigabytes."""
    recorder = Recorder(tmp_path)
    for step in range(1, 11):
        recorder.step(step, {names.REWARD: step / 10})
    recorder.close()
    recorder.metrics_path.unlink()
    summary = report.write_report(recorder, "run", "async")
    assert summary.reward_last == pytest.approx(0.95)
    assert summary.errors == []
    assert (tmp_path / "reward.png").is_file()


def test_a_report_that_cannot_be_written_is_an_error_of_the_run_and_no_second_one(
    tmp_path: Path,
) -> None:
    recorder = Recorder(tmp_path)
    (tmp_path / "summary.json").mkdir()
    summary = report.write_report(recorder, "run", "sync")
    assert "is not whole" in summary.errors[0]
    assert list(tmp_path.glob("*.partial")) == []


def test_the_progress_line_shows_step_reward_staleness_blocked_time_and_versions() -> None:
    metrics = {
        names.REWARD: 0.4312,
        names.STALENESS_MAX: 1,
        names.BLOCKED_S: 0.0021,
        names.STEP_S: 0.612,
    }
    line = report.progress_line(12, 60, metrics, {"http://127.0.0.1:8000/": 11, "http://b:1": None})
    assert (
        line == "step 12/60  reward 0.431  stale 1  blocked 2.1 ms  step 612 ms  gap -  versions"
        " 127.0.0.1:8000=11 b:1=?"
    )


def test_durations_read_well() -> None:
    found = [duration(s) for s in (None, 0.0123, 1.5, 99.96, 125, 7260)]
    assert found == ["-", "12.3 ms", "1.5 s", "1 min 40 s", "2 min 5 s", "2 h 1 min"]


def test_a_file_that_a_full_disk_does_not_take_is_named_and_nothing_of_it_is_left(
    tmp_path: Path,
) -> None:
    (tmp_path / "page.partial").symlink_to("/dev/full")
    with pytest.raises(OSError, match=r"No space left on device: .*/page'$"):
        write_whole(tmp_path / "page", "text")
    assert list(tmp_path.iterdir()) == []


def test_a_link_to_a_file_that_is_written_whole_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "page")
    write_whole(tmp_path / "link", "text")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "page").read_text() == "text"


def test_a_quantile_between_two_ranks_is_interpolated_and_nan_is_left_out() -> None:
    values = [1.0, math.nan, 2.0, 3.0, 4.0, math.inf]
    found = median_p95(values)
    assert found.median == 2.5
    assert found.p95 == pytest.approx(3.85)
    assert mean_max(values, [math.nan, 7.0]) == MeanMax(2.5, 7.0)
    assert (median_p95([]), mean_max([], [])) == (MedianP95(None, None), MeanMax(None, None))


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([], (None, None, 0)),
        ([1.0], (1.0, 1.0, 1)),
        ([0.0, 1.0, 2.0, 3.0], (0.0, 3.0, 1)),
        (list(range(60)), (2.0, 57.0, 5)),
    ],
)
def test_the_ends_of_a_series_are_means_over_a_fifth_of_it_at_most_five_values(
    values: list[float], expected: tuple[float | None, float | None, int]
) -> None:
    assert ends(values) == expected


def test_the_line_under_a_tables_title_stays_one_line_under_a_long_error() -> None:
    assert table([("ended by", "x" * 300)], "run").splitlines()[1] == "-" * 80
