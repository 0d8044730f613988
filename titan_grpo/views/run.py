"""Readers of a run's folder (metrics.jsonl, trace.json, summary.json; the run may still be going),
and down-sampling, so that a run of any length fits on a page.

The trace of a long run has millions of events (three per step of the trainer, three per version and
server), so its spans become columns, not objects.
"""

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
import numpy.typing as npt

from titan_grpo.errors import NOT_JSON, ConfigError
from titan_grpo.observe.names import SERVER
from titan_grpo.observe.output import reading
from titan_grpo.observe.recorder import (
    HISTORY,
    METRICS,
    SAMPLES,
    SUMMARY,
    TRACE,
    read_history,
    read_metrics,
)
from titan_grpo.observe.run_lock import LOCK, lives
from titan_grpo.observe.schema import Evaluated, ShownStep, Summary, decoded

BLOCK_BYTES = 1 << 18
"""Bytes of the trace per read: what fits into a processor's cache is decoded twice as fast."""

Array = npt.NDArray[np.float64]

TRAINER = "main thread"
"""Track of the trainer's own spans; a server's track is its URL."""


Whole = Annotated[int, msgspec.Meta(ge=-(1 << 62), le=1 << 62)]
"""What a column has room for. A line with a larger number is none that a recorder writes."""


# gc=False: there are millions and none is in a cycle; the garbage collector would double the time.
class _Args(msgspec.Struct, gc=False):
    version: Whole | None = None
    step: Whole | None = None
    name: str = ""
    message: str = ""
    zero_s: float | None = None
    """Of a process: the time at which its clock was 0, in seconds since 1970."""
    boot: str = ""
    """Of a process: which start of which host its clock counts from; empty if unknown."""


class _Event(msgspec.Struct, gc=False):
    ph: str
    name: str
    tid: Whole = -1
    ts: float = 0.0
    dur: float = 0.0
    args: _Args = msgspec.field(default_factory=_Args)


@dataclass(frozen=True, slots=True)
class Spans:
    """Spans of one name on one track, by start, as arrays of one length.

    ``number`` is the version (on a server's track) or step (on the trainer's), -1 without one.
    Times are in seconds since the run's first event.
    """

    start: Array
    stop: Array
    number: npt.NDArray[np.int64]

    @property
    def total_s(self) -> float:
        return float((self.stop - self.start).sum())

    @property
    def median_s(self) -> float:
        """Median duration; 0 without spans."""
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
    """Content of trace.json, without earlier runs in the same folder."""

    spans: dict[tuple[str, str], Spans] = field(default_factory=dict)
    """(track, name) -> its spans."""
    instants: tuple[Instant, ...] = ()
    seconds: float = 0.0
    """Time of the last event."""
    ends: tuple[float, ...] = ()
    """Times at which a process ended that was resumed: no server was in the run until the next
    process gave it a version."""

    def of(self, track: str, name: str) -> Spans:
        """Return the spans of one name on one track, maybe none."""
        return self.spans.get((track, name), NO_SPANS)

    @property
    def servers(self) -> list[str]:
        """URLs with a track, in order."""
        tracks = {track for track, _ in self.spans} | {i.track for i in self.instants}
        return in_order(track for track in tracks if "://" in track)


def in_order(urls: Iterable[str]) -> list[str]:
    """Sort URLs, with digits compared as numbers.

    Example: http://a10, http://a9 -> http://a9, http://a10.
    """
    return sorted(urls, key=lambda url: [part.zfill(20) for part in re.split(r"(\d+)", url)])


@dataclass(frozen=True, slots=True)
class Run:
    """Content of a run's files."""

    name: str
    rows: list[dict[str, Any]]
    """Rows of metrics.jsonl, in rising order of steps, without values of single servers: these are
    most of a line, and the page shows servers by the trace."""
    trace: Trace
    samples: list[ShownStep]
    """Lines of samples.jsonl, in rising order of steps, as many as a page shows."""
    summary: Summary | None
    """None while the run goes on, and after a kill."""
    quantised: Mapping[str, str] = field(default_factory=dict)
    """URL -> quantisation method, for servers that quantise their weights."""
    gone: bool = False
    """Whether its trainer is known to have ended."""
    resumes: Sequence[int] = ()
    """First step after each resume."""
    evaluations: Sequence[Evaluated] = ()
    errors: Sequence[str] = ()
    """Errors that did not stop it."""


