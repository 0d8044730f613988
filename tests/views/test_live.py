"""Following a run: its files while they grow, the screen, and the command beside a run that
starts later."""

import os
import pty
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tests.rigs.present import present
from tests.views.runs import Made, make_run, url_of
from titan_grpo import cli
from titan_grpo.observe import names, report
from titan_grpo.observe.recorder import Recorder
from titan_grpo.views import live
from titan_grpo.views.live import Follower, State, Tail, screen, spark, step_line

DEADLINE_S = 60.0


def test_a_growing_file_gives_each_whole_line_once(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    tail = Tail(path)
    assert tail.lines() == []
    with path.open("wb") as file:
        for text, expected in ((b"a\nb", [b"a"]), (b"c\n", [b"bc"]), (b"", []), (b"d\n", [b"d"])):
            file.write(text)
            file.flush()
            assert tail.lines() == expected
    path.write_bytes(b"e\n")
    assert tail.lines() == [b"e"], "a file that was replaced is read anew"


def test_a_last_line_that_is_replaced_is_given_again_and_no_other(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    path.write_bytes(b"a\nb\n")
    tail = Tail(path)
    assert tail.lines() == [b"a", b"b"]
    for content, expected in (
        (b"a\n", []),  # cut, and not written yet
        (b"a\nb\n", []),
        (b"a\n", []),
        (b"a\nb", []),
        (b"a\nb and more\n", [b"b and more"]),
        (b"a\nb and more\nc\n", [b"c"]),
    ):
        path.write_bytes(content)
        assert tail.lines() == expected


def test_the_last_evaluation_of_a_run_is_seen(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path)
    recorder.step(1, {names.REWARD: 0.25})
    recorder.step(2, {names.REWARD: 0.5})
    follower = Follower(tmp_path)
    deadline = time.monotonic() + DEADLINE_S
    while follower.state.step < 2:
        assert time.monotonic() < deadline
        follower.read()
    recorder.after_last_step({"evaluation/held_out/reward": 0.75})
    recorder.close()
    (row,) = follower.read()
    assert [row["step"] for row in follower.state.rows] == [1, 2]
    assert step_line(row, {}).startswith("step 2  reward 0.5 ")
    assert step_line(row, {}).endswith("evaluation held_out 0.75")


def test_of_a_long_file_only_its_beginning_and_its_end_are_read(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    count = 3 * live.TAIL_BYTES // 10
    path.write_bytes(b"".join(b"%09d\n" % k for k in range(count)))
    numbers = [int(line) for line in Tail(path).lines()]
    assert (numbers[0], numbers[-1]) == (0, count - 1)
    assert len(numbers) == len(set(numbers)) < count
    assert numbers == sorted(numbers)


def test_servers_that_came_or_left_in_the_middle_of_a_long_history_are_known(
    tmp_path: Path,
) -> None:
    path = tmp_path / "history.jsonl"
    filler = '["value", "sync/send_s", 0.25]\n' * (3 * live.TAIL_BYTES // 60)
    path.write_text(
        '["process"]\n["server", "a"]\n["server", "b"]\n["commit", "a", 1]\n["commit", "b", 1]\n'
        f'{filler}["member", "a", "left", 7]\n["member", "c", "joined", 8]\n{filler}'
        '["commit", "b", 9]\n'
    )
    follower = Follower(tmp_path)
    follower.read()
    assert follower.state.held == {"b": 9, "c": None}
    # all of the next process is in the middle: its beginning, its servers, its commits
    path.write_text(path.read_text() + f'["process"]\n["server", "d"]\n{filler}{filler}')
    follower = Follower(tmp_path)
    follower.read()
    assert follower.state.held == {"d": None}


def test_the_last_commits_of_a_history_are_known_that_is_hardly_longer_than_both_its_ends(
    tmp_path: Path,
) -> None:
    line = '["value", "sync/send_s", 0.25]\n'
    count = 2 * live.TAIL_BYTES // len(line)
    end = '["commit", "a", 9]\n'
    (tmp_path / "history.jsonl").write_text(f'["process"]\n["server", "a"]\n{line * count}{end}')
    follower = Follower(tmp_path)
    follower.read()
    assert follower.state.held == {"a": 9}


def follower_of(folder: Path, made: Made) -> Follower:
    make_run(folder, made)
    follower = Follower(folder)
    follower.read()
    return follower


def test_a_follower_knows_steps_versions_commits_and_errors(tmp_path: Path) -> None:
    state = follower_of(tmp_path, Made(steps=20, servers=3, faulty_server=1)).state
    assert state.step == 20
    assert state.held == {url_of(0): 20, url_of(1): 19, url_of(2): 20}
    assert state.commits[url_of(1)] == 19
    assert [error[:10] for error in state.errors] == ["version 10", "version 20"]


def test_of_an_older_run_in_the_same_folder_no_server_commit_or_error_is_shown() -> None:
    state = State()
    for run in ("first", "second"):
        for entry in (["process"], ["server", "a"], ["server", "b"], ["commit", "a", 0]):
            state.add_entry(entry)
        # Before its first step: the process's own.
        state.add_entry(["error", f"{run} failed"])
        if run == "first":
            state.add_entry(["commit", "b", 10])
            state.add_entry(["server", "c"])
        state.add_entry(["first step"])
    assert state.held == {"a": 0, "b": None}
    assert state.commits == {"a": 1, "b": 0}
    state.add_entry(["error", "later"])
    assert list(state.errors) == ["second failed", "later"]


def test_a_commit_in_which_a_server_leaves_does_not_bring_it_back() -> None:
    """Before, the screen had it to the run's end, behind ever more versions."""
    state = State()
    for entry in (["process"], ["server", "a"], ["commit", "a", 3], ["member", "a", "left", 5]):
        state.add_entry(entry)
    state.add_entry(["commit", "a", 4])
    assert (state.held, state.commits) == ({}, {"a": 2})
    state.add_entry(["member", "a", "joined", 9])
    state.add_entry(["commit", "a", 9])
    assert (state.held, state.commits) == ({"a": 9}, {"a": 3})


def test_a_step_that_comes_again_replaces_those_from_it_on(tmp_path: Path) -> None:
    follower = follower_of(tmp_path, Made(steps=5, finished=False))
    make_run(tmp_path, Made(steps=1, first_step=3, finished=False))
    assert [row["step"] for row in follower.read()] == [3]
    assert [row["step"] for row in follower.state.rows] == [1, 2, 3]


def shown(state: State, since_s: float = 0.0) -> str:
    console = Console(width=120, file=open(os.devnull, "w"), record=True)  # noqa: SIM115
    with console.file:
        console.print(screen("run", state, state.last_change + since_s))
    return console.export_text()


def test_the_screen_has_the_run_in_figures(tmp_path: Path) -> None:
    text = shown(follower_of(tmp_path, Made(steps=20, servers=2, slow_server=1)).state, 3.0)
    assert "run: step 20   last step 3 s ago   waiting for rollouts 10 %" in text
    for label in ("reward", "staleness, largest", "waiting for rollouts", "10.0.0.1:8000"):
        assert label in text
    assert max(map(len, text.splitlines())) <= 120


def test_a_step_is_as_old_as_the_file_says_also_for_a_watcher_that_starts_later(
    tmp_path: Path,
) -> None:
    make_run(tmp_path, Made(steps=2, finished=False))
    an_hour_ago = time.time() - 3600
    os.utime(tmp_path / "metrics.jsonl", (an_hour_ago, an_hour_ago))
    follower = Follower(tmp_path)
    follower.read()
    assert time.monotonic() - follower.state.last_change == pytest.approx(3600, abs=60)
    make_run(tmp_path, Made(steps=1, first_step=3, finished=False))
    follower.read()
    assert time.monotonic() - follower.state.last_change < 60


def test_a_server_is_behind_the_trainer_too_but_not_behind_steps_to_be_made_again(
    tmp_path: Path,
) -> None:
    recorder = Recorder(tmp_path)
    recorder.committed(url_of(0), 3)
    recorder.step(1, {names.VERSION: 0.0})
    recorder.step(12, {names.VERSION: 11.0})
    recorder.close()
    follower = Follower(tmp_path)
    follower.read()
    assert "10.0.0.0:8000        3       8" in shown(follower.state)
    recorder = Recorder(tmp_path)  # resumed from step 4, and loading
    recorder.committed(url_of(0), 4)
    recorder.close()
    for state in (follower.state, (again := Follower(tmp_path)).state):
        follower.read()
        again.read()
        assert "10.0.0.0:8000        4       0" in shown(state)


def test_before_the_first_step_the_screen_says_what_the_servers_hold(tmp_path: Path) -> None:
    state = State()
    assert "run: no step yet, for 7 s" in shown(state, 7.0)
    state.add_entry(["server", "http://a:1"])
    state.add_entry(["server", "http://b:1"])
    state.add_entry(["commit", "http://b:1", 0])
    assert "1 of 2 servers hold a version" in shown(state)


def test_a_server_that_is_lost_is_not_shown_with_its_last_version() -> None:
    state = State()
    for entry in (["process"], ["server", "http://a:1"], ["commit", "http://a:1", 3]):
        state.add_entry(entry)
    state.add_row({"step": 1})
    assert "a:1           3       0             1" in shown(state)
    state.add_entry(["holds", "http://a:1", None])
    assert "a:1     not serving       -             1" in shown(state)


def test_values_are_drawn_from_low_to_high() -> None:
    assert spark([0, 1, 2, 3]) == "▁▃▆█"
    assert spark([5, 5]) == "▁▁"
    assert spark([]) == ""
    assert len(spark([float(k) for k in range(1000)])) == live.SPARK_WIDTH


def test_a_line_without_a_value_has_a_dash() -> None:
    line = step_line({"step": 3, names.REWARD: 0.25}, {"http://a:1": 2, "http://b:1": None})
    assert line.startswith("step 3  reward 0.25  stale -")
    assert line.endswith("versions a:1=2 b:1=?")


@contextmanager
def watching(folder: Path, **streams: Any) -> Iterator[subprocess.Popen[str]]:
    """``titan-grpo watch`` in a process of its own, ended with the block."""
    with subprocess.Popen([*COMMAND, str(folder)], **streams) as watcher:
        try:
            yield watcher
        finally:
            watcher.kill()


COMMAND = [sys.executable, "-m", "titan_grpo.cli", "watch", "--interval", "0.05"]


def test_a_watcher_that_starts_first_shows_each_step_and_ends_with_the_run(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with watching(run, stdout=subprocess.PIPE, text=True) as watcher:
        waits = f"waiting for {run}, which is not there yet\n"
        assert present(watcher.stdout).readline() == waits
        recorder = Recorder(run)
        recorder.known_server(url_of(0))
        for step in (1, 2):
            recorder.committed(url_of(0), step)
            recorder.step(step, {names.REWARD: step / 4})
            # one step at a time: the watcher has said each before the next is made
            assert present(watcher.stdout).readline().startswith(f"step {step}  reward {step / 4}")
        report.write_report(recorder, "run", "async")
        rest = present(watcher.stdout).read()
        assert watcher.wait(DEADLINE_S) == 0
    assert "run (async)" in rest
    assert f"titan-grpo report {run}" in rest


def test_a_watcher_of_a_run_without_a_step_says_so_once(tmp_path: Path) -> None:
    with watching(tmp_path, stdout=subprocess.PIPE, text=True) as watcher:
        waits = f"{tmp_path} has no step yet: waiting for the first\n"
        assert present(watcher.stdout).readline() == waits
        Recorder(tmp_path).step(1, {names.REWARD: 0.5})
        assert present(watcher.stdout).readline().startswith("step 1  reward 0.5")


def test_a_run_that_failed_ends_the_watcher_and_a_check_with_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_run(tmp_path, Made(steps=2, ended_by="RunStopped: no rows"))
    assert cli.main(["watch", str(tmp_path)]) == 1
    assert "ended by                RunStopped: no rows" in capsys.readouterr().out
    assert cli.main(["watch", str(tmp_path), "--check", "--stalled", "1"]) == 1
    assert capsys.readouterr().out == "the run ended after step 2: RunStopped: no rows\n"


RESTARTED = """
import os, signal, sys
from pathlib import Path
from titan_grpo.observe import report
from titan_grpo.observe.recorder import Recorder
from titan_grpo.observe.run_lock import held
folder, start = Path(sys.argv[1]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
with held(folder):
    recorder = Recorder(folder)
    recorder.step(start + 1, {})
    if start == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    report.write_report(recorder, "run", "async")
"""
"""A run that is killed after its first step, and makes its second when it is started again."""


@pytest.mark.slow
def test_a_watcher_goes_on_while_torchrun_starts_a_killed_run_again(tmp_path: Path) -> None:
    script, run = tmp_path / "job.py", tmp_path / "run"
    script.write_text(RESTARTED)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--max-restarts=1"]
    with watching(run, stdout=subprocess.PIPE, text=True) as watcher:
        subprocess.run([*torchrun, script, run], check=True, timeout=3 * DEADLINE_S)
        said = present(watcher.stdout).read()
        assert watcher.wait(DEADLINE_S) == 0
    assert "step 2  " in said
    assert "run (async)" in said


def test_a_terminal_shows_the_screen_until_the_run_ends(tmp_path: Path) -> None:
    make_run(tmp_path, Made(steps=20))
    outer, inner = pty.openpty()
    environment = os.environ | {"TERM": "xterm", "COLUMNS": "120", "LINES": "50"}
    with watching(tmp_path, stdout=inner, env=environment) as watcher:
        os.close(inner)
        text = all_of(outer)
        assert watcher.wait(DEADLINE_S) == 0
    assert "step 20" in text
    assert "█" in text
    assert "titan-grpo report" in text


def test_a_terminal_is_told_of_a_folder_that_is_not_there_yet(tmp_path: Path) -> None:
    outer, inner = pty.openpty()
    run = tmp_path / "run"
    environment = os.environ | {"TERM": "xterm", "COLUMNS": "400"}
    with watching(run, stdout=inner, env=environment) as watcher:
        os.close(inner)
        with open(outer, closefd=False) as terminal:
            assert terminal.readline() == f"waiting for {run}, which is not there yet\n"
        make_run(run, Made(steps=1))
        all_of(outer)
        assert watcher.wait(DEADLINE_S) == 0


def all_of(descriptor: int) -> str:
    """What a terminal was sent until its last writer closed it."""
    parts, deadline = [], time.monotonic() + DEADLINE_S
    while select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))[0]:
        try:
            part = os.read(descriptor, 1 << 16)
        except OSError:
            break
        if not part:
            break
        parts.append(part)
    os.close(descriptor)
    return b"".join(parts).decode()


@pytest.mark.parametrize("interval", ["0", "nan", "-1"])
def test_an_interval_that_is_none_is_refused(
    interval: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["watch", "x", f"--interval={interval}"]) == 2
    assert "--interval must be in [0.05, 3600]" in capsys.readouterr().err
