"""A short soak with real processes: the long one's checks except memory, which takes a long run to
be told."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.soak.__main__ import main

SOAK = [sys.executable, "-m", "tests.soak.__main__"]


@pytest.mark.e2e
def test_forty_versions_under_faults_serve_nothing_wrong_and_leave_nothing_behind(tmp_path: Path):
    report = tmp_path / "soak.json"
    options = [
        "--versions",
        "40",
        "--window",
        "20",
        "--fault-every",
        "10",
        "--seconds-per-version",
        "0.15",
        "--seed",
        "3",
    ]
    done = subprocess.run(
        [*SOAK, *options, "--json", str(report)], capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(report.read_text())
    assert (found["passed"], found["published"], sum(found["faults"].values())) == (True, 40, 4)
    assert done.stdout.splitlines()[-1].startswith("soak passed: 40 versions, 4 faults")
    judged = {row["what"]: row["demanded"] for row in found["rows"]}
    assert judged["memory, trainer"] == "not judged in a short run"
    assert judged["handles, trainer"] == "none left behind"


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--versions", "0"], "--versions must be 1 or greater, got 0"),
        (["--versions", "x"], "invalid int value"),
        (["--fault-every", "-1"], "--fault-every must be 0 or greater, got -1"),
        (["--json", "missing/folder/x.json"], "--json must name a file in a directory that exists"),
        (["--speed", "3"], "unrecognized arguments"),
    ],
)
def test_a_bad_argument_is_one_line_and_exit_code_2(arguments, line, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert line in said
    assert len(said.strip().splitlines()) == 1
