"""Run a command whose whole tree ends with us, and report its failure in one line."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from titan_grpo import cli
from titan_grpo.commands import verify
from titan_grpo.commands.processes import TrainingFailed, new_folder, run_logged
from titan_grpo.errors import ConfigError, StorageError
from titan_grpo.subprocesses import ENDING


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def test_the_log_keeps_everything_and_people_see_marked_lines(tmp_path: Path) -> None:
    seen: list[str] = []
    run_logged(
        python("print('noise'); print('titan-grpo| step 1/2')"),
        tmp_path / "log",
        os.environ,
        seen.append,
    )
    assert seen == ["step 1/2"]
    assert (tmp_path / "log").read_text() == "noise\ntitan-grpo| step 1/2\n"


@pytest.mark.parametrize(
    ("code", "error", "message"),
    [
        ("print('titan-grpo: bad key'); raise SystemExit(2)", ConfigError, "bad key"),
        (
            "print('failed (exitcode: 2)'); print('titan-grpo: bad key'); raise SystemExit(1)",
            ConfigError,
            "bad key",
        ),
        (
            "raise ValueError('3 rows')",
            TrainingFailed,
            r"ValueError: 3 rows \(exit code 1; .*log\)",
        ),
    ],
    ids=["a refused configuration", "a rank's refused configuration", "an exception"],
)
def test_a_failure_is_one_line(
    code: str, error: type[Exception], message: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=message) as caught:
        run_logged(python(code), tmp_path / "log", os.environ, None)
    assert "\n" not in str(caught.value)


IMPATIENT = """
import threading
from titan_grpo.commands.processes import in_foreground
def command():
    try:
        print("here", flush=True)
        threading.Event().wait(60)
    finally:
        print("closing", flush=True)
        print(input(), "closed", flush=True)
raise SystemExit(in_foreground(command))
"""


def reset_signals() -> None:
    """Undo what is inherited: tests in the background may ignore Ctrl-C, those under nohup a
    terminal's end."""
    for number in ENDING:
        signal.signal(number, signal.SIG_DFL)


@pytest.mark.parametrize("number", ENDING)
def test_a_second_signal_does_not_interrupt_the_end_of_what_was_started(number: int) -> None:
    """Ctrl-C twice while the quickstart's server loaded: it said that every process had ended, and
    the server was there for ten seconds more."""
    process = subprocess.Popen(
        python(IMPATIENT),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=reset_signals,
    )
    assert process.stdout is not None
    for line in ("here\n", "closing\n"):
        assert process.stdout.readline() == line
        process.send_signal(number)
    assert process.communicate("all", timeout=20)[0] == "all closed\n"
    assert process.returncode == 130


def test_a_full_disk_below_the_log_ends_the_run_in_one_line() -> None:
    with pytest.raises(StorageError, match=r"the log /dev/full must be writable, got No space"):
        run_logged(python("print(1)\nprint(2)"), Path("/dev/full"), os.environ, None)


OWNER = """
import os, sys
from pathlib import Path
from titan_grpo.commands.processes import run_logged
run_logged([sys.executable, "-c", sys.argv[1]], Path(sys.argv[2]), os.environ, print)
"""

# As torchrun: a child in a session of its own, which does not end by the signal of its group.
PARENT = """
import subprocess, sys
code = "import os, signal; print('titan-grpo|', os.getpid(), flush=True); signal.pause()"
subprocess.run([sys.executable, "-c", code], start_new_session=True)
"""


def test_a_killed_command_leaves_nothing_of_what_it_ran(tmp_path: Path) -> None:
    with subprocess.Popen(
        [*python(OWNER), PARENT, str(tmp_path / "log")], stdout=subprocess.PIPE, text=True
    ) as owner:
        assert owner.stdout is not None
        rank = psutil.Process(int(owner.stdout.readline()))
        below = [rank, *rank.parents()[:2]]
        assert owner.pid not in [process.pid for process in below]
        owner.kill()
        assert psutil.wait_procs(below, timeout=120)[1] == []


@pytest.mark.parametrize(
    ("arguments", "rule"),
    [
        (["--steps", "2"], "--steps must be 3 or more and --nproc 1 or more, got 2 and 2"),
        (
            ["--out", "."],
            "--out must be a new directory, . has files in it: remove it or name another",
        ),
        (["--out", "file"], "--out must be a new directory, file is a file: name another"),
        (
            ["--out", "new", "--json", "nowhere/result.json"],
            "--json must be a file that can be written, got 'nowhere/result.json': there is no"
            " folder 'nowhere'; make it",
        ),
        (
            ["--out", "new", "--json", "/dev/full"],
            "--json must be a file that can be written, got '/dev/full': the file would replace"
            " this device, pipe or folder",
        ),
        (
            ["--out", "new", "--json", "/proc/1/result.json"],
            "--json must be a file that can be written, got '/proc/1/result.json': this user may"
            " not write there; name another place",
        ),
    ],
)
def test_a_verification_that_cannot_be_done_is_refused_before_its_runs(
    arguments: list[str],
    rule: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").touch()
    engine = ["--vllm-python", sys.executable]
    assert cli.main(["verify", *engine, *arguments]) == 2
    assert capsys.readouterr().err == f"titan-grpo verify: {rule}\n"


@pytest.mark.parametrize("command", ["quickstart", "verify"])
def test_a_mistake_in_the_job_is_refused_before_anything_is_made_or_started(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "new"
    words = ["--vllm-python", sys.executable, "--out", str(out), "--rollout.group_size", "0"]
    assert cli.main([command, *words]) == 2
    said = capsys.readouterr()
    assert said.err.startswith(f"titan-grpo {command}: rollout.group_size must be 2 or more")
    assert not out.exists()


def test_more_servers_than_the_memory_holds_are_refused_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--vllm-python", sys.executable, "--out", str(tmp_path / "new")]
    assert cli.main(["quickstart", *words, "--servers", "100000"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert re.search(r"--servers must be at most \d+ on this machine, got 100000", line)


def test_runs_that_start_in_the_same_second_have_folders_of_their_own() -> None:
    name = str(new_folder("", "verify"))
    assert name.startswith("outputs/verify-20")
    assert name.endswith(f"-{os.getpid()}")


def test_the_result_of_a_verification_may_lie_beside_its_evidence(tmp_path: Path) -> None:
    out = tmp_path / "new"
    words = ["--out", str(out), "--json", str(out / "result.json")]
    assert verify.arguments([*words, "--vllm-python", sys.executable]).out == out
