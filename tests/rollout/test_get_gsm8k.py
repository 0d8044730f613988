"""scripts/get_gsm8k.py on files of this disk: what the recipes' task reads comes out."""

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from scripts import get_gsm8k

ROWS = [
    {"question": "1 + 1?", "answer": "Two.\n#### 2", "source": "x"},
    {"question": "2 + 2?", "answer": "#### 4", "source": "y"},
]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """The script's exit code, by its arguments."""

    def make(*arguments: str) -> int:
        monkeypatch.setattr(sys, "argv", ["get_gsm8k.py", *arguments])
        return get_gsm8k.main()

    return make


def test_a_split_from_a_file_keeps_question_and_answer(
    run: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    datasets = pytest.importorskip("datasets")
    table = datasets.Dataset.from_list(ROWS)
    table.to_parquet(str(tmp_path / "train.parquet"))
    table.select([1]).to_json(str(tmp_path / "test.jsonl"))
    sources = [f"--train={tmp_path / 'train.parquet'}", f"--test={tmp_path / 'test.jsonl'}"]
    capsys.readouterr()
    assert run(*sources, "--out", str(tmp_path / "data")) == 0
    assert capsys.readouterr().err == ""
    wanted = [{k: row[k] for k in ("question", "answer")} for row in ROWS]
    for split, rows in (("train", wanted), ("test", wanted[1:])):
        lines = (tmp_path / "data" / f"gsm8k_{split}.jsonl").read_text().splitlines()
        assert [json.loads(line) for line in lines] == rows


def test_rows_that_are_not_gsm8k_leave_no_file(
    run: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "test.jsonl"
    source.write_text(json.dumps({"question": "1 + 1?", "answer": "2"}) + "\n")
    assert run("--test", str(source), "--out", str(tmp_path / "data")) == 2
    assert "answer 0 has no '####'" in capsys.readouterr().err
    assert not list(tmp_path.glob("data/*")), "and none of the split that was not asked for"
