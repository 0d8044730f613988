import json
import os
import select
import threading
import time
import tracemalloc
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.views.runs import Clock
from titan_grpo.errors import ConfigError
from titan_grpo.observe import names
from titan_grpo.observe.recorder import Recorder, newest_rows, read_history, read_metrics
from titan_grpo.observe.report import summarize
from titan_grpo.observe.schema import Summary
from titan_grpo.views.live import Follower

SERVER = "http://127.0.0.1:8000"


def bars(path: Path) -> list[dict[str, Any]]:
    return [e for e in json.loads(path.read_text()) if e["ph"] == "X"]


def test_a_span_is_a_bar_in_the_trace_and_a_value_in_its_series(tmp_path: Path) -> None:
    clock = Clock(100.0)
    recorder = Recorder(tmp_path, clock=clock)
    with recorder.span(names.SEND_S, track="lane a", version=3):
        clock.now += 0.25
    with pytest.raises(ZeroDivisionError), recorder.span(names.COMMIT_S):
        _ = 1 / 0
    assert recorder.close() == []
    assert recorder.series(names.SEND_S) == [0.25]
    assert recorder.series(names.COMMIT_S) == [0.0], "a span that raises counts too"
    bar = bars(tmp_path / "trace.json")[0]
    assert (bar["name"], bar["ts"], bar["dur"]) == (names.SEND_S, 100e6, 0.25e6)
    assert bar["args"] == {"version": 3}
    events = json.loads((tmp_path / "trace.json").read_text())
    tracks = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert tracks[bar["tid"]] == "lane a"


@pytest.mark.parametrize(("again", "left"), [(3, [1, 2, 3]), (1, [1])])
def test_a_step_that_comes_again_replaces_all_from_it_on(
    tmp_path: Path, again: int, left: list[int]
) -> None:
    for steps in ((1, 2, 3, 4), (again,)):
        recorder = Recorder(tmp_path)
        for step in steps:
            recorder.step(step, {names.REWARD: 0.5})
        recorder.close()
    assert [row["step"] for row in read_metrics(tmp_path / "metrics.jsonl")] == left


def test_what_is_known_after_the_last_step_is_in_its_line(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path)
    recorder.after_last_step({names.REWARD: 9.0})
    for step in (1, 2):
        recorder.step(step, {names.REWARD: step / 2})
    recorder.after_last_step({"evaluation/test/reward": 0.5})
    recorder.close()
    rows = [json.loads(line) for line in recorder.metrics_path.read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2], "one line per step"
    assert (rows[1][names.REWARD], rows[1]["evaluation/test/reward"]) == (1.0, 0.5)
    assert recorder.last_row() == rows[1]


def test_of_each_step_only_what_the_summary_needs_stays_in_memory(tmp_path: Path) -> None:
    def described(recorder: Recorder) -> tuple[Summary, list[dict[str, object]]]:
        return summarize(recorder, "run", "async"), recorder.rows()

    recorder = Recorder(tmp_path)
    servers = {f"server/host{n}:8000/lag": 0.0 for n in range(64)}
    for step in (1, 2):
        recorder.step(step, servers | dict.fromkeys(names.SUMMARISED, step / 2))
    recorder.close()
    summary, rows = described(recorder)
    assert [set(row) for row in rows] == [{"step", "time_s", *names.SUMMARISED}] * 2
    assert described(Recorder(tmp_path)) == (summary, rows), "as a resumed run reads it"
    figures = summary.staleness, summary.logprob_gap, summary.logprob_gap_on_policy
    assert [figure.max for figure in figures] == [1.0] * 3
    assert summary.step_s.median == 0.75
    assert summary.blocked_s.median == 0.75


