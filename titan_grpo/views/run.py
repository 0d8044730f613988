"""Reads a run's folder: metrics.jsonl, trace.json, summary.json. The run may still be going.

The trace of a long run has millions of events (three of the trainer's per step, three per version
and server), so its spans become columns and not objects.
"""

import math
import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from titan_grpo.errors import ConfigError
from titan_grpo.observe.recorder import read_metrics
from titan_grpo.observe.schema import Summary
from titan_grpo.observe.shown import ShownStep

BLOCK_BYTES = 1 << 24
"""Of the trace, read at a time."""

TRAINER = "main thread"
"""Track of the trainer's own spans; a server's track is its URL."""


# Millions of them hold no cycle: the garbage collector's search for one doubles the time.
class _Args(msgspec.Struct, gc=False):
    version: int | None = None
    step: int | None = None
    name: str = ""
    message: str = ""


class _Event(msgspec.Struct, gc=False):
    ph: str
    name: str
    tid: int = -1
    ts: float = 0.0
    dur: float = 0.0
    args: _Args = msgspec.field(default_factory=_Args)


@dataclass(frozen=True, slots=True)
class Spans:
    """Spans of one kind on one track, by start, all of the same length.

    ``number`` is the version (of a server's) or the step (of the trainer's), -1 without one. Times
    are seconds since the first event of the run.
    """

    start: npt.NDArray[np.float64]
    stop: npt.NDArray[np.float64]
    number: npt.NDArray[np.int64]

    @property
    def total_s(self) -> float:
        """Sum of the durations."""
        return float((self.stop - self.start).sum())

    @property
    def median_s(self) -> float:
        """Median duration, 0 without a span."""
        return float(np.median(self.stop - self.start)) if self.start.size else 0.0


NO_SPANS = Spans(np.empty(0), np.empty(0), np.empty(0, np.int64))


@dataclass(frozen=True, slots=True)
class Instant:
    """A point in time on a track."""

    time_s: float
    track: str
    name: str
    text: str
    version: int


@dataclass(frozen=True, slots=True)
class Trace:
    """What trace.json says, without the runs that used the folder before."""

    spans: dict[tuple[str, str], Spans] = field(default_factory=dict)
    """(track, name) -> its spans."""
    instants: tuple[Instant, ...] = ()
    seconds: float = 0.0
    """From the first event to the last."""

    def of(self, track: str, name: str) -> Spans:
        """Spans of one name on one track; none if there are none."""
        return self.spans.get((track, name), NO_SPANS)

    @property
    def servers(self) -> list[str]:
        """URLs that have a track, in order."""
        tracks = {track for track, _ in self.spans} | {i.track for i in self.instants}
        return in_order(track for track in tracks if "://" in track)


def in_order(urls: Iterable[str]) -> list[str]:
    """Sort URLs with their numbers as numbers.

    Example: http://a10, http://a9 -> http://a9, http://a10.
    """
    return sorted(urls, key=lambda url: [part.zfill(20) for part in re.split(r"(\d+)", url)])


@dataclass(frozen=True, slots=True)
class Run:
    """A run as its files have it."""

    name: str
    rows: list[dict[str, Any]]
    """Of metrics.jsonl, in rising order of steps."""
    trace: Trace
    samples: list[ShownStep]
    """Of samples.jsonl, in rising order of steps."""
    summary: Summary | None
    """None while the run goes on, and after a kill."""


def read_run(folder: Path) -> Run:
    """Read what there is. Raises ConfigError if the folder holds no run."""
    metrics, trace = folder / "metrics.jsonl", folder / "trace.json"
    if not metrics.is_file() and not trace.is_file():
        raise ConfigError(
            f"RUN must be the folder of a run (job.dump_folder), {folder} has neither metrics.jsonl"
            " nor trace.json: name another one"
        )
    try:
        return Run(
            folder.resolve().name,
            read_metrics(metrics) if metrics.is_file() else [],
            read_trace(trace) if trace.is_file() else Trace(),
            read_samples(folder / "samples.jsonl"),
            _summary(folder / "summary.json", newest=metrics),
        )
    except OSError as error:
        raise ConfigError(f"RUN must be readable, {folder} is not: {error.strerror}") from error


def read_samples(path: Path) -> list[ShownStep]:
    """Read samples.jsonl. As in metrics.jsonl a step that comes again takes the place of all from
    it on, and a torn line is left out."""
    out: list[ShownStep] = []
    for line in path.read_bytes().splitlines() if path.is_file() else ():
        with suppress(msgspec.DecodeError):
            found = msgspec.json.decode(line, type=ShownStep)
            while out and out[-1].step >= found.step:
                out.pop()
            out.append(found)
    return out


def _summary(path: Path, newest: Path) -> Summary | None:
    """Read summary.json, unless a later run in the same folder has gone past it."""
    with suppress(FileNotFoundError, msgspec.DecodeError):
        summary = msgspec.json.decode(path.read_bytes(), type=Summary)
        if not newest.is_file() or path.stat().st_mtime >= newest.stat().st_mtime:
            return summary
    return None


