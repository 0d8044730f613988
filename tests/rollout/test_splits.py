"""``rollout.dataset_split`` and ``dataset_config`` with files; directories of other kinds."""

from pathlib import Path
from typing import Any

import datasets  # type: ignore[import-untyped]
import pytest

from tests.rollout.rows import SUMS, write_rows
from titan_grpo.config.rollout import WorkerKeys
from titan_grpo.config.task import TaskKeys
from titan_grpo.errors import ConfigError
from titan_grpo.rollout.tasks.dataset import open_rows, open_table


@pytest.mark.parametrize(
    ("split", "rows"),
    [("train", SUMS), ("train[4:]", SUMS[4:]), ("train[:4]", SUMS[:4]), ("train[:50%]", SUMS[:3])],
)
def test_a_split_chooses_rows_of_files(
    tmp_path: Path, split: str, rows: list[dict[str, Any]]
) -> None:
    path = write_rows(tmp_path / "rows.jsonl", SUMS)
    assert list(open_table(TaskKeys(dataset=path, dataset_split=split))) == rows
    found = open_rows(WorkerKeys(dataset=path, dataset_split=split, dataset_filter=["level > 0"]))
    assert len(found) == sum(row["level"] != 0 for row in rows)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"dataset_split": "test"}, 'split must be .*: ValueError: Unknown split "test"'),
        ({"dataset_split": "train[9:]"}, "split must be .*: ValueError: .* corresponds to no data"),
        ({"dataset_split": "train["}, "split must be .*: ValueError: Unrecognized instruction"),
        ({"dataset_config": "main"}, "config must be empty for files"),
    ],
)
def test_a_split_or_configuration_that_files_do_not_have_is_one_line_with_key_and_file(
    tmp_path: Path, keys: dict[str, Any], message: str
) -> None:
    path = write_rows(tmp_path / "rows.jsonl", SUMS)
    with pytest.raises(ConfigError, match=rf"^rollout\.dataset_{message}") as refused:
        open_table(TaskKeys(dataset=path, **keys))
    assert f"(rollout.dataset {path!r})" in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_directory_of_a_kind_that_datasets_alone_knows_is_read(tmp_path: Path) -> None:
    datasets.Dataset.from_dict({"prompt": ["1", "2"]}).save_to_disk(str(tmp_path / "saved"))
    (table,) = (tmp_path / "saved").glob("*.arrow")
    (tmp_path / "rows").mkdir()
    table.rename(tmp_path / "rows" / "train.arrow")
    assert len(open_rows(WorkerKeys(dataset=str(tmp_path / "rows")))) == 2
