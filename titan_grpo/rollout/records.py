"""Recorded groups as JSON lines, and a client that replays them: the same data for two runs to
compare."""

import json
import math
import os
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from titan_grpo.errors import NOT_JSON, DataError, StorageError
from titan_grpo.samples import Completion, Group, spans_from


class Batch(msgspec.Struct, frozen=True):
    """One line of a record: the groups that the step from ``version`` consumed. Floats round-trip
    exactly."""

    version: int
    groups: tuple[Group, ...]
    whole: bool = True
    """False if dynamic sampling found fewer groups with reward spread than a step takes."""


class _Version(msgspec.Struct, frozen=True):
    """The index field of a line; its groups are decoded only when used."""

    version: int


class GroupRecorder:
    """Writer of one ``Batch`` per line.

    A resumed run appends to the same file. Lines of versions from its base on are cut first: it
    makes these steps again, except those of its base whose prompts it has ``used`` (they made no
    version).
    """

    def __init__(self, path: str, base_version: int, used: Container[int] = ()) -> None:
        self._path = Path(os.path.realpath(path))  # a link stays one
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            if self._path.is_file():  # /dev/null and pipes have nothing to cut
                self._cut(base_version, used)
            self._file = self._path.open("ab")
        except OSError as error:
            raise self._unwritable(error) from error

    def _cut(self, base_version: int, used: Container[int]) -> None:
        """Drop the lines of steps that the run makes again: the end of the file, so that this needs
        no room on the disk."""
        end = _before(self._path, base_version)
        for version, start, line in _lines(self._path, end):
            if version > base_version or (version == base_version and not _all_used(line, used)):
                break
            end = start + len(line) + 1
        if end <= self._path.stat().st_size:
            os.truncate(self._path, end)
        else:  # the last line is whole, without its end
            with self._path.open("ab") as file:
                file.write(b"\n")

    def _unwritable(self, error: OSError) -> StorageError:
        return StorageError(f"rollout.record_path {self._path} cannot be written: {error.strerror}")

    def write(self, version: int, groups: Iterable[Group], whole: bool = True) -> None:
        """Write one batch and flush it. Raises DataError if a prompt's payload has no JSON form,
        StorageError if the file cannot be written."""
        batch = Batch(version, tuple(groups), whole)
        try:
            # msgspec would write NaN as null. Completions were checked when they were made.
            json.dumps([group.prompt.payload for group in batch.groups], allow_nan=False)
            line = msgspec.json.encode(batch)
        except (TypeError, ValueError, OverflowError) as error:
            raise DataError(
                f"rollout.record_path needs prompts with a JSON payload and finite numbers: {error}"
            ) from error
        try:
            self._file.write(line + b"\n")
            self._file.flush()
        except OSError as error:
            raise self._unwritable(error) from error

    def close(self) -> None:
        self._file.close()


def check_record(path: str) -> None:
    """Raise DataError unless a file begins with a recorded batch."""
    try:
        with Path(path).open("rb") as file:
            # no deadline: it reads a file
            msgspec.json.decode(file.readline(), type=_Version)
    except NOT_JSON as error:
        raise DataError(
            "rollout.replay_path must be a record, as a run with rollout.record_path writes it;"
            f" {path!r} does not begin with a batch: {error}"
        ) from error
    except OSError as error:
        raise _unreadable(Path(path), error) from error


