"""Reading a run's folder: whole, torn, still going, resumed, or used by an older run before."""

import os
import time
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from tests.rigs.present import present
from tests.views.runs import Clock, Made, make_run, url_of
from titan_grpo.errors import ConfigError
from titan_grpo.observe import names, report
from titan_grpo.observe.recorder import Recorder
from titan_grpo.views.findings import facts_of
from titan_grpo.views.live import Follower
from titan_grpo.views.run import SPAN, TRAINER, Trace, read_run, read_trace
from titan_grpo.views.timeline import figures, held, published, timeline


def test_a_run_is_read_as_it_was_recorded(tmp_path: Path) -> None:
    make_run(tmp_path, Made(steps=5, servers=2))
    run = read_run(tmp_path)
    assert [row["step"] for row in run.rows] == [1, 2, 3, 4, 5]
    assert {name for row in run.rows for name in row if name.startswith("server/")} == set()
    assert run.summary is not None
    assert run.summary.sync_count == 12
    assert run.trace.servers == [url_of(0), url_of(1)]
    train, sent = run.trace.of(TRAINER, "train"), run.trace.of(url_of(1), names.SEND_S)
    assert train.number.tolist() == [1, 2, 3, 4, 5]
    assert sent.number.tolist() == [0, 1, 2, 3, 4, 5]
    assert np.isclose(sent.median_s, 1 / 3, atol=1e-6)
    assert np.isclose(train.total_s, sum(row[names.TRAIN_S] for row in run.rows), atol=1e-5)
    assert run.trace.of(url_of(0), "no such span").total_s == 0.0


@pytest.mark.parametrize("line", [None, "", '{"epoch": 1, "loss": 2.5}', "epoch 1: 2.5"])
def test_a_folder_without_a_run_is_a_mistake_of_the_caller(
    line: str | None, tmp_path: Path
) -> None:
    if line is not None:
        (tmp_path / "metrics.jsonl").write_text(f"{line}\n")
    with pytest.raises(ConfigError, match=r"has no metrics\.jsonl with a step"):
        read_run(tmp_path)


def test_a_run_that_has_just_begun_has_an_empty_trace(tmp_path: Path) -> None:
    (tmp_path / "trace.json").touch()
    assert read_run(tmp_path).trace == Trace()


def test_servers_are_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    make_run(tmp_path, Made(steps=1, servers=11))
    assert read_run(tmp_path).trace.servers == [url_of(k) for k in range(11)]


def test_a_run_that_goes_on_has_no_summary_and_reads_up_to_its_last_whole_line(
    tmp_path: Path,
) -> None:
    make_run(tmp_path, Made(steps=5, finished=False))
    trace = tmp_path / "trace.json"
    whole = read_trace(trace)
    cut = trace.read_bytes().rstrip(b"]\n")
    trace.write_bytes(cut[: cut.rindex(b'"dur"') + 3])
    run = read_run(tmp_path)
    assert run.summary is None
    spans = [(key, spans.start.size) for key, spans in whole.spans.items()]
    read = [(key, spans.start.size) for key, spans in run.trace.spans.items()]
    assert sum(n for _, n in spans) - sum(n for _, n in read) == 1


@pytest.mark.parametrize("finished", [False, True], ids=["goes on", "has ended"])
def test_resumes_and_how_servers_quantise_are_known_of_a_run_at_any_time(
    tmp_path: Path, finished: bool
) -> None:
    for steps in ({1: 9.0, 2: 1.0}, {3: 50.0, 4: 2.0}):
        recorder = Recorder(tmp_path)
        recorder.quantised(url_of(0), "fp8")
        recorder.quantised(url_of(1), "")
        for step, step_s in steps.items():
            recorder.step(step, {names.STEP_S: step_s})
        recorder.close()
    if finished:
        report.write_report(recorder, "a run", "async", "")
    run = read_run(tmp_path)
    facts = facts_of(run)
    assert (run.summary is not None) == finished
    assert run.quantised == facts.quantised == {url_of(0): "fp8"}
    assert run.resumes == [3]
    assert present(facts.longest).number == 4, "not the first one after the resume"


