import json
import os
import threading
from collections import Counter

import pytest

from titan_grpo.observe import names, recorder
from titan_grpo.observe.recorder import Recorder, merge, read_events, read_metrics, write_events


class Clock:
    """A clock that a test moves by hand."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_span_is_a_bar_in_the_trace_and_a_value_in_its_series(tmp_path) -> None:
    clock = Clock()
    recorder = Recorder(tmp_path, clock=clock)
    with recorder.span(names.SEND_S, track="lane a", version=3):
        clock.now += 0.25
    assert recorder.close()
    assert recorder.series(names.SEND_S) == [0.25]
    events = json.loads((tmp_path / "trace.json").read_text())
    (bar,) = [e for e in events if e["ph"] == "X"]
    assert (bar["name"], bar["ts"], bar["dur"], bar["args"]) == (
        names.SEND_S,
        100e6,
        0.25e6,
        {"version": 3},
    )
    (track,) = [e for e in events if e["ph"] == "M" and e["name"] == "thread_name"]
    assert (track["tid"], track["args"]["name"]) == (bar["tid"], "lane a")


def test_a_span_that_raises_is_recorded_all_the_same(tmp_path) -> None:
    recorder = Recorder(tmp_path)
    with pytest.raises(ZeroDivisionError), recorder.span(names.COMMIT_S):
        _ = 1 / 0
    assert recorder.statistics(names.COMMIT_S).count == 1
    recorder.close()


def test_each_step_is_one_line_of_valid_json_even_with_nan(tmp_path) -> None:
    recorder = Recorder(tmp_path)
    recorder.step(1, {names.REWARD: 0.5, names.KL: float("nan")})
    recorder.step(2, {names.REWARD: 0.75})
    recorder.close()
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    strict = [
        json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
        for line in lines
    ]
    assert [(row["step"], row[names.REWARD]) for row in strict] == [(1, 0.5), (2, 0.75)]
    assert strict[0][names.KL] is None
    assert recorder.series(names.REWARD) == [0.5, 0.75]


def test_a_resumed_run_goes_on_after_the_line_that_a_kill_tore(tmp_path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(
        '{"step": 1, "reward/mean": 0.1}\n{"step": 2, "reward/mean": 0.2}\n{"step": 3, "rew'
    )
    recorder = Recorder(tmp_path)
    recorder.step(2, {names.REWARD: 0.25})
    recorder.step(3, {names.REWARD: 0.3})
    recorder.close()
    assert [(row["step"], row[names.REWARD]) for row in read_metrics(path)] == [
        (1, 0.1),
        (2, 0.25),
        (3, 0.3),
    ]


def test_other_ranks_write_a_trace_of_their_own_and_no_metrics(tmp_path) -> None:
    for rank in (0, 1):
        recorder = Recorder(tmp_path, rank=rank)
        with recorder.span(names.COPY_S):
            pass
        recorder.close()
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "metrics.jsonl",
        "trace.json",
        "trace.rank1.json",
    ]
    merged = tmp_path / "all.json"
    merge([tmp_path / "trace.json", tmp_path / "trace.rank1.json"], merged)
    bars = [e for e in json.loads(merged.read_text()) if e["ph"] == "X"]
    assert {bar["pid"] for bar in bars} == {0, 1}


def test_the_trace_of_a_killed_run_is_readable_without_its_last_line(tmp_path) -> None:
    path = tmp_path / "trace.json"
    write_events(
        path,
        [
            recorder.instant("a", 0, 0, 1.0),
            recorder.instant("b", 0, 0, 2.0),
            recorder.instant("c", 0, 0, 3.0),
        ],
    )
    path.write_text(path.read_text()[: -len("]\n") - 20])
    assert [e["name"] for e in read_events(path)] == ["a", "b"]


def test_many_threads_record_at_once_and_nothing_is_lost(tmp_path) -> None:
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
    assert recorder.close()
    assert recorder.totals()[names.SYNC_COUNT] == 1600
    assert recorder.statistics(names.SEND_S).count == 1600
    assert all(versions == list(range(200)) for versions in recorder.commits().values())
    bars = Counter(
        e["tid"] for e in json.loads((tmp_path / "trace.json").read_text()) if e["ph"] == "X"
    )
    assert sorted(bars.values()) == [200] * 8


def test_a_disk_that_hangs_does_not_hold_up_the_caller(tmp_path) -> None:
    # A FIFO that nobody reads: opening it for writing blocks for ever, as a dead network file
    # system does.
    os.mkfifo(tmp_path / "trace.json")
    recorder = Recorder(tmp_path)
    for step in range(1000):  # it would not come to its end
        with recorder.span(names.BLOCKED_S):
            pass
        recorder.step(step, {names.REWARD: 0.0})
    assert not recorder.close(deadline_s=0.1)
    reader = os.open(tmp_path / "trace.json", os.O_RDONLY)  # lets the recorder's thread end
    os.close(reader)


def test_a_full_disk_is_among_the_errors_of_the_run_and_stops_nothing(tmp_path) -> None:
    (tmp_path / "trace.json").symlink_to("/dev/full")
    recorder = Recorder(tmp_path)
    for step in range(2000):
        recorder.step(step, {names.REWARD: 1.0})
        recorder.instant("x", detail="y" * 100)
    assert not recorder.close()
    (error,) = recorder.errors()
    assert "could not be written" in error
    assert recorder.statistics(names.REWARD).count == 2000


def test_every_name_has_its_meaning_and_no_two_names_are_equal() -> None:
    values = [
        v for k, v in vars(names).items() if k.isupper() and isinstance(v, str) and k != "DROPPED"
    ]
    assert len(values) == len(set(values))
    assert set(values) == set(names.MEANING)


def test_blocked_time_and_work_time_never_share_a_name() -> None:
    assert [n for n in names.MEANING if n.endswith("blocked_s")] == [names.BLOCKED_S]
    assert not any(
        "blocked" in n
        for n in (names.COPY_S, names.SEND_S, names.VERIFY_S, names.COMMIT_S, names.PAUSE_S)
    )
