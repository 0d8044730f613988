#!/usr/bin/env python
"""Write GSM8K as the JSONL files that the recipes read: data/gsm8k_train.jsonl and
data/gsm8k_test.jsonl.

    python scripts/get_gsm8k.py [--out data]
    python scripts/get_gsm8k.py --train train.parquet --test test.parquet

The first reads the Hugging Face Hub, the second files of this disk.
Rows have "question" and "answer"; other columns are left out. HF_ENDPOINT names a mirror of the
Hub.
"""

import argparse
import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the checkout, for its package

from titan_grpo.config.task import TaskKeys
from titan_grpo.errors import ConfigError, DataError
from titan_grpo.rollout.tasks.dataset import open_table

HUB, CONFIG = "openai/gsm8k", "main"
COLUMNS = ("question", "answer")
MARK = "####"
"""Before the final number of an answer."""


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("data"), metavar="FOLDER")
    for split in ("train", "test"):
        parser.add_argument(f"--{split}", default="", metavar="FILE", help="parquet or JSONL")
    return parser.parse_args(argv)


def write(source: str, split: str, path: Path) -> int:
    """Write one split; how many rows. Raises ConfigError, DataError."""
    hub = TaskKeys(dataset=HUB, dataset_config=CONFIG, dataset_split=split)
    table = open_table(TaskKeys(dataset=source) if source else hub)
    if missing := [name for name in COLUMNS if name not in table.column_names]:
        raise DataError(f"{source or HUB} has no column {missing[0]!r}: it is not GSM8K")
    for number, row in enumerate(table):
        if MARK not in row["answer"]:
            raise DataError(f"{source or HUB}: answer {number} has no {MARK!r} before its number")
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    with part.open("w") as file:
        file.writelines(json.dumps({k: row[k] for k in COLUMNS}) + "\n" for row in table)
    os.replace(part, path)
    return len(table)


def main() -> int:
    """Write both splits, or those whose files are given."""
    options = parse(sys.argv[1:])
    given = {"train": options.train, "test": options.test}
    try:
        for split, source in given.items():
            if source or not any(given.values()):
                path = options.out / f"gsm8k_{split}.jsonl"
                print(f"{path}: {write(source, split, path)} rows")
    except (ConfigError, DataError, OSError) as error:
        print(f"get_gsm8k: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