def read_run(folder: Path) -> Run:
    """Read a run's folder. Raises ConfigError if it holds no run, or a summary of another version,
    and OSError if it cannot be read."""
    metrics, trace = folder / METRICS, folder / TRACE
    rows = read_metrics(metrics, without=f"{SERVER}/") if metrics.is_file() else []
    summary = read_summary(folder)
    # The lock says of a run without a step that it is one.
    if not (rows or summary or trace.is_file() or (folder / LOCK).exists()):
        raise ConfigError(
            f"RUN must be the folder of a run (job.dump_folder), {folder} has no metrics.jsonl with"
            " a step, no trace.json and no run.lock: name another one"
        )
    # While the run goes on, only its history has this.
    said = summary or read_history(folder / HISTORY).whole()
    # Later ones are of steps that a resumed run has yet to make again, or never makes.
    last = rows[-1]["step"] if rows else 0
    samples = [each for each in read_samples(folder / SAMPLES) if each.step <= last]
    return Run(
        folder.resolve().name,
        rows,
        read_trace(trace) if trace.is_file() else Trace(),
        samples,
        summary,
        {url: method for url, method in said.quantised.items() if method},
        lives(folder) is False,
        said.resumes,
        said.evaluations,
        said.errors,
    )


def columns(rows: Sequence[Mapping[str, Any]], names: Iterable[str]) -> dict[str, Array]:
    """Return name -> its value in each row, [rows] float64; NaN where a row has none."""
    names = list(names)
    # Row by row, while a row's dict is in the processor's cache.
    values = [list(map(row.get, names)) for row in rows]
    table = np.array(values, dtype=np.float64).reshape(len(rows), len(names))
    return dict(zip(names, np.ascontiguousarray(table.T), strict=True))


@dataclass(frozen=True, slots=True)
class Band:
    """Least, mean and largest value per bucket, [buckets] float64; NaN for an empty bucket."""

    low: Array
    mean: Array
    high: Array


def edges(count: int, limit: int) -> npt.NDArray[np.int64]:
    """Return the bounds of at most ``limit`` buckets of ``count`` values; sizes differ by at most
    1.

    Example: 10 values in 4 buckets have the bounds 0, 2, 5, 7, 10; 3 values in 4 have 0, 1, 2, 3.
    """
    buckets = max(1, min(count, limit))
    return np.arange(buckets + 1, dtype=np.int64) * count // buckets


def band(values: Array, bounds: npt.NDArray[np.int64]) -> Band:
    """Summarise ``values[bounds[k]:bounds[k + 1]]`` for each bucket k, without values that are not
    finite.

    Example: values 1, 3, NaN, NaN with bounds 0, 2, 4: low 1, NaN; mean 2, NaN; high 3, NaN.
    """
    if not values.size:
        return Band(*(np.empty(0) for _ in range(3)))
    known = np.isfinite(values)
    at = bounds[:-1]
    count = np.add.reduceat(known, at, dtype=np.int64)
    total = np.add.reduceat(np.where(known, values, 0.0), at)
    empty = count == 0
    mean = np.where(empty, np.nan, total / np.maximum(count, 1))
    low = np.minimum.reduceat(np.where(known, values, np.inf), at)
    high = np.maximum.reduceat(np.where(known, values, -np.inf), at)
    return Band(np.where(empty, np.nan, low), mean, np.where(empty, np.nan, high))


def read_samples(path: Path) -> list[ShownStep]:
    """Read samples.jsonl, of a long run only as many steps as a page shows (``every_step``). As in
    metrics.jsonl, a repeated step replaces all from that step on, and torn lines are skipped."""
    if not path.is_file():
        return []
    known: list[tuple[int, int, int]] = []
    """Step, its tokens, and where its line begins. All steps of a long run with long completions
    would be gigabytes."""
    with reading(path) as file:
        end = 0
        for line in file:
            begin, end = end, end + len(line)
            if (found := decoded(line, _SAMPLE)) is not None:
                while known and known[-1][0] >= found.step:
                    known.pop()
                tokens = sum(len(c.tokens) for c in found.completions)
                known.append((found.step, tokens, begin))
        lines = []
        for _, _, begin in known[:: every_step([tokens for _, tokens, _ in known], TOKENS)]:
            file.seek(begin)
            # no deadline: this reads a file up to the end of a line.
            lines.append(file.readline())
    return [found for line in lines if (found := decoded(line, _SAMPLE)) is not None]