class ReplayClient:
    """RolloutClient's interface over a recorded file. Samples nothing; servers still get all
    versions."""

    def __init__(self, path: str, state: Mapping[str, Any] | None = None) -> None:
        """``state``: result of ``state`` when a checkpoint was written; without it, replay starts
        at the batch of the first requested version."""
        self._path = Path(path)
        # Not the lines: a long run's record is larger than rank 0's memory.
        self._batches = [(version, start) for version, start, _ in _lines(self._path)]
        self._next: int | None = (state or {}).get("next_batch")
        self._consumed = 0

    def next_batch(self, version: int, count: int, timeout_s: float) -> list[Group]:
        """Return the next recorded batch, beginning with the one of the first requested
        ``version``.

        A step that made no version takes a new batch too: its groups then have older versions than
        the recorded ones, and their recorded staleness. Raises DataError if there is no batch, or
        one of another size.
        """
        versions = [recorded for recorded, _ in self._batches]
        if self._next is None:
            self._next = versions.index(version) if version in versions else len(versions)
        if self._next >= len(self._batches):
            known = f"{min(versions)} to {max(versions)}" if versions else "none"
            raise DataError(
                f"{self._path} has no batch for version {version} (recorded: {known}): train fewer"
                " steps"
            )
        try:
            with self._path.open("rb") as file:
                file.seek(self._batches[self._next][1])
                # no deadline: it reads a file
                batch = msgspec.json.decode(file.readline(), type=Batch)
            if not all(group.completions for group in batch.groups):
                raise ValueError("a group has no completions")
        except OSError as error:
            raise _unreadable(self._path, error) from error
        except NOT_JSON as error:
            raise DataError(
                f"{self._path}: the batch of version {versions[self._next]} must have the fields"
                f" of samples.Group: {error}"
            ) from error
        found = len(batch.groups)
        if found > count or (batch.whole and found < count):
            raise DataError(
                f"{self._path}: version {version} has {found} groups,"
                f" rollout.prompts_per_step is {count}"
            )
        self._next += 1
        self._consumed += found
        return [_aged(group, batch.version - version) for group in batch.groups]

    def counters(self) -> dict[str, int]:
        return {"consumed_groups": self._consumed}

    def state(self) -> dict[str, Any]:
        return {} if self._next is None else {"next_batch": self._next}

    def in_flight(self, timeout_s: float = 0.0) -> dict[str, int]:
        return {}

    def take_left_out(self) -> list[float]:
        """Return []: groups that a filter left out are not recorded."""
        return []

    def _ignored(self, *_: Any, **__: Any) -> None:
        """Nothing is sampled, admitted or recorded again, and no process runs."""

    set_server = remove_server = fail = drain = skip_drains = _ignored
    used_without_version = record = close = _ignored


def _aged(group: Group, behind: int) -> Group:
    """Return a group for a trainer that is that many versions behind the recorded one: otherwise
    its tokens would be newer than the trainer."""
    if behind <= 0:
        return group

    def aged(version: int) -> int:
        return max(version - behind, 0)

    def older(c: Completion) -> Completion:
        first, last = aged(c.version_first), aged(c.version_last)
        spans = spans_from(first, [(aged(version), tokens) for version, tokens in c.token_spans])
        return replace(c, version_first=first, version_last=last, spans=spans)

    return replace(group, completions=tuple(map(older, group.completions)))


SCANNED_BYTES = 1 << 20
"""Bytes of a record that are read line by line, but for the lines that begin there."""


def _before(path: Path, version: int) -> int:
    """Return the place of a line before which all versions are older than ``version``; the first
    other one is near. Versions rise from line to line, so this halves the file: that of a long run
    has hundreds of gigabytes, and the other ranks wait while a resume cuts it."""
    try:
        low, high = 0, path.stat().st_size
        with path.open("rb") as file:
            while high - low > SCANNED_BYTES:
                middle = file.seek((low + high) // 2)
                # no deadline: they read a file up to the end of a line
                torn, line = file.readline(), file.readline()
                begin = middle + len(torn)
                if begin < high and _version_of(line) < version:
                    low = begin
                else:
                    high = middle
    except OSError as error:
        raise _unreadable(path, error) from error
    return low


def _version_of(line: bytes) -> float:
    """Return the version of a line; of a bad one, which ``_lines`` refuses, inf."""
    try:
        return msgspec.json.decode(line, type=_Version).version
    except NOT_JSON:
        return math.inf


def _lines(path: Path, start: int = 0) -> Iterator[tuple[int, int, bytes]]:
    """Yield (version, place of its first byte, line) of every whole line from the place ``start``
    on. A torn last line (of a killed run) is left out; any other bad line raises DataError."""
    # Bytes: a text may have further characters that str.splitlines takes for ends of lines.
    try:
        with path.open("rb") as file:
            file.seek(start)
            for line in file:
                try:
                    version = msgspec.json.decode(line, type=_Version).version
                except NOT_JSON as error:
                    if not file.read(1):
                        return
                    file.seek(0)
                    number = next(n for n, _ in enumerate(file, 1) if file.tell() > start)
                    raise DataError(f"{path}:{number} is not a recorded batch: {error}") from error
                yield version, start, line.rstrip(b"\n")
                start += len(line)
    except OSError as error:
        raise _unreadable(path, error) from error


def _all_used(line: bytes, used: Container[int]) -> bool:
    """Return whether a step's prompts are all in ``used``; False for a damaged line."""
    try:
        groups = msgspec.json.decode(line, type=Batch).groups
    except NOT_JSON:
        return False
    return all(group.prompt.index in used for group in groups)


def _unreadable(path: Path, error: OSError) -> DataError:
    return DataError(f"the recorded rollouts {path} cannot be read: {error}")