@pytest.mark.parametrize("ahead_s", [-3600.0, 3600.0], ids=["", "the clock was set back since"])
def test_the_summary_of_the_process_before_is_none_as_soon_as_a_resumed_one_trains(
    tmp_path: Path, ahead_s: float
) -> None:
    """After a step of the clock by -1 h, a page of the resumed run said what had ended the first
    process, for an hour."""
    make_run(tmp_path, Made(steps=3, ended_by="SIGTERM"))
    written = time.time() + ahead_s
    for path in tmp_path.iterdir():
        os.utime(path, (written, written))
    assert Follower(tmp_path).ended()
    recorder = Recorder(tmp_path)  # before its first step
    assert read_run(tmp_path).summary is None
    assert not Follower(tmp_path).ended()
    recorder.close()


def test_blocks_of_any_size_read_the_same(tmp_path: Path) -> None:
    make_run(tmp_path, Made(steps=5))
    whole = read_trace(tmp_path / "trace.json")
    for size in (1, 2, 7, 100, 1000):
        parts = read_trace(tmp_path / "trace.json", size)
        assert parts.spans.keys() == whole.spans.keys()
        assert all(np.array_equal(parts.spans[k].start, s.start) for k, s in whole.spans.items())


@pytest.mark.parametrize("now", [10.0, 1e7], ids=["anew", "a host that is up for longer"])
def test_a_resumed_run_goes_on_where_it_stopped_also_on_another_clock(
    tmp_path: Path, now: float
) -> None:
    make_run(tmp_path, Made(steps=5, finished=False), Clock(9000.0))
    before = read_trace(tmp_path / "trace.json").seconds
    make_run(tmp_path, Made(steps=3, first_step=6), Clock(now))
    trace = read_run(tmp_path).trace
    train = trace.of(TRAINER, "train")
    assert train.number.tolist() == list(range(1, 9))
    assert (np.diff(train.start) > 0).all()
    assert train.start[5] >= before
    assert trace.seconds < 2 * before


def test_a_clock_that_is_set_between_two_processes_of_a_host_is_no_time_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = time.time()
    for step, ahead_s in ((1, 0.0), (2, 3600.0), (3, -3600.0)):
        monkeypatch.setattr(time, "time", lambda: now + ahead_s)  # noqa: B023 - called in the loop
        recorder = Recorder(tmp_path)
        start = recorder.now()
        recorder.add_span("train", start, start + 0.01, TRAINER, step=step)
        recorder.close()
    trace = read_trace(tmp_path / "trace.json")
    assert trace.of(TRAINER, "train").number.tolist() == [1, 2, 3]
    assert trace.seconds < 600


def test_an_older_run_in_the_same_folder_is_left_out(tmp_path: Path) -> None:
    make_run(tmp_path, Made(steps=7), Clock(100.0))
    make_run(tmp_path, Made(steps=3), Clock(500.0))
    trace = read_run(tmp_path).trace
    assert trace.of(TRAINER, "train").number.tolist() == [1, 2, 3]
    assert trace.of(url_of(0), names.COMMIT_S).number.tolist() == [0, 1, 2, 3]
    assert [row["step"] for row in read_run(tmp_path).rows] == [1, 2, 3]


def test_a_server_holds_a_version_until_the_next_commit_or_until_it_leaves(tmp_path: Path) -> None:
    clock = Clock(0.0)
    recorder = Recorder(tmp_path, clock=clock)
    for version, at in ((0, 1.0), (1, 3.0), (2, 5.0)):
        recorder.record_span(names.DIGEST_S, at - 1, at - 0.9, "sealer", version=version)
        if version < 2:
            recorder.record_span(names.COMMIT_S, at, at + 0.5, url_of(0), version=version)
    clock.now = 7.0
    recorder.left(url_of(0), 2)
    clock.now = 9.0
    recorder.instant("error", message="late")
    recorder.close()
    trace = read_trace(tmp_path / "trace.json")
    assert held(trace, url_of(0))[1].tolist() == [0, 1, -1]
    assert published(trace)[1].tolist() == [0, 1, 2]
    server = figures(trace, url_of(0))
    # from 1.5 s to 7 s: one behind from 2 to 3.5 s, and from 4 to 7 s
    assert np.isclose(server.served_s, 5.5)
    assert np.isclose(server.lag, 4.5 / 5.5)
    behind = timeline(trace)["rows"][1]["behind"]
    assert (behind[0], max(behind), behind[-1]) == (-1, 1, -1)