TOKENS = 60_000
"""Tokens of completions on a page (1.5 MB); a longer run shows evenly spaced steps."""


def every_step(tokens: Sequence[int], limit: int) -> int:
    """Return the least n for which every n-th step has ``limit`` tokens at most, or is the only
    one. ``tokens``: those of each step."""
    every = 1
    while len(tokens[::every]) > 1 and sum(tokens[::every]) > limit:
        every += 1
    return every


_SAMPLE, _EVENT = msgspec.json.Decoder(ShownStep), msgspec.json.Decoder(_Event)


def summary_of(folder: Path) -> Path | None:
    """Return the path of a run's summary.json; None if it is missing, or a process of the run
    lives: that may be loading yet, before its recorder removes the summary of the one before."""
    summary = folder / SUMMARY
    return summary if summary.is_file() and not lives(folder) else None


def read_summary(folder: Path) -> Summary | None:
    """Read a run's summary.json; None as in ``summary_of``. Raises ConfigError for one that this
    version of titan_grpo does not write."""
    if (path := summary_of(folder)) is None:
        return None
    try:
        with reading(path) as file:
            return msgspec.json.decode(file.read(), type=Summary)
    except NOT_JSON as error:
        raise ConfigError(
            f"RUN must have the summary of a run, {path} is none: {error}; read it with the version"
            " of titan_grpo that wrote it, or remove it"
        ) from error


SPAN = np.dtype(
    [
        ("track", np.int64),
        ("name", np.int64),
        ("start", np.float64),
        ("stop", np.float64),
        ("number", np.int64),
    ]
)
"""A span of the trace: numbers of its track and name, start and stop in seconds, version or
step."""

Bars = npt.NDArray[np.void]
"""[bars] of SPAN, in the file's order."""


def read_trace(path: Path, block_bytes: int = BLOCK_BYTES) -> Trace:
    """Read a recorder's trace. Torn lines, of a kill or a write in progress, are skipped."""
    names: defaultdict[str, int] = defaultdict(count().__next__)
    parts, others = [np.empty(0, SPAN)], []
    with reading(path) as file:
        while data := file.read(block_bytes):
            # no deadline: this reads a file up to the end of a line.
            events = _decoded(data + file.readline())
            bars = [event for event in events if event.ph == "X"]
            if len(bars) < len(events):
                others += [event for event in events if event.ph != "X"]
            parts.append(_bars(bars, names))
    return _assemble(parts, list(names), others)


def _decoded(lines: bytes) -> list[_Event]:
    text = lines.strip(b"[], \n")
    try:
        return msgspec.json.decode(b"[" + text + b"]", type=list[_Event])
    except NOT_JSON:
        events = (decoded(line.rstrip(b","), _EVENT) for line in text.split(b"\n"))
        return [event for event in events if event is not None]


def _bars(events: list[_Event], names: Mapping[str, int]) -> Bars:
    out = np.empty(len(events), SPAN)
    out["track"] = [event.tid for event in events]
    out["name"] = [names[event.name] for event in events]
    out["start"] = [event.ts for event in events]
    out["start"] /= 1e6
    out["stop"] = [event.dur for event in events]
    out["stop"] = out["start"] + out["stop"] / 1e6
    # None becomes NaN
    number = np.array([event.args.version for event in events], dtype=np.float64)
    for at in np.flatnonzero(np.isnan(number)):
        step = events[at].args.step
        number[at] = -1 if step is None else step
    out["number"] = number
    return out


