"""The command line itself: help without heavy imports, and a reader that goes away."""

import errno
import json
import os
import pty
import select
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.rigs.interpreter import python
from titan_grpo.cli import COMMANDS, guarded

WAIT_S = 120.0

HEAVY = ("torch", "torchtitan", "numpy", "transformers", "matplotlib", "vllm", "sglang")

HELP = f"""
import contextlib, io, json, sys
sys.modules |= dict.fromkeys({HEAVY})  # an import of one of them fails
from titan_grpo.cli import main
for command in sys.argv[1:]:
    with contextlib.redirect_stdout(io.StringIO()) as shown:
        try:
            code = main([*command.split(), "--help"])
        except SystemExit as end:
            code = end.code
    print(json.dumps([code, shown.getvalue()]))
"""


def test_help_is_help_and_works_without_torch_and_without_an_engine() -> None:
    """And is not what a command prints without it."""
    commands = ["", *COMMANDS]
    done = python("-c", HELP, *commands)
    assert done.returncode == 0, done.stderr
    for command, line in zip(commands, done.stdout.splitlines(), strict=True):
        code, shown = json.loads(line)
        assert code == 0, done.stderr
        assert shown.startswith(f"usage: titan-grpo {command}"), shown[:200]
        assert "``" not in shown, "this is no docstring's markup in a terminal"


def test_ctrl_c_ends_a_command_without_a_word(tmp_path: Path) -> None:
    job = tmp_path / "job.toml"
    os.mkfifo(job)
    with subprocess.Popen(
        [sys.executable, "-m", "titan_grpo.cli", "plan", str(job)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        # Also where the tests run in the background of a shell, which has them ignore it.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    ) as planning:
        with job.open("w"):  # opens as the command does, which then waits for the text
            planning.send_signal(signal.SIGINT)
        # The text ends: a signal that came just before the command began to wait is seen then.
        said, _ = planning.communicate(timeout=WAIT_S)
    assert (planning.returncode, said) == (130, "")


def test_a_copy_to_a_full_disk_names_the_file_that_was_not_written(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def copy(argv: list[str], env: dict[str, str]) -> int:
        # as shutil.copy does, whose first name is that of the file that it reads
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "a/config.json", None, "b")

    assert guarded(copy, [], "titan-grpo export") == 2
    said = "titan-grpo export: b cannot be used: No space left on device\n"
    assert capsys.readouterr().err == said


@pytest.mark.parametrize(
    ("command", "code"),
    [
        (["-m", "titan_grpo.cli", "--help"], 141),
        (["-m", "titan_grpo.cli", "config"], 141),
        (["scripts/count.py", "--rooms"], -signal.SIGPIPE),
    ],
)
def test_a_reader_that_goes_away_ends_a_command_without_a_word(
    command: list[str], code: int, root: Path
) -> None:
    reader, writer = os.pipe()
    os.close(reader)  # before the command has written anything
    with open(writer, "wb") as ended:
        done = subprocess.run(
            [sys.executable, *command],
            cwd=root,
            stdout=ended,
            stderr=subprocess.PIPE,
            text=True,
            timeout=WAIT_S,
            check=False,
        )
    assert (done.stderr, done.returncode) == ("", code)


def command_in(folder: Path) -> Path:
    """``titan-grpo`` as a program of this name in a folder."""
    command = folder / "titan-grpo"
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m titan_grpo.cli "$@"\n')
    command.chmod(0o755)
    return command


COMPLETE = """
eval "$("$0" completion)"
for line; do
    IFS=" " read -ra words <<<"$line"
    COMP_WORDS=("$0" "${words[@]:-}") COMP_CWORD=$((${#words[@]} + (${#words[@]} == 0)))
    COMPREPLY=()
    _titan_grpo
    echo "${COMPREPLY[*]}"
done
"""


def test_a_shell_completes_commands_options_and_a_jobs_keys(tmp_path: Path) -> None:
    offered = {
        "qu": ["quickstart"],
        "": list(COMMANDS),
        "watch --int": ["--interval"],
        "doctor --weight_sync.slo": ["--weight_sync.slots"],
        "verify --weight_sync.slo": ["--weight_sync.slots"],
        "watch --weight_sync.slo": [],
        "nonsense --": [],
    }
    bash = ["bash", "-c", COMPLETE, str(command_in(tmp_path)), *offered]
    done = subprocess.run(bash, capture_output=True, text=True, timeout=WAIT_S, check=True)
    found = map(str.split, done.stdout.splitlines())
    assert dict(zip(offered, found, strict=True)) == offered


def test_zsh_completes_them_too(tmp_path: Path) -> None:
    """In a terminal, where the word is completed in its line."""
    shell = shutil.which("zsh")
    if shell is None:
        pytest.skip("no zsh on this machine (Debian: zsh)")
    path = f"{command_in(tmp_path).parent}:{os.environ['PATH']}"
    leader, terminal = pty.openpty()
    with subprocess.Popen(
        [shell, "-f", "-i"],
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
        start_new_session=True,
        env=os.environ | {"PATH": path, "HOME": str(tmp_path), "TERM": "dumb"},
    ) as process:
        os.close(terminal)
        try:

            def shown_after(typed: str, wanted: str) -> str:
                os.write(leader, typed.encode())
                shown, deadline = "", time.monotonic() + WAIT_S
                while wanted not in shown and time.monotonic() < deadline:
                    if select.select([leader], [], [], 1.0)[0]:
                        shown += os.read(leader, 65536).decode(errors="replace")
                return shown

            ready = shown_after('eval "$(titan-grpo completion)" && echo rea""dy\n', "\nready")
            assert "\nready" in ready
            # A space follows a word that is the only one.
            for begun, whole in (
                ("qu", "quickstart "),
                ("watch --int", "--interval "),
                ("doctor --weight_sync.slo", "--weight_sync.slots "),
            ):
                assert whole in shown_after(f"titan-grpo {begun}\t", whole)
                os.write(leader, b"\x15")  # empties the line
        finally:
            process.kill()
            os.close(leader)


@pytest.mark.parametrize("script", ["quickstart.sh", "verify_grpo_2gpu.sh"])
def test_a_scripts_help_makes_no_environment(root: Path, tmp_path: Path, script: str) -> None:
    (tmp_path / "scripts").mkdir()
    # As in an empty clone, and without setup.sh, which would be called.
    copied = shutil.copy(root / "scripts" / script, tmp_path / "scripts")
    shown = subprocess.run([copied, "--help"], capture_output=True, text=True, timeout=60)
    assert (shown.returncode, shown.stderr) == (0, "")
    assert f"scripts/{script} [--engine" in shown.stdout
