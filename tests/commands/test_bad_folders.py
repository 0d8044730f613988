"""Commands that read a run's folder, where that is damaged, of another version, or none: what can
be read is shown, the rest is one line."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.views.runs import Made, make_run
from titan_grpo import cli
from titan_grpo.observe.run_lock import held

ALERT = ("--check", "--alert", "reward/mean > 100")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made")
    make_run(folder, Made(steps=3))
    return folder


@pytest.fixture
def folder(made: Path, tmp_path: Path) -> Path:
    """A copy: each test breaks it in its way."""
    return shutil.copytree(made, tmp_path, dirs_exist_ok=True)


@pytest.fixture
def killed(tmp_path: Path) -> Path:
    """A run that ended without a summary."""
    make_run(tmp_path, Made(steps=3, finished=False))
    with held(tmp_path):
        pass
    return tmp_path


SUMMARIES: dict[str, Callable[[bytes], bytes]] = {
    "torn": lambda whole: whole[: len(whole) // 2],
    "no table": lambda whole: b"[1, 2]",
    "no text": lambda whole: b"\xff\xfe\0",
    "of an older version": lambda whole: b'{"steps": 3}',
    "of a newer version": lambda whole: json.dumps(json.loads(whole) | {"added": 1}).encode(),
}


@pytest.mark.parametrize(
    ("command", "change"),
    [*(("report", change) for change in SUMMARIES), ("watch", "torn"), ("check", "torn")],
)
def test_a_summary_that_this_version_does_not_write_is_one_line(
    folder: Path, command: str, change: str, capsys: pytest.CaptureFixture[str]
) -> None:
    summary = folder / "summary.json"
    summary.write_bytes(SUMMARIES[change](summary.read_bytes()))
    words = ["watch", str(folder), *ALERT] if command == "check" else [command, str(folder)]
    assert cli.main(words) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"RUN must have the summary of a run, {summary} is none" in line


@pytest.mark.parametrize(
    ("command", "file"),
    [
        *(("report", f) for f in ("metrics.jsonl", "trace.json", "samples.jsonl", "summary.json")),
        *(("watch", f) for f in ("metrics.jsonl", "history.jsonl", "summary.json")),
        ("check", "metrics.jsonl"),
    ],
)
def test_a_file_that_the_disk_does_not_give_is_one_line_with_its_name(
    folder: Path, command: str, file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for path in folder.iterdir():
        os.utime(path, (0, 0))  # the summary must not be the older
    (folder / file).unlink()
    (folder / file).symlink_to("/proc/self/mem")  # opens, and then the kernel answers EIO
    words = ["watch", str(folder), *ALERT] if command == "check" else [command, str(folder)]
    assert cli.main(words) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"{folder / file} cannot be used: " in line


DAMAGE = {
    "values that are no numbers": (
        "metrics.jsonl",
        b'{"step": 2, "reward/mean": "high"}\n{"step": "two"}\n{"step": null}\n[1]\n',
    ),
    "bytes that are no text": ("metrics.jsonl", b"\xff\xfe\0\n"),
    "brackets without end": ("metrics.jsonl", b"[" * 100_000 + b"\n"),
    "an evaluation without a name": ("metrics.jsonl", b'{"step": 3, "evaluation/reward": 2}\n'),
    "numbers that no column has room for": (
        "trace.json",
        b'{"ph":"X","name":"train","tid":18446744073709551616,"args":{}},\n'
        b'{"ph":"M","name":"thread_name","tid":9223372036854775808,"args":{"name":"a"}},\n',
    ),
    "a history of no text": ("history.jsonl", b"\xff\xfe\n"),
    "entries of other types": (
        "history.jsonl",
        b'["resume", [1]]\n["quantised", ["u"], "fp8"]\n["count", "a", "b"]\n[]\n5\n'
        b'["of tomorrow", 1]\n["commit", 3]\n["evaluation", {"name": "x", "version": "1"}]\n',
    ),
    "completions whose lengths differ": (
        "samples.jsonl",
        b'{"step":9,"version":1,"tokenizer":"x","completions":[{"server":"a","reward":1,'
        b'"version_first":0,"version_last":0,"prompt":[1],"tokens":[1,2],"engine":[0.1],'
        b'"trainer":[0.1,0.2]}]}\n',
    ),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_lines_that_no_run_writes_are_left_out(
    killed: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    name, lines = DAMAGE[kind]
    with (killed / name).open("ab") as file:
        file.write(lines)
    assert cli.main(["report", str(killed)]) == 0
    for more in (ALERT, ()):
        capsys.readouterr()
        assert cli.main(["watch", str(killed), *more]) == 1
        assert "the run ended after step 3 without a summary" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["metrics.jsonl", "history.jsonl"])
def test_a_file_that_cannot_be_read_is_one_line(
    killed: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (killed / name).unlink()
    (killed / name).symlink_to(name)
    assert cli.main(["watch", str(killed)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"{killed / name} cannot be used: Too many levels of symbolic links" in line


@pytest.mark.parametrize(
    "words",
    [
        ["watch", "file/x"],
        ["watch", "x" * 300],
        ["report", "x" * 300],
        ["servers", "list", "--run", "x" * 5000],
        ["quickstart", "--vllm-python", "/bin/true", "--out", "x" * 300],
        ["verify", "--vllm-python", "/bin/true", "--out", "x" * 300],
    ],
    ids=lambda words: words[0],
)
def test_a_name_that_can_be_no_folders_is_one_line(
    words: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").touch()
    assert cli.main(words) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"titan-grpo {words[0]}: ")