def _assemble(parts: list[Bars], names: list[str], others: list[_Event]) -> Trace:
    """Sort the events by track and name, with each process's times shifted (_shifts). Empties
    ``parts``, and keeps no second copy of the bars: those of a long run are gigabytes."""
    tracks: dict[int, tuple[int, str]] = {}
    """Number -> (process, label). Numbers are unique over the processes that appended."""
    points: list[_Event] = []
    zeros: dict[int, tuple[float | None, str]] = {}
    process = -1
    for event in others:
        if event.ph == "i":
            points.append(event)
        elif event.name == "process_name":
            process += 1
            zeros[process] = event.args.zero_s, event.args.boot
        elif event.name == "thread_name":
            tracks[event.tid] = (max(process, 0), event.args.name)
    points = [point for point in points if point.tid in tracks]
    groups = _groups(parts, tracks, len(names))
    shifts, stops = _shifts(tracks, groups, points, zeros)
    found: defaultdict[tuple[str, str], list[Bars]] = defaultdict(list)
    groups.reverse()
    while groups:
        bars = groups.pop()
        process, label = tracks[int(bars["track"][0])]
        if process in shifts:
            bars["start"] += shifts[process]
            bars["stop"] += shifts[process]
            found[label, names[bars["name"][0]]].append(bars)
    spans = {key: _spans(found.pop(key)) for key in list(found)}
    instants = []
    for point in points:
        process, label = tracks[point.tid]
        if process in shifts:
            at, version = point.ts / 1e6 + shifts[process], point.args.version
            number = -1 if version is None else version
            instants.append(Instant(at, label, point.name, point.args.message, number))
    ends = [*(float(each.stop.max()) for each in spans.values()), *(i.time_s for i in instants)]
    instants.sort(key=lambda i: i.time_s)
    return Trace(spans, tuple(instants), max(ends, default=0.0), tuple(stops[:-1]))


def _groups(parts: list[Bars], tracks: Iterable[int], names: int) -> list[Bars]:
    """Return the bars of each name on each known track, in the file's order. Empties ``parts``."""
    table = np.concatenate(parts)
    parts.clear()
    known = np.array(sorted(tracks), dtype=np.int64)
    if not known.size or not table.size:
        return []
    place = np.minimum(np.searchsorted(known, table["track"]), known.size - 1)
    group = np.where(known[place] == table["track"], place * names + table["name"], -1)
    order = np.argsort(group, kind="stable")
    bounds = np.flatnonzero(np.diff(group[order])) + 1
    return [table[rows] for rows in np.split(order, bounds) if group[rows[0]] >= 0]


def _spans(parts: list[Bars]) -> Spans:
    """Join bars, sorted by start."""
    bars = np.concatenate(parts)
    bars = bars[np.argsort(bars["start"], kind="stable")]
    return Spans(*(np.ascontiguousarray(bars[column]) for column in ("start", "stop", "number")))


def _shifts(
    tracks: Mapping[int, tuple[int, str]],
    groups: list[Bars],
    points: list[_Event],
    zeros: Mapping[int, tuple[float | None, str]],
) -> tuple[dict[int, float], list[float]]:
    """Return process -> seconds to add to its times, so that the run starts at 0 and time never
    goes back, and when each of these processes ended.

    Processes before the last one that started at step 1 belong to an older run and are left out. A
    resumed run has another clock on another host, or if its host was restarted; ``zeros`` are the
    times at which the clocks were 0 (None: a trace of an older version), and which clocks they are.
    """
    times: defaultdict[int, list[float]] = defaultdict(list)
    """Process -> times, with its first and last among them."""
    steps: defaultdict[int, list[int]] = defaultdict(list)
    """Process -> steps, with its trainer's first among them."""
    for bars in groups:
        process, label = tracks[int(bars["track"][0])]
        times[process] += [float(bars["start"].min()), float(bars["stop"].max())]
        if label == TRAINER:
            steps[process].append(int(bars["number"][0]))
    for point in points:
        times[tracks[point.tid][0]].append(point.ts / 1e6)
    first = max((process for process, known in steps.items() if min(known) == 1), default=0)
    shifts: dict[int, float] = {}
    stops: list[float] = []
    clock, end = -math.inf, 0.0
    before, boot_before = None, ""
    for process in sorted(p for p in times if p >= first):
        low, high = min(times[process]), max(times[process])
        zero, boot = zeros.get(process, (None, ""))
        same = boot != "" and boot == boot_before
        if before is not None and zero is not None and not same:
            clock += zero - before
        before, boot_before = zero, boot
        if low + clock < end:
            clock = end - low
        shifts[process], end = clock, high + clock
        stops.append(end)
    return shifts, stops