def read_trace(path: Path, block_bytes: int = BLOCK_BYTES) -> Trace:
    """Read a trace of the recorder. A line that a kill tore, or that is still being written, is
    left out."""
    tracks: dict[int, tuple[int, str]] = {}
    codes: dict[str, int] = {}
    columns: list[tuple[npt.NDArray[np.float64], ...]] = []
    points: list[_Event] = []
    process = -1
    for events in _events(path, block_bytes):
        bars = []
        for event in events:
            if event.ph == "X":
                bars.append(event)
            elif event.ph == "i":
                points.append(event)
            elif event.name == "process_name":
                process += 1
            elif event.name == "thread_name":
                # numbers of tracks are unique over the processes that appended to the file
                tracks[event.tid] = (max(process, 0), event.args.name)
        columns.append(_columns(bars, codes))
    table = [np.concatenate(column) for column in zip(*columns, strict=True)]
    return _assemble(tracks, list(codes), table, points)


def _events(path: Path, block_bytes: int) -> Iterator[list[_Event]]:
    """Decode the file in blocks of whole lines."""
    rest = b""
    with path.open("rb") as file:
        while block := file.read(block_bytes):
            whole, _, rest = (rest + block).rpartition(b",\n")
            yield _decoded(whole)
    yield _decoded(rest)


def _decoded(lines: bytes) -> list[_Event]:
    text = lines.strip(b"[], \n")
    try:
        return msgspec.json.decode(b"[" + text + b"]", type=list[_Event])
    except (msgspec.DecodeError, UnicodeDecodeError):
        return list(_whole_lines(text))


def _whole_lines(text: bytes) -> Iterator[_Event]:
    for line in text.split(b"\n"):
        with suppress(msgspec.DecodeError, UnicodeDecodeError):
            yield msgspec.json.decode(line.rstrip(b","), type=_Event)


def _columns(bars: list[_Event], codes: dict[str, int]) -> tuple[npt.NDArray[np.float64], ...]:
    """(track, code of the name, start s, duration s, number) of each bar; float64 holds them
    all."""
    named = [codes.setdefault(bar.name, len(codes)) for bar in bars]
    arguments = [bar.args for bar in bars]
    numbers = [a.step if (version := a.version) is None else version for a in arguments]
    return (
        np.array([bar.tid for bar in bars], dtype=np.float64),
        np.array(named, dtype=np.float64),
        np.array([bar.ts for bar in bars]) / 1e6,
        np.array([bar.dur for bar in bars]) / 1e6,
        np.array([-1 if n is None else n for n in numbers], dtype=np.float64),
    )


def _assemble(
    tracks: dict[int, tuple[int, str]],
    names: list[str],
    table: list[npt.NDArray[np.float64]],
    points: list[_Event],
) -> Trace:
    track, code, start, duration, number = table
    by_track = {tid: rows for tid in tracks if (rows := np.flatnonzero(track == tid)).size}
    shifts = _shifts(tracks, by_track, table, points)
    parts: dict[tuple[str, str], list[npt.NDArray[np.float64]]] = {}
    last = 0.0
    for tid, rows in by_track.items():
        process, label = tracks[tid]
        if process not in shifts:
            continue
        for each in np.unique(code[rows]):
            chosen = rows[code[rows] == each]
            begin = start[chosen] + shifts[process]
            columns = np.stack([begin, begin + duration[chosen], number[chosen]])
            parts.setdefault((label, names[int(each)]), []).append(columns)
            last = max(last, float(columns[1].max()))
    spans = {}
    for key, arrays in parts.items():
        joined = np.concatenate(arrays, axis=1)
        joined = joined[:, np.argsort(joined[0], kind="stable")]
        spans[key] = Spans(joined[0], joined[1], joined[2].astype(np.int64))
    instants = []
    for point in points:
        process, label = tracks.get(point.tid, (-1, ""))
        if process in shifts:
            at, version = point.ts / 1e6 + shifts[process], point.args.version
            number_ = -1 if version is None else version
            instants.append(Instant(at, label, point.name, point.args.message, number_))
    last = max([last, *(i.time_s for i in instants)])
    return Trace(spans, tuple(sorted(instants, key=lambda i: i.time_s)), last)


def _shifts(
    tracks: dict[int, tuple[int, str]],
    by_track: dict[int, npt.NDArray[np.int64]],
    table: list[npt.NDArray[np.float64]],
    points: list[_Event],
) -> dict[int, float]:
    """Process -> seconds to add to its times, so that the run starts at 0 and time never goes back.

    The processes before the last one that started at step 1 belong to an older run and are not
    among them. The clock of a resumed run is another one if its host was restarted.
    """
    _, _, start, duration, number = table
    bounds: dict[int, tuple[float, float]] = {}

    def seen(tid: int, begin: float, end: float) -> None:
        process = tracks[tid][0]
        low, high = bounds.get(process, (begin, end))
        bounds[process] = (min(low, begin), max(high, end))

    first = 0
    for tid, rows in by_track.items():
        seen(tid, float(start[rows].min()), float((start[rows] + duration[rows]).max()))
        process, label = tracks[tid]
        if label == TRAINER and number[rows[0]] == 1:
            first = max(first, process)
    for point in points:
        if point.tid in tracks:
            seen(point.tid, point.ts / 1e6, point.ts / 1e6)
    shifts: dict[int, float] = {}
    clock, end = -math.inf, 0.0
    for process in sorted(p for p in bounds if p >= first):
        low, high = bounds[process]
        if low + clock < end:
            clock = end - low
        shifts[process], end = clock, high + clock
    return shifts
