"""Reads a run's folder: metrics.jsonl, trace.json, summary.json. The run may still be going.

The trace of a long run has millions of events (three of the trainer's per step, three per version
and server), so its spans become columns and not objects.
"""

import math
import os
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, count
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from titan_grpo.errors import ConfigError
from titan_grpo.observe.recorder import read_metrics
from titan_grpo.observe.schema import Summary
from titan_grpo.observe.shown import ShownStep

BLOCK_BYTES = 1 << 18
"""Of the trace, read at a time: what fits into a processor's cache is decoded twice as fast."""

SHARED_BYTES = 1 << 26
"""Of a trace from which it is worth the processes' start."""

READ_S = 600.0
"""Longest time that the processes may take, in seconds."""

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


def columns(
    rows: Sequence[Mapping[str, Any]], names: Iterable[str]
) -> dict[str, npt.NDArray[np.float64]]:
    """Name -> its value in each row, [rows] float64; NaN where a row has none."""
    names = list(names)
    # A row at a time: its dict is out of the processor's cache before the next name comes.
    values = [list(map(row.get, names)) for row in rows]
    table = np.array(values, dtype=np.float64).reshape(len(rows), len(names))
    return dict(zip(names, np.ascontiguousarray(table.T), strict=True))


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
    """Read a trace of the recorder, a long one in a process for each core. A line that a kill tore,
    or that is still being written, is left out."""
    size = path.stat().st_size
    block, begins = partial(_block, path, block_bytes), range(0, size, block_bytes)
    if size < SHARED_BYTES:
        return _assemble(list(map(block, begins)))
    context = get_context("spawn")  # a fork would take the locks of other threads along
    with ProcessPoolExecutor(len(os.sched_getaffinity(0)), context) as pool:
        return _assemble(list(pool.map(block, begins, timeout=READ_S, chunksize=64)))


def _block(path: Path, size: int, begin: int) -> "_Block":
    """Decode the lines that begin in ``size`` bytes from ``begin`` on."""
    with path.open("rb") as file:
        file.seek(max(0, begin - 1))
        data = file.read(size + 1) if begin else file.read(size)
        if begin:
            data = data.partition(b"\n")[2]
        if data and not data.endswith(b"\n"):
            # no deadline: a file on a disk, up to the end of its line
            data += file.readline()
    names: defaultdict[str, int] = defaultdict(count().__next__)
    events = _decoded(data)
    bars = [event for event in events if event.ph == "X"]
    others = [event for event in events if event.ph != "X"] if len(bars) < len(events) else []
    return _Block(_columns(bars, names), list(names), others)


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


class _Bars(NamedTuple):
    """Columns of spans in the file's order, [spans] each."""

    track: npt.NDArray[np.int64]
    code: npt.NDArray[np.int64]
    """Of the name."""
    start: npt.NDArray[np.float64]
    """Seconds; so is ``stop``."""
    stop: npt.NDArray[np.float64]
    number: npt.NDArray[np.int64]
    """As in Spans."""


class _Block(NamedTuple):
    """Lines of the trace, in the file's order."""

    bars: _Bars
    names: list[str]
    """Of the bars, by code."""
    others: list[_Event]


def _columns(bars: list[_Event], codes: Mapping[str, int]) -> _Bars:
    start = np.array([bar.ts for bar in bars], dtype=np.float64) / 1e6
    length = np.array([bar.dur for bar in bars], dtype=np.float64) / 1e6
    # None becomes NaN
    number = np.array([bar.args.version for bar in bars], dtype=np.float64)
    for at in np.flatnonzero(np.isnan(number)):
        step = bars[at].args.step
        number[at] = -1 if step is None else step
    return _Bars(
        np.array([bar.tid for bar in bars], dtype=np.int64),
        np.array([codes[bar.name] for bar in bars], dtype=np.int64),
        start,
        start + length,
        number.astype(np.int64),
    )


