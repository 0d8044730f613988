"""scripts/get_gsm8k.py on files of this disk: what the recipes' task reads comes out."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROWS = [
    {"question": "1 + 1?", "answer": "Two.\n#### 2", "source": "x"},
    {"question": "2 + 2?", "answer": "#### 4", "source": "y"},
]


def run(root: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    script = root / "scripts" / "get_gsm8k.py"
    return subprocess.run(
        [sys.executable, str(script), *arguments],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


@pytest.mark.parametrize("suffix", ["parquet", "jsonl"])
def test_a_split_from_a_file_keeps_question_and_answer(
    root: Path, tmp_path: Path, suffix: str
) -> None:
    datasets = pytest.importorskip("datasets")
    table, source = datasets.Dataset.from_list(ROWS), tmp_path / f"train.{suffix}"
    table.to_parquet(str(source)) if suffix == "parquet" else table.to_json(str(source))
    done = run(root, "--train", str(source), "--out", str(tmp_path / "data"))
    assert (done.returncode, done.stderr) == (0, "")
    lines = (tmp_path / "data" / "gsm8k_train.jsonl").read_text().splitlines()
    wanted = [{k: row[k] for k in ("question", "answer")} for row in ROWS]
    assert [json.loads(line) for line in lines] == wanted
    assert not (tmp_path / "data" / "gsm8k_test.jsonl").exists()


def test_rows_that_are_not_gsm8k_leave_no_file(root: Path, tmp_path: Path) -> None:
    source = tmp_path / "test.jsonl"
    source.write_text(json.dumps({"question": "1 + 1?", "answer": "2"}) + "\n")
    done = run(root, "--test", str(source), "--out", str(tmp_path / "data"))
    assert done.returncode == 2
    assert "answer 0 has no '####'" in done.stderr
    assert not list(tmp_path.glob("data/*"))
