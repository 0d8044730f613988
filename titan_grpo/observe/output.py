"""Files of a run: the recorder's, written to their end by its thread and left out while they cannot
be, and those that are written whole."""

import errno
import json
import os
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from math import isfinite
from pathlib import Path
from typing import Any, BinaryIO, TextIO

TAIL_BYTES = 1 << 20
"""Bytes at the end of an earlier trace in which to find its last event; no event is as long."""


class Output:
    """File of the recorder's thread. After an error it ignores writes; other files go on."""

    def __init__(
        self, path: Path, open_file: Callable[[Path], TextIO], again: bool = False
    ) -> None:
        """``again``: after an error open the file anew, once per ``flush``. What was written in
        between is missing: a full disk must not cost a long run the rest of its curve."""
        self._path, self._open, self._again = path, open_file, again
        self._file: TextIO | None = None
        self._may_open = True
        self._last_bytes = 0
        self._said = ""
        self.problem = ""
        """The first error; empty without any."""
        self.write("")

    @contextmanager
    def _noting_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self.problem = self.problem or f"{self._path} cannot be written: {error.strerror}"
            file, self._file, self._last_bytes = self._file, None, 0
            if file is not None:
                # It writes again what it has kept, and fails again on a full disk.
                with suppress(OSError):
                    file.close()

    def write(self, text: str, instead: bool = False) -> None:
        """Write at the end, or ``instead`` of the last text, which is flushed."""
        with self._noting_errors():
            if self._file is None and self._may_open:
                self._may_open = False
                self._file = self._open(self._path)
            if self._file is None:
                return
            if instead:
                # The file is open for appending: the next write goes to its new end.
                self._file.truncate(os.fstat(self._file.fileno()).st_size - self._last_bytes)
            self._file.write(text)
            self._last_bytes = len(text.encode())

    def flush(self) -> str:
        """Write what is kept. Returns the first error, once."""
        with self._noting_errors():
            if self._file is not None:
                self._file.flush()
                # Who removes the folder of a live run keeps what is open, and no reader finds it.
                if not os.path.samestat(os.fstat(self._file.fileno()), os.stat(self._path)):
                    raise FileNotFoundError(errno.ENOENT, "it was replaced")
        self._may_open = self._again
        said, self._said = self._said, self.problem
        return self.problem if self.problem != said else ""

    def close(self, end: str = "") -> None:
        """Write ``end`` and close the file."""
        self.write(end)
        with self._noting_errors():
            if self._file is not None:
                self._file.close()


class Gathered:
    """Values and counts on their way to history.jsonl: a line for each would be most of the file.
    With many servers these are hundreds at every step, and a resume reads them all."""

    def __init__(self) -> None:
        self._values: defaultdict[str, list[float]] = defaultdict(list)
        self._counts: defaultdict[str, float] = defaultdict(float)

    def take(self, entry: list[Any]) -> bool:
        """Keep an entry if it is one of these; return whether it is."""
        match entry:
            case "value", name, value:
                if isfinite(value):  # JSON has no other
                    self._values[name].append(value)
            case "count", name, amount:
                self._counts[name] += amount
            case _:
                return False
        return True

    def text(self) -> str:
        """Return the lines for all that came since the last call."""
        both = {"values": self._values, "counts": self._counts}
        self._values, self._counts = defaultdict(list), defaultdict(float)
        return "".join(json.dumps(entry) + "\n" for entry in both.items() if entry[1])


@contextmanager
def reading(path: Path) -> Iterator[BinaryIO]:
    """Open a file for reading. An OSError names it: one of a read has no name."""
    with path.open("rb") as file:
        try:
            yield file
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(path)) from error


BLOCK_BYTES = 1 << 20
"""Bytes per read from a file's end; a line may be longer."""


def lines_from_end(path: Path) -> Iterator[bytes]:
    """Yield the lines of a file, the last one first; none without a file."""
    if not path.is_file():
        return
    with reading(path) as file:
        begin, rest = file.seek(0, os.SEEK_END), b""
        while begin > 0:
            end, begin = begin, max(0, begin - BLOCK_BYTES)
            file.seek(begin)
            rest, *lines = (file.read(end - begin) + rest).split(b"\n")
            yield from reversed(lines)
        yield rest


def open_lines(path: Path) -> TextIO:
    """Open a file of JSON lines for appending; end a torn last line first."""
    torn = False
    if path.is_file() and path.stat().st_size:
        with path.open("rb") as file:
            file.seek(-1, os.SEEK_END)
            torn = file.read() != b"\n"
    stream = path.open("a")
    if torn:
        stream.write("\n")
    return stream


def open_trace(path: Path) -> TextIO:
    """Open a trace so that events can follow those of an earlier process. Cut only its end: the
    closing bracket or a torn event."""
    kept = 0
    if path.is_file() and (size := path.stat().st_size):
        with path.open("r+b") as file:
            start = file.seek(max(0, size - TAIL_BYTES))
            tail = file.read()
            # Of its own line: a torn event may end with a bracket too, as in "[Errno 104]".
            closed = tail.rstrip().endswith(b"\n]")
            end = tail.rfind(b"\n]" if closed else b",\n")
            kept = start + end if end > 0 else 0
            file.truncate(kept)
    stream = path.open("a")
    stream.write(",\n" if kept else "[\n")
    return stream


def write_whole(path: Path, text: str) -> None:
    """Write a file atomically: no reader, kill or full disk leaves half of it. Raises OSError with
    the file's name."""
    path = path.resolve()  # a link stays one, /dev/stdout among them
    draft = path.with_name(path.name + ".partial")
    try:
        draft.write_text(text, encoding="utf-8")
        os.replace(draft, path)
    except OSError as error:
        # that of a full disk has no name
        raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        draft.unlink(missing_ok=True)