def _assemble(blocks: list[_Block]) -> Trace:
    tracks: dict[int, tuple[int, str]] = {}
    points: list[_Event] = []
    process = -1
    for event in chain.from_iterable(block.others for block in blocks):
        if event.ph == "i":
            points.append(event)
        elif event.name == "process_name":
            process += 1
        elif event.name == "thread_name":
            # numbers of tracks are unique over the processes that appended to the file
            tracks[event.tid] = (max(process, 0), event.args.name)
    names = sorted(set[str]().union(*(block.names for block in blocks)))
    parts = []
    for bars, known, _ in blocks:
        codes = np.array([names.index(name) for name in known], dtype=np.int64)
        parts.append(bars._replace(code=codes[bars.code]))
    table = _Bars(*(np.concatenate(column) for column in zip(*parts, strict=True)))
    return _trace(tracks, names, table, points)


def _trace(
    tracks: dict[int, tuple[int, str]], names: list[str], table: _Bars, points: list[_Event]
) -> Trace:
    groups = _groups(table, tracks, len(names))
    shifts = _shifts(tracks, table, groups, points)
    found: dict[tuple[str, str], list[Spans]] = {}
    last = 0.0
    for tid, rows in groups:
        process, label = tracks[tid]
        if process not in shifts:
            continue
        shift = shifts[process]
        part = Spans(table.start[rows] + shift, table.stop[rows] + shift, table.number[rows])
        found.setdefault((label, names[table.code[rows[0]]]), []).append(part)
        last = max(last, float(part.stop.max()))
    spans = {key: _joined(each) for key, each in found.items()}
    instants = []
    for point in points:
        process, label = tracks.get(point.tid, (-1, ""))
        if process in shifts:
            at, version = point.ts / 1e6 + shifts[process], point.args.version
            number = -1 if version is None else version
            instants.append(Instant(at, label, point.name, point.args.message, number))
    last = max([last, *(i.time_s for i in instants)])
    return Trace(spans, tuple(sorted(instants, key=lambda i: i.time_s)), last)


def _groups(
    table: _Bars, tracks: Iterable[int], names: int
) -> list[tuple[int, npt.NDArray[np.int64]]]:
    """(track, rows of one name) for every name on every known track, rows in the file's order."""
    known = np.array(sorted(tracks), dtype=np.int64)
    if not known.size or not table.track.size:
        return []
    place = np.minimum(np.searchsorted(known, table.track), known.size - 1)
    group = np.where(known[place] == table.track, place * names + table.code, -1)
    order = np.argsort(group, kind="stable")
    parts = np.split(order, np.flatnonzero(np.diff(group[order])) + 1)
    return [(int(table.track[rows[0]]), rows) for rows in parts if group[rows[0]] >= 0]


def _joined(parts: list[Spans]) -> Spans:
    """All spans, by start."""
    start, stop, number = (
        np.concatenate([getattr(part, column) for part in parts])
        for column in ("start", "stop", "number")
    )
    order = np.argsort(start, kind="stable")
    return Spans(start[order], stop[order], number[order])


def _shifts(
    tracks: dict[int, tuple[int, str]],
    table: _Bars,
    groups: list[tuple[int, npt.NDArray[np.int64]]],
    points: list[_Event],
) -> dict[int, float]:
    """Process -> seconds to add to its times, so that the run starts at 0 and time never goes back.

    The processes before the last one that started at step 1 belong to an older run and are not
    among them. The clock of a resumed run is another one if its host was restarted.
    """
    bounds: dict[int, tuple[float, float]] = {}

    def seen(tid: int, begin: float, end: float) -> None:
        process = tracks[tid][0]
        low, high = bounds.get(process, (begin, end))
        bounds[process] = (min(low, begin), max(high, end))

    began: dict[int, int] = {}
    """Process -> row of its trainer's first span."""
    for tid, rows in groups:
        seen(tid, float(table.start[rows].min()), float(table.stop[rows].max()))
        process, label = tracks[tid]
        if label == TRAINER:
            began[process] = min(int(rows[0]), began.get(process, int(rows[0])))
    first = max((process for process, row in began.items() if table.number[row] == 1), default=0)
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