def test_time_in_which_a_server_was_away_from_the_run_is_neither_served_nor_lag(
    tmp_path: Path,
) -> None:
    clock = Clock(0.0)
    recorder = Recorder(tmp_path, clock=clock)
    for version in range(100):
        recorder.record_span(names.DIGEST_S, version, version, "sealer", version=version)
        if not 10 < version < 90:
            recorder.record_span(names.COMMIT_S, version, version, url_of(0), version=version)
    clock.now = 10.5
    recorder.left(url_of(0), 10)
    clock.now = 90.0
    recorder.joined(url_of(0), 90)
    clock.now = 100.0
    recorder.instant("error", message="late")
    recorder.close()
    server = figures(read_trace(tmp_path / "trace.json"), url_of(0))
    assert np.isclose(server.served_s, 20.5)
    assert np.isclose(server.lag, 0.0)


def test_a_commit_in_which_a_server_leaves_does_not_bring_it_back(tmp_path: Path) -> None:
    """Before, it served from then on until it joined again, or to the run's end, behind ever more
    versions."""
    clock = Clock(0.0)
    recorder = Recorder(tmp_path, clock=clock)
    for version in range(9):
        recorder.record_span(names.DIGEST_S, version, version, "sealer", version=version)
    for version, begin in ((0, 0.0), (1, 1.0), (6, 6.0)):
        if version == 1:
            clock.now = 1.5
            recorder.left(url_of(0), 1)
        if version == 6:
            clock.now = 5.5
            recorder.joined(url_of(0), 5)
        recorder.record_span(names.COMMIT_S, begin, begin + 1.0, url_of(0), version=version)
    recorder.close()
    trace = read_trace(tmp_path / "trace.json")
    assert held(trace, url_of(0))[1].tolist() == [0, -1, 6]
    server = figures(trace, url_of(0))
    assert server.commits == 3
    assert np.isclose(server.served_s, 0.5 + 1.0)


def test_a_servers_first_version_is_no_time_that_it_stood_still(tmp_path: Path) -> None:
    """Before, one whose first load took long "stood still for 17.9 s of 9.67 s (185 %)"."""
    recorder = Recorder(tmp_path, clock=Clock(0.0))
    for version, (begin, length) in enumerate(((0.0, 8.0), (10.0, 1.0), (14.0, 2.0))):
        sent, paused = begin + length / 4, begin + length
        recorder.record_span(names.SEND_S, begin, sent, url_of(0), version=version)
        recorder.record_span(names.PAUSE_S, sent, paused, url_of(0), version=version)
        recorder.record_span(names.COMMIT_S, sent, paused, url_of(0), version=version)
    recorder.close()
    server = figures(read_trace(tmp_path / "trace.json"), url_of(0))
    assert np.isclose(server.served_s, 8.0)
    assert np.isclose(server.pause_s, 0.75 + 1.5)
    assert np.isclose(server.send_s, 0.25 + 0.5)


def trained(folder: Path, versions: range, clock: Clock, server: str) -> None:
    """A process that makes a version a second, which the server has at once."""
    recorder = Recorder(folder, clock=clock)
    for version in versions:
        clock.now += 1.0
        recorder.add_span("train", clock.now - 1, clock.now, TRAINER, step=version + 1)
        recorder.record_span(names.DIGEST_S, clock.now, clock.now, "sealer", version=version)
        recorder.record_span(names.COMMIT_S, clock.now, clock.now, server, version=version)
    recorder.close()


