"""scripts/get_gsm8k.py on files of this disk: what the recipes' task reads comes out."""

import json
import subprocess
from pathlib import Path

import pytest

from tests.rigs.interpreter import python

ROWS = [
    {"question": "1 + 1?", "answer": "Two.\n#### 2", "source": "x"},
    {"question": "2 + 2?", "answer": "#### 4", "source": "y"},
]


def run(root: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    return python(str(root / "scripts" / "get_gsm8k.py"), *arguments)


def test_a_split_from_a_file_keeps_question_and_answer(root: Path, tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    table = datasets.Dataset.from_list(ROWS)
    table.to_parquet(str(tmp_path / "train.parquet"))
    table.select([1]).to_json(str(tmp_path / "test.jsonl"))
    sources = [f"--train={tmp_path / 'train.parquet'}", f"--test={tmp_path / 'test.jsonl'}"]
    done = run(root, *sources, "--out", str(tmp_path / "data"))
    assert (done.returncode, done.stderr) == (0, "")
    wanted = [{k: row[k] for k in ("question", "answer")} for row in ROWS]
    for split, rows in (("train", wanted), ("test", wanted[1:])):
        lines = (tmp_path / "data" / f"gsm8k_{split}.jsonl").read_text().splitlines()
        assert [json.loads(line) for line in lines] == rows


def test_rows_that_are_not_gsm8k_leave_no_file(root: Path, tmp_path: Path) -> None:
    source = tmp_path / "test.jsonl"
    source.write_text(json.dumps({"question": "1 + 1?", "answer": "2"}) + "\n")
    done = run(root, "--test", str(source), "--out", str(tmp_path / "data"))
    assert done.returncode == 2
    assert "answer 0 has no '####'" in done.stderr
    assert not list(tmp_path.glob("data/*")), "and none of the split that was not asked for"