def test_a_steps_values_and_counts_are_two_lines_of_the_history(tmp_path: Path) -> None:
    """With 64 servers there were a thousand at every step, and a resume reads them all."""
    recorder = Recorder(tmp_path)
    for step in (1, 2):
        for server in range(64):
            recorder.observe(names.SEND_S, server / 8)
            recorder.observe(names.VERIFY_S, float("nan"))
            recorder.count(names.SYNC_COUNT)
            recorder.count(names.SYNC_BYTES, 1 << 40)
        recorder.step(step, {names.REWARD: 0.5})
    recorder.count(names.SYNC_COUNT)
    recorder.close()
    lines = (tmp_path / "history.jsonl").read_text().splitlines()
    assert len(lines) <= 2 + 2 * 2 + 1 + 2, "process, first step; a pause of a second adds two"
    found = read_history(tmp_path / "history.jsonl").whole()
    assert list(found.series) == [names.SEND_S]
    assert list(found.series[names.SEND_S]) == [server / 8 for server in range(64)] * 2
    assert found.totals == {names.SYNC_COUNT: 129, names.SYNC_BYTES: 1 << 47}
    assert Recorder(tmp_path).history() == found


def test_each_step_is_one_line_of_valid_json_whose_sums_are_finite(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path)
    recorder.step(1, {names.REWARD: 0.5, names.KL: float("nan"), names.LOSS: 1e99})
    recorder.step(2, {names.REWARD: 0.75, names.KL: 1e308, names.LOSS: -1.7e308})
    recorder.close()
    strict = [
        json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
        for line in (tmp_path / "metrics.jsonl").read_text().splitlines()
    ]
    assert [(row["step"], row[names.REWARD]) for row in strict] == [(1, 0.5), (2, 0.75)]
    assert [(row[names.KL], row[names.LOSS]) for row in strict] == [(None, 1e99), (None, None)]
    assert recorder.series(names.REWARD) == [0.5, 0.75]


def test_a_line_with_a_number_that_no_recorder_writes_is_skipped_as_a_torn_one(
    tmp_path: Path,
) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "reward/mean": 1e308}\n{"step": 2, "reward/mean": 0.5}\n')
    assert read_metrics(path) == [{"step": 2, "reward/mean": 0.5}]