def test_servers_of_a_process_are_out_of_the_run_when_it_is_resumed_on_others(
    tmp_path: Path,
) -> None:
    trained(tmp_path, range(50), Clock(0.0), url_of(0))
    trained(tmp_path, range(50, 100), Clock(200.0), url_of(1))
    trace = read_trace(tmp_path / "trace.json")
    assert trace.of("sealer", names.DIGEST_S).number.tolist() == list(range(100))
    for server in (0, 1):
        found = figures(trace, url_of(server))
        assert np.isclose(found.served_s, 49.0), "neither the gap nor the other process's time"
        assert np.isclose(found.lag, 0.0)
    first, second = (row["behind"] for row in timeline(trace)["rows"][1:])
    assert (first[50], first[-1], second[50], second[-1]) == (0, -1, -1, 0)


def test_a_server_is_not_behind_versions_that_a_resumed_run_has_yet_to_make_again(
    tmp_path: Path,
) -> None:
    trained(tmp_path, range(50), Clock(0.0), url_of(0))
    trained(tmp_path, range(30, 80), Clock(100.0), url_of(0))
    trace = read_trace(tmp_path / "trace.json")
    assert published(trace)[1].tolist() == [*range(50), *range(30, 80)]
    assert figures(trace, url_of(0)).lag == 0.0
    assert set(timeline(trace)["rows"][1]["behind"]) == {-1, 0}


def test_an_evaluation_that_held_a_server_and_the_waits_meanwhile_are_counted(
    tmp_path: Path,
) -> None:
    recorder = Recorder(tmp_path, clock=Clock(0.0))
    recorder.record_span(names.COMMIT_S, 0.0, 0.5, url_of(0), version=0)
    # The first step waits for other things too: no figure of waits has it.
    waits = (0.6, 0.9), (1.0, 3.0), (5.0, 6.0), (8.0, 9.0)
    for step, (start, stop) in enumerate(waits, 1):
        recorder.add_span("rollout wait", start, stop, TRAINER, step=step)
    for start, stop in ((0.5, 1.0), (2.0, 5.5), (7.0, 7.5)):
        recorder.record_span(names.HELD_S, start, stop, url_of(0), version=0)
    recorder.close()
    server = figures(read_trace(tmp_path / "trace.json"), url_of(0))
    assert np.isclose(server.held_s, 4.5)
    assert np.isclose(server.waited_meanwhile_s, 1.5)


def test_a_servers_fault_is_marked_on_its_row_and_the_steps_error_on_the_trainers(
    tmp_path: Path,
) -> None:
    make_run(tmp_path, Made(steps=20, servers=3, faulty_server=1))
    found = timeline(read_run(tmp_path).trace)
    marks = [(found["rows"][row]["name"], what, text) for row, _, what, text in found["marks"]]
    cause = "send failed: connection reset"
    for mark, version in zip((marks[:2], marks[2:]), (10, 20), strict=True):
        assert mark == [
            (names.short(url_of(1)), "sync failure", cause),
            ("trainer", "error", f"version {version} to {url_of(1)}: {cause}"),
        ]
    assert figures(read_run(tmp_path).trace, url_of(1)).faults == 2


def test_a_long_run_is_shown_span_by_span_only_at_its_end(tmp_path: Path) -> None:
    make_run(tmp_path, Made(steps=20))
    found = timeline(read_run(tmp_path).trace, 50)
    assert 0 < found["exactFrom"] < found["seconds"]
    assert len(found["exact"]) == 50
    assert min(start for _, _, start, _, _ in found["exact"]) == round(found["exactFrom"] * 1e3)


def test_a_long_trace_is_in_memory_twice_at_most_while_it_is_read(tmp_path: Path) -> None:
    """After 200,000 steps with 64 servers each copy is 1.5 GB."""
    make_run(tmp_path, Made(steps=400, servers=16, finished=False))
    tracemalloc.start()
    try:
        trace = read_trace(tmp_path / "trace.json", block_bytes=1 << 14)
        kept, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    spans = sum(each.start.size for each in trace.spans.values())
    assert spans > 20_000
    assert kept < 30 * spans
    assert most < 3 * SPAN.itemsize * spans, "two copies, and the order of the bars"
