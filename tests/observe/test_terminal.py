"""What a watcher of a run sees, what a start waits for, and which line names a failure's cause."""

import io
import re
import sys
import threading
from pathlib import Path

import pytest

from titan_grpo.observe.terminal import (
    Cause,
    next_command,
    print_error,
    print_status,
    status_of,
    waiting,
    waiting_line,
)

TRACEBACK = ["Traceback (most recent call last):", '  File "x.py", line 1, in f', "    g()"]
TORCHRUN = [
    "E0101 failed (exitcode: 1) local_rank: 0 (pid: 5) of binary: python",
    "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: ",
    "titan_grpo.train FAILED",
    "  exitcode  : 1 (pid: 5)",
]


def cause(*lines: str) -> Cause:
    found = Cause()
    for line in lines:
        found.read(line)
    return found


def test_only_marked_lines_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    print_status("a table\nof two lines")
    print_error("no such key")
    lines = [*capsys.readouterr().err.splitlines(), "[titan] 2026 - root - INFO - step 1", ""]
    assert [status_of(line) for line in lines] == ["a table", "of two lines", None, None, None]


def test_lines_that_nothing_takes_cost_who_prints_them_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with io.TextIOWrapper(io.FileIO("/dev/full", "w"), write_through=True) as full:
        monkeypatch.setattr(sys, "stderr", full)
        print_status("a step")
        print_error("no such key")


def test_the_first_complaint_is_the_cause_whatever_the_other_ranks_say() -> None:
    lost = "[rank1]: RuntimeError: gloo/transport/tcp/pair.cc: Connection closed by peer"
    found = cause(
        *TRACEBACK,
        lost,
        "titan-grpo: rank 0: SyncError: slots",
        "titan-grpo: rank 1: RunStopped: x",
        *TORCHRUN,
    )
    assert found.text == "rank 0: SyncError: slots"
    assert found.exitcode == 1


def test_an_exception_counts_more_than_the_connections_it_cut() -> None:
    lost = "[rank1]: RuntimeError: [pair.cc:553] Connection closed by peer [127.0.0.1]:5"
    found = cause(*TRACEBACK, "[rank0]: ValueError: shape (2, 3)", lost, *TORCHRUN)
    assert found.text == "ValueError: shape (2, 3)"
    assert cause(lost, *TORCHRUN).text.startswith("RuntimeError: [pair.cc:553]")


def test_a_rank_that_was_killed_without_a_word_is_said_to_be() -> None:
    found = cause(
        "E0101 failed (exitcode: -9) local_rank: 1 (pid: 5) of binary: python", *TORCHRUN[1:]
    )
    assert found.text == "a rank was ended by signal 9 (out of memory, maybe)"
    assert cause("nothing").text == "no rank gave a reason"


def test_the_next_command_is_one_that_the_shell_finds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "env" / "bin" / "titan-grpo"
    program.parent.mkdir(parents=True)
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "executable", str(program.with_name("python")))
    monkeypatch.setenv("PATH", str(tmp_path))
    assert next_command("report", "run") == "next: env/bin/titan-grpo report run"
    monkeypatch.setenv("PATH", str(program.parent))
    assert next_command("report", "my run") == "next: titan-grpo report 'my run'"


def telling() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "waiting"]


def test_a_wait_says_at_once_what_for_and_then_how_long() -> None:
    said: list[str] = []
    enough = threading.Event()

    def say(text: str) -> None:
        said.append(text)
        if len(said) == 3:
            enough.set()

    reasons = iter(("", "it is down", "it is down"))
    with waiting("server a", 600.0, say, every_s=0.01, why=lambda: next(reasons, "")):
        assert said[0] == "waiting for server a"
        assert enough.wait(60)
    for thread in telling():
        thread.join(60)
    assert not telling(), "it is silent once the wait is over"
    line = r"waiting for server a: \d+ s of at most 600 s \[#*\.+\]"
    assert re.fullmatch(line, said[1])
    assert re.fullmatch(f"{line}; it is down", said[2])


def test_a_wait_that_fails_passes_its_error_on_and_is_silent() -> None:
    with pytest.raises(RuntimeError, match="down"), waiting("a", None, lambda _: None, 60.0):
        raise RuntimeError("down")
    assert not telling()


@pytest.mark.parametrize(
    ("passed", "deadline", "end"),
    [
        (30, None, "x: 30 s"),
        (59.7, 120, "x: 60 s of at most 120 s [#########...........]"),
        (130, 120, f"x: 130 s of at most 120 s [{'#' * 20}]"),
    ],
)
def test_the_bar_is_the_part_of_the_deadline_that_is_used_up(
    passed: float, deadline: int | None, end: str
) -> None:
    assert waiting_line("x", passed, deadline) == f"waiting for {end}"