def test_a_resumed_run_goes_on_after_the_line_that_a_kill_tore(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(
        '{"step": 1, "reward/mean": 0.1}\n{"step": 2, "reward/mean": 0.2}\n{"step": 3, "rew'
    )
    assert next(newest_rows(path)) == {"step": 2, "reward/mean": 0.2}
    recorder = Recorder(tmp_path)
    recorder.step(2, {names.REWARD: 0.25})
    recorder.step(3, {names.REWARD: 0.3})
    recorder.close()
    rows = [(row["step"], row[names.REWARD]) for row in read_metrics(path)]
    assert rows == [(1, 0.1), (2, 0.25), (3, 0.3)]
    assert recorder.series(names.REWARD) == [0.1, 0.25, 0.3]


@pytest.mark.parametrize("end", ["}\n]\n", "}", "[Errno 104]", "a process"])
def test_a_process_that_follows_another_keeps_its_trace(tmp_path: Path, end: str) -> None:
    path = tmp_path / "trace.json"
    for version in (1, 2):
        recorder = Recorder(tmp_path)
        with recorder.span(names.SEND_S, track="lane", version=version):
            pass
        recorder.instant("error", message="of a process: [Errno 104]")
        assert recorder.close() == []
        if version == 1:
            text = path.read_text()
            path.write_text(text[: text.rindex(end) + len(end)])
            assert names.SEND_S in path.read_text(), "only what comes after it is torn"
    assert [bar["args"]["version"] for bar in bars(path)] == [1, 2]
    first, second = bars(path)
    assert first["tid"] != second["tid"], "both have a row of their own"


def test_the_history_of_a_run_spans_its_processes_also_after_a_kill(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        recorder = Recorder(tmp_path)
        recorder.known_server(SERVER)
        recorder.committed(SERVER, step)
        recorder.quantised(SERVER, "fp8" if step < 3 else "")
        recorder.count(names.SYNC_COUNT)
        recorder.observe(names.SEND_S, 0.5)
        recorder.error(f"error {step}")
        recorder.step(step, {names.REWARD: 1.0})
        recorder.close()
        path = tmp_path / "history.jsonl"
        path.write_bytes(path.read_bytes() + b'["count", "sync/c')
    history = recorder.history()
    assert history.commits == {SERVER: [1, 2, 3]}
    assert history.quantised == {SERVER: ""}
    assert history.totals[names.SYNC_COUNT] == 3
    assert list(history.series[names.SEND_S]) == [0.5] * 3
    assert history.errors == ["error 1", "error 2", "error 3"]
    assert history.resumes == [2, 3]
    assert recorder.since_last()[names.SYNC_COUNT] == 3
    # A run that starts at step 1 in the same directory is another one.
    again = Recorder(tmp_path)
    again.count(names.SYNC_COUNT)
    again.step(1, {names.REWARD: 2.0})
    again.close()
    assert again.history().totals == {names.SYNC_COUNT: 1}
    assert Recorder(tmp_path).history().totals == {names.SYNC_COUNT: 1}
    assert [row["step"] for row in again.rows()] == [1]


def test_a_long_history_is_not_in_memory_as_a_whole_while_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    path.write_text(f'["count", "{names.SYNC_COUNT}", 1]\n' * 50_000)
    tracemalloc.start()
    try:
        found = read_history(path)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert found.own.totals == {names.SYNC_COUNT: 50_000}
    assert peak < path.stat().st_size / 2


def test_many_threads_record_at_once_and_nothing_is_lost(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path)

    def work(lane: int) -> None:
        for version in range(200):
            with recorder.span(names.SEND_S, track=f"lane {lane}", version=version):
                recorder.count(names.SYNC_COUNT)
            recorder.committed(f"http://server{lane}", version)

    threads = [threading.Thread(target=work, args=(lane,)) for lane in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert recorder.close() == []
    assert recorder.history().totals[names.SYNC_COUNT] == 1600
    assert len(recorder.series(names.SEND_S)) == 1600
    assert all(versions == list(range(200)) for versions in recorder.history().commits.values())
    rows = Counter(bar["tid"] for bar in bars(tmp_path / "trace.json"))
    assert sorted(rows.values()) == [200] * 8


def test_a_disk_that_hangs_does_not_hold_up_the_caller(tmp_path: Path) -> None:
    # Opening a FIFO without a reader blocks for ever, as a dead network file system does.
    os.mkfifo(tmp_path / "trace.json")
    recorder = Recorder(tmp_path)
    for step in range(1, 1001):  # a caller that waited would not come to its end
        with recorder.span(names.BLOCKED_S):
            pass
        recorder.step(step, {names.REWARD: 0.0})
    assert recorder.close(deadline_s=0.1)
    reader = os.open(tmp_path / "trace.json", os.O_RDONLY)  # lets the recorder's thread end
    os.close(reader)


def test_what_a_step_has_written_can_be_read_while_the_run_goes_on(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "trace.json")
    reader = os.open(tmp_path / "trace.json", os.O_RDONLY | os.O_NONBLOCK)
    recorder = Recorder(tmp_path)
    recorder.instant("of the first step")
    recorder.step(1, {names.REWARD: 1.0})
    assert select.select([reader], [], [], 20.0)[0], "it is not kept until the end"
    assert b"of the first step" in os.read(reader, 1 << 16)
    recorder.close()
    os.close(reader)


def test_what_a_step_waits_for_can_be_read_before_it_ends(tmp_path: Path) -> None:
    recorder, follower, deadline = Recorder(tmp_path), Follower(tmp_path), time.monotonic() + 20
    recorder.error("no server answers")
    while not follower.state.errors:
        assert time.monotonic() < deadline, "the first step would show it: none comes"
        follower.read()
    recorder.committed(SERVER, 0)
    recorder.step(1, {names.REWARD: 1.0})
    recorder.holds(SERVER, None)
    while follower.state.held.get(SERVER, 0) is not None:
        assert time.monotonic() < deadline, "the next step would show it: none comes"
        follower.read()
    recorder.close()


def test_a_full_disk_is_one_error_of_the_run_and_the_other_files_are_whole(tmp_path: Path) -> None:
    (tmp_path / "trace.json").symlink_to("/dev/full")
    recorder = Recorder(tmp_path)
    for step in range(1, 2001):
        recorder.step(step, {names.REWARD: 1.0})
        recorder.instant("x", detail="y" * 100)
    (error,) = recorder.close()
    assert recorder.history().errors == [error]
    assert "trace.json cannot be written: No space left" in error
    assert len(read_metrics(tmp_path / "metrics.jsonl")) == 2000


def test_a_file_goes_on_once_it_can_be_written_again_and_that_it_could_not_is_said_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, deadline = tmp_path / "samples.jsonl", time.monotonic() + 20
    path.symlink_to("/dev/full")
    recorder = Recorder(tmp_path)
    recorder.sample({"step": 1})
    recorder.step(1, {names.REWARD: 0.5})
    while not recorder.history().errors:
        assert time.monotonic() < deadline
    path.unlink()
    path.write_text('{"step": 1, "to')
    recorder.sample({"step": 2})
    (error,) = recorder.close()
    assert path.read_text() == '{"step": 1, "to\n{"step": 2}\n', "and its torn line is ended"
    assert "samples.jsonl cannot be written: No space left" in error
    assert recorder.history().errors == [error]
    assert capsys.readouterr().err == f"titan-grpo| {error}\n"


def test_lines_go_on_where_the_folder_of_a_run_was_removed_and_made_again(tmp_path: Path) -> None:
    folder, deadline = tmp_path / "run", time.monotonic() + 20
    recorder = Recorder(folder)
    recorder.step(1, {names.REWARD: 0.5})
    while not recorder.metrics_path.exists() or not recorder.metrics_path.read_text():
        assert time.monotonic() < deadline
    folder.rename(tmp_path / "removed")
    recorder.step(2, {names.REWARD: 0.5})
    while not recorder.history().errors:
        assert time.monotonic() < deadline
    folder.mkdir()
    recorder.step(3, {names.REWARD: 0.5})
    assert "metrics.jsonl cannot be written: No such file" in "".join(recorder.close())
    assert [row["step"] for row in read_metrics(recorder.metrics_path)] == [3]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_thread_that_ended_early_is_an_error_of_the_run(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path)
    recorder.instant("x", detail={(1, 2): "no key of JSON"})
    (problem,) = recorder.close()
    assert "are incomplete: their thread ended early" in problem
    assert recorder.history().errors == recorder.close() == [problem]


def test_a_run_directory_that_is_a_file_is_a_mistake_in_the_configuration(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "run"):
        with pytest.raises(ConfigError, match=r"job\.dump_folder must be a directory"):
            Recorder(path)


def test_every_name_has_its_meaning_and_no_two_names_are_equal() -> None:
    prefixes = {names.DROPPED, names.GAP, names.LENGTHS, names.SERVER, names.EVALUATION}
    values = [v for k, v in vars(names).items() if k.isupper() and isinstance(v, str)]
    values = [v for v in values if v not in prefixes]
    assert len(values) == len(set(values))
    assert set(values) == set(names.MEANING)


def test_a_step_gets_the_mean_of_what_ended_since_the_one_before_and_all_totals(
    tmp_path: Path,
) -> None:
    recorder = Recorder(tmp_path)
    recorder.observe(names.SYNC_S, 1.0)
    recorder.observe(names.SYNC_S, 3.0)
    recorder.count(names.SYNC_BYTES, 100)
    recorder.count(names.dropped("stale"), 2)
    first = recorder.since_last()
    assert (first[names.SYNC_S], first[names.SYNC_BYTES], first["dropped/stale"]) == (2.0, 100, 2)
    assert first[names.QUARANTINES] == 0.0, "nothing happened, and the line says so"
    recorder.step(1, first)
    recorder.observe(names.SYNC_S, 5.0)
    second = recorder.since_last()
    assert (second[names.SYNC_S], second[names.SYNC_BYTES]) == (5.0, 100)
    assert names.SYNC_S not in recorder.since_last(), "nothing ended since"
    assert recorder.series(names.SYNC_S) == [1.0, 3.0, 5.0], "the steps' means are not values"
    recorder.close()
