"""Rows of a dataset that pass its filters, in a seeded order."""

import json
import logging
import operator
import os
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from glob import escape, glob
from pathlib import Path
from typing import Any

from titan_grpo.config.rollout import WorkerKeys
from titan_grpo.config.task import TaskKeys
from titan_grpo.errors import NOT_JSON, ConfigError, DataError

BUILDERS = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".csv": "csv"}
"""Suffix of a file -> builder of ``datasets`` that reads it."""

WHOLE = "train"
"""Name of the one split that ``datasets`` makes of files."""

LARGEST_FOLDER = 10_000
"""Files and folders of a directory that is taken for a dataset."""

OPERATORS: dict[str, Callable[[Any, Any], bool]] = {
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "in": lambda value, among: value in among,
    "not in": lambda value, among: value not in among,
}

_CONDITION = re.compile(r"\s*(\S.*?)\s+(==|!=|<=|>=|<|>|in|not\s+in)\s+(.+?)\s*", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Condition:
    """One condition of ``rollout.dataset_filter``. Pure."""

    column: str
    operator: str
    value: Any

    @classmethod
    def parse(cls, text: str, key: str) -> "Condition":
        """Parse "COLUMN OPERATOR VALUE". Raises ConfigError naming ``key``.

        >>> Condition.parse('subject in ["algebra", "geometry"]', "rollout.dataset_filter")
        Condition(column='subject', operator='in', value=['algebra', 'geometry'])
        """
        found = _CONDITION.fullmatch(text)
        if not found:
            raise ConfigError(
                f'{key} must hold conditions "COLUMN OPERATOR VALUE" with one of'
                f" {' '.join(OPERATORS)}, got {text!r:.200}"
            )
        column, sign, shown = found.groups()
        try:
            value = json.loads(shown)
        except NOT_JSON as error:
            raise ConfigError(
                f"{key} must compare with a JSON value (a text in double quotes), got"
                f" {shown!r:.200} in {text!r:.200}"
            ) from error
        sign = " ".join(sign.split())
        if sign.endswith("in") and not isinstance(value, list):
            raise ConfigError(f"{key} must have a list after {sign}, got {text!r:.200}")
        return cls(column, sign, value)

    def holds(self, value: Any) -> bool:
        """Return whether a row with this value passes; null passes only == and !=. Raises TypeError
        for values that cannot be compared."""
        if value is None and self.operator not in ("==", "!="):
            return False
        return OPERATORS[self.operator](value, self.value)


class Rows:
    """Endless sequence of the rows of a table that pass a run's filters, epoch after epoch."""

    def __init__(self, table: Any, keys: WorkerKeys) -> None:
        """``table``: a ``datasets.Dataset``. Raises ConfigError for an unknown column, DataError if
        no row passes."""
        self.columns: list[str] = list(table.column_names)
        self.name, self._table, self._section = keys.dataset, table, keys.section
        self._kept: Sequence[int] = range(len(table))
        filter_key = f"{keys.section}.dataset_filter"
        for text in keys.dataset_filter:
            condition = Condition.parse(text, filter_key)
            self.require(condition.column, f"{filter_key} asks for {condition.column!r}")
            self._kept = self._passing(condition)
        if not self._kept:
            raise DataError(
                f"{keys.section}.dataset {self.name!r} has no row that passes its filters"
            )
        self._seed, self._shuffle = keys.seed, keys.dataset_shuffle
        # Two epochs: groups of the last one may be made again after the next one has begun.
        self._order = lru_cache(maxsize=2)(self._epoch)

    def __len__(self) -> int:
        return len(self._kept)

    def __getitem__(self, number: int) -> dict[str, Any]:
        """Return a row by its number in the dataset. Raises DataError for a text that is not
        UTF-8."""
        try:
            return dict(self._table[number])
        except UnicodeDecodeError as error:  # Arrow keeps bytes, and decodes texts only here
            raise DataError(
                f"row {number} of {self._section}.dataset {self.name!r} must be UTF-8: {error}"
            ) from error

    def require(self, column: str, user: str) -> None:
        """Raise ConfigError, its text beginning with ``user``, if there is no such column."""
        if column not in self.columns:
            raise ConfigError(
                f"{user}, a column that {self._section}.dataset {self.name!r} must have; it has"
                f" {', '.join(self.columns)}"
            )

    def require_values(self, column: str, user: str) -> None:
        """Raise ConfigError as ``require``, or DataError if a row that passes the filters has null
        there."""
        self.require(column, user)
        if absent := self.nulls(column):
            raise DataError(
                f"{self._section}.dataset {self.name!r} has no value (null) in its row"
                f" {absent[0]} (the first is row 0), and {user}: fill it, or leave such rows out"
                f" with {self._section}.dataset_filter = ['{column} != null']"
            )

    def nulls(self, column: str) -> list[int]:
        """Return the numbers of the rows that pass the filters and have null there."""
        values = self._column(column)
        if not values.null_count:
            return []
        absent = values.is_null().to_pylist()
        return [number for number in self._kept if absent[number]]

    def require_texts(self) -> None:
        """Raise DataError for a row with a text that is not UTF-8, which a run would meet when it
        uses the row."""
        try:
            self._table.with_format("arrow")[:].validate(full=True)
        except ValueError:  # Arrow does not name the row
            for number in self._kept:
                self[number]

    def number(self, index: int) -> int:
        """Return the number in the dataset of row ``index`` of the sequence."""
        epoch, place = divmod(index, len(self))
        return self._kept[self._order(epoch)[place] if self._shuffle else place]

    def _epoch(self, epoch: int) -> list[int]:
        order = list(range(len(self)))
        random.Random(f"{self._seed}/{epoch}").shuffle(order)
        return order

    def _column(self, name: str) -> Any:
        """Return the whole column in Arrow format; in Python's it would be read value by value."""
        return self._table.select_columns([name]).with_format("arrow")[:][name]

    def _passing(self, condition: Condition) -> list[int]:
        values = self._column(condition.column).to_pylist()
        kept = []
        for number in self._kept:
            try:
                if condition.holds(values[number]):
                    kept.append(number)
            except TypeError as error:
                raise DataError(
                    f"{self._section}.dataset_filter cannot compare {condition.column!r} of row"
                    f" {number}, {values[number]!r:.100}, with {condition.value!r}: {error}"
                ) from error
        return kept


def files_of(keys: TaskKeys) -> list[str]:
    """Return the files of a dataset's name or pattern; empty for a directory or a name on the Hub.
    Raises ConfigError if no file matches, or for a file of another type."""
    name, key = keys.dataset, f"{keys.section}.dataset"
    if Path(name).suffix.lower() not in BUILDERS or Path(name).is_dir():
        if Path(name).is_file():
            raise ConfigError(f"{key} must be a file of {', '.join(BUILDERS)}, got {name!r}")
        _check_folder(name, key)
        return []
    # Sorted: the order of prompts must not depend on the order of a directory's entries.
    files = [name] if Path(name).is_file() else sorted(glob(name, recursive=True))
    if not files:
        raise ConfigError(f"{key} must be an existing file or pattern, got {name!r}")
    return files


def _check_folder(name: str, key: str) -> None:
    """Raise ConfigError for a directory with so many files that ``datasets``, which looks through
    all of them, would take minutes."""
    seen = 0
    for _, folders, files in os.walk(name):
        seen += len(folders) + len(files)
        if seen > LARGEST_FOLDER:
            raise ConfigError(
                f"{key} must be a directory of at most {LARGEST_FOLDER} files and folders, with all"
                f" below it, {name!r} has more: name the files, such as"
                f" {str(Path(name) / '*.jsonl')!r}"
            )


def _has_rows(folder: Path) -> bool:
    # any suffix: a file may be compressed
    suffixes = (suffix.lower() for path in folder.rglob("*") for suffix in path.suffixes)
    return any(suffix in BUILDERS for suffix in suffixes)


def open_rows(keys: WorkerKeys) -> Rows:
    """Return the rows that pass the filters. Raises ConfigError or DataError."""
    return Rows(open_table(keys), keys)


def open_table(keys: TaskKeys) -> Any:
    """Return the ``datasets.Dataset`` of files, of a directory, or of the Hugging Face Hub.

    Raises ConfigError if it is not found or has no such split, DataError if a file cannot be read.
    """
    # Imported here: the import takes seconds, and most processes of a run need no dataset.
    import datasets  # type: ignore[import-untyped]
    from huggingface_hub.utils import logging as hub_logging

    datasets.disable_progress_bars()
    # Both log the errors that they raise, the Hub's client each of its six attempts.
    for library in (datasets.logging, hub_logging):
        library.set_verbosity(logging.CRITICAL)
    files, name, key = files_of(keys), keys.dataset, f"{keys.section}.dataset"
    # Escaped: patterns are expanded already, so "[" in a file's name is no pattern.
    options: dict[str, Any] = {"data_files": list(map(escape, files)), "split": WHOLE}
    if not files:
        options = {"name": keys.dataset_config or None, "split": keys.dataset_split}
    elif keys.dataset_config:
        raise ConfigError(
            f"{keys.section}.dataset_config must be empty for files ({key} {name!r}), which have no"
            f" configurations, got {keys.dataset_config!r}"
        )
    source = BUILDERS[Path(name).suffix.lower()] if files else name
    try:
        _require_no_null(files)
        table = datasets.load_dataset(source, **options)
    except StopIteration as error:
        # ``datasets`` raises this for an empty file.
        raise DataError(f"{key} {name!r} has no rows") from error
    except Exception as error:  # whatever a damaged file leads to, in many libraries
        if files:
            cause = _cause(error)
            # The errors of ``datasets`` for a file of blank lines, and before 5.0 for an empty one.
            empty = "corresponds to no data" in str(error) or "at least one example" in cause
            unread = "has no rows" if empty else f"cannot be read: {cause}"
            why = _bad_line(files) or f"{name!r} {unread}"
            raise DataError(f"{key} {why}") from error
        # Not found, no such configuration or split, or the Hub is unreachable.
        what = "cannot be loaded"
        if Path(name).is_dir() and not _has_rows(Path(name)):
            # After ``datasets`` has tried: it reads others too, such as .arrow.
            raise ConfigError(
                f"{key} must be a directory with files of {', '.join(BUILDERS)}, {name!r} has none"
            ) from error
        if not Path(name).is_dir():
            what = f"is no file or folder here, and {what} from the Hub"
        raise ConfigError(f"{key} {name!r} {what}: {_cause(error)}") from error
    if not files or keys.dataset_split == WHOLE:
        return table
    try:
        # After the whole, whose error would be the files': this one can only be the split's.
        return datasets.load_dataset(source, **(options | {"split": keys.dataset_split}))
    except ValueError as error:
        raise ConfigError(
            f'{keys.section}.dataset_split must be "{WHOLE}" or a part of it such as'
            f' "{WHOLE}[:1000]" for files ({key} {name!r}), got {keys.dataset_split!r}:'
            f" {_cause(error)}"
        ) from error


def _require_no_null(files: Sequence[str]) -> None:
    """Raise ValueError if a file of JSON begins with null, at which Arrow (26.0) ends the process
    by a signal."""
    for path in files:
        if BUILDERS[Path(path).suffix.lower()] == "json":
            with open(path, "rb") as file:
                if re.match(rb"\s*null\b", file.read(64)):
                    raise ValueError("it begins with null")


def _bad_line(files: Sequence[str]) -> str:
    """Return the place and fault of the first line of JSONL files that is no object, or empty."""
    for path in files:
        if not path.lower().endswith(".jsonl"):
            continue
        with open(path, "rb") as file:
            for number, line in enumerate(file, 1):
                try:
                    if not line.strip() or isinstance(json.loads(line), dict):
                        continue
                    reason = "it is something else"
                except NOT_JSON as error:
                    reason = str(error)
                return f"{path}:{number} must be a JSON object ({reason}): {line[:80]!r}"
    return ""


def _cause(error: BaseException) -> str:
    """Return an error's root cause in one line."""
    while error.__cause__ is not None:
        error = error.__cause__
    return " ".join(f"{type(error).__name__}: {error}".split())[:400]
