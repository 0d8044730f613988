"""The recorder of a run: spans, counters and step metrics from any thread, files from its own.

The trace has the Chrome trace format (source: "Trace Event Format" of the Chromium project), which
Perfetto (ui.perfetto.dev) opens. A track is a thread or a lane. The file is a JSON array with one
event per line. The format allows a missing closing bracket, so the trace of a killed run is
readable.
"""

import json
import queue
import threading
import time
from array import array
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from titan_grpo.errors import ConfigError, utf8_text
from titan_grpo.observe import names, terminal
from titan_grpo.observe.dashboards import Traces
from titan_grpo.observe.output import (
    Gathered,
    Output,
    lines_from_end,
    open_lines,
    open_trace,
    reading,
)
from titan_grpo.observe.run_lock import boot_id
from titan_grpo.observe.schema import Change, Evaluated, decoded

Event = dict[str, Any]

METRICS, HISTORY, SAMPLES = "metrics.jsonl", "history.jsonl", "samples.jsonl"
TRACE = "trace.json"
"""Files of the recorder."""

SUMMARY = "summary.json"
"""File that a run's process writes at its end (report.write_report)."""

PENDING_LIMIT = 100_000
"""Queue length above which trace events (never metrics) are dropped and counted: a slow disk."""

FLUSH_S = 1.0
"""Longest time from a line to a file that has it, in seconds: a step may wait for hours for what
the line says, and a kill loses what is in no file."""


def read_metrics(
    path: Path, only: Collection[str] | None = None, without: str | None = None
) -> list[dict[str, Any]]:
    """Read metrics.jsonl: one row per step in rising order, with step, time_s and the values in
    ``only`` (None: all), less those whose names begin with ``without``.

    Torn lines are skipped. A repeated step (after a resume, or of a new run in the same folder)
    replaces all rows from that step on.
    """
    rows: list[dict[str, Any]] = []
    # Line by line: with 64 servers 20,000 lines are 220 MB.
    with reading(path) as lines:
        for line in lines:
            if (row := row_of(line)) is not None:
                while rows and rows[-1]["step"] >= row["step"]:
                    rows.pop()
                if without is not None:
                    row = {name: row[name] for name in row if not name.startswith(without)}
                rows.append(row if only is None else _kept(row, only))
    return rows


LARGEST = 1e100
"""Magnitude above which a metric counts as infinite: sums and curves of what is left are finite."""

_ROW = msgspec.json.Decoder(dict[str, Annotated[float, Meta(ge=-LARGEST, le=LARGEST)] | None])


def row_of(line: bytes) -> dict[str, Any] | None:
    """Decode a line of metrics.jsonl; None if it is torn or none that a recorder writes."""
    row: dict[str, Any] | None = decoded(line, _ROW)
    if row is None or row.get("step") is None:
        return None
    row["step"] = int(row["step"])
    return row


def newest_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of ``read_metrics``, the last one first; none without a file. Reads no more of
    it than is taken: that of weeks with many servers has gigabytes."""
    first = inf
    for line in lines_from_end(path):
        if (row := row_of(line)) is not None and row["step"] < first:
            first = row["step"]
            yield row


def _finite(metrics: Mapping[str, float]) -> dict[str, float | None]:
    """Replace NaN and infinity, which JSON lacks, by None (null)."""
    return {n: float(v) if abs(v) <= LARGEST else None for n, v in metrics.items()}


def _kept(row: Mapping[str, Any], only: Collection[str]) -> dict[str, Any]:
    return {name: row[name] for name in ("step", "time_s", *only) if name in row}


@dataclass
class History:
    """Events of a run other than its step metrics. history.jsonl has its entries (``Gathered``)."""

    series: dict[str, "array[float]"] = field(
        default_factory=lambda: defaultdict(lambda: array("d"))
    )
    totals: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    commits: dict[str, list[int]] = field(default_factory=dict)
    quantised: dict[str, str] = field(default_factory=dict)
    """Server -> quantisation method of its weights as last reported; empty: none."""
    membership: list[Change] = field(default_factory=list)
    """In order."""
    errors: list[str] = field(default_factory=list)
    resumes: list[int] = field(default_factory=list)
    """First step after each resume."""
    evaluations: list[Evaluated] = field(default_factory=list)

    def add(self, kind: str, *values: Any) -> None:
        """Apply one entry. Raises KeyError, TypeError or ValueError for a malformed one."""
        match kind, values:
            case "value", (name, value):
                self.series[name].append(float(value))
            case "count", (name, amount):
                self.totals[name] += amount
            case "values", (dict(found),):
                for name, values in found.items():
                    self.series[name].extend(values)
            case "counts", (dict(found),):
                for name, amount in found.items():
                    self.totals[name] += amount
            case "server", (str(server),):
                self.commits.setdefault(server, [])
            case "commit", (str(server), int(version)):
                self.commits.setdefault(server, []).append(version)
            case "quantised", (str(server), str(method)):
                self.quantised[server] = method
            case "holds", (str(), int() | None):
                pass  # for those who watch the run
            case "member", (str(server), "joined" | "left" as event, int(version)):
                self.membership.append(Change(server, event, version))
            case "error", (str(message),):
                self.errors.append(message)
            case "resume", (int(step),):
                self.resumes.append(step)
            case "evaluation", (found,):
                self.evaluations.append(msgspec.convert(found, Evaluated))
            case _:
                raise ValueError(f"no entry of a history: {kind!r} {values!r}")

    def extend(self, later: "History") -> None:
        """Append the history of a later process of the same run."""
        for name, values in later.series.items():
            self.series[name] += values
        for name, amount in later.totals.items():
            self.totals[name] += amount
        for server, versions in later.commits.items():
            self.commits.setdefault(server, []).extend(versions)
        self.quantised |= later.quantised
        self.membership += later.membership
        self.errors += later.errors
        self.resumes += later.resumes
        self.evaluations += later.evaluations


ENTRY = msgspec.json.Decoder(list[Any])
"""Decoder of a line of history.jsonl."""


@dataclass
class Histories:
    """History of a run by its processes: those before, and the last one. Processes before the last
    one that started at step 1 belong to an older run and are left out."""

    before: History = field(default_factory=History)
    own: History = field(default_factory=History)

    def add(self, kind: str, *values: Any) -> None:
        """Apply one entry. Raises as History.add does."""
        if kind == "process":
            self.before.extend(self.own)
            self.own = History()
        elif kind == "first step":
            self.before = History()
        else:
            self.own.add(kind, *values)
        if kind == "resume":
            # Step s makes version s at most: the run has none of these, or makes them again.
            known = self.before.evaluations
            self.before.evaluations = [each for each in known if each.version < values[0]]

    def whole(self) -> History:
        """Copy the history of all of them."""
        out = History()
        out.extend(self.before)
        out.extend(self.own)
        return out


def read_history(path: Path) -> Histories:
    """Read history.jsonl. Torn lines are skipped."""
    found = Histories()
    if not path.is_file():
        return found
    # Line by line: after days with many servers they are hundreds of megabytes.
    with reading(path) as lines:
        for line in lines:
            with suppress(ValueError, TypeError, KeyError):
                found.add(*decoded(line, ENTRY) or [""])
    return found


class Recorder:
    """Recorder of a run, on rank 0. Every method may be called from any thread; only ``close``
    waits for files.

    Files in ``run_dir``: ``trace.json``, ``metrics.jsonl`` (one line per step), ``history.jsonl``
    (what summary.json needs of earlier processes of the run) and ``samples.jsonl`` (completions to
    look at). A resumed run appends to all of them. ``track`` names a row of the trace; default: the
    calling thread's name. Raises ConfigError if ``run_dir`` cannot be written.
    """

    def __init__(
        self,
        run_dir: Path | str,
        clock: Callable[[], float] = time.perf_counter,
        traces: Traces | None = None,
    ) -> None:
        """``traces`` also gets each span, and is closed with the recorder."""
        self.run_dir, self._clock, self._traces = Path(run_dir), clock, traces
        self.trace_path = self.run_dir / TRACE
        self.metrics_path = self.run_dir / METRICS
        self._history_path = self.run_dir / HISTORY
        self._history = Histories()
        self._rows: list[dict[str, Any]] = []
        try:
            self.run_dir.mkdir(parents=True, exist_ok=True)
            self._history_path.touch()
            # It is an earlier process's. This one writes its own at its end; until then, or if it
            # is killed, there is none. (Times of files would not tell: clocks are set back.)
            (self.run_dir / SUMMARY).unlink(missing_ok=True)
            self._history = read_history(self._history_path)
            if self.metrics_path.exists():
                self._rows = read_metrics(self.metrics_path, names.SUMMARISED)
        except OSError as error:
            raise ConfigError(
                f"job.dump_folder must be a directory that can be written, {self.run_dir} is not"
                f" ({error.strerror}): name another one"
            ) from error
        self._last: dict[str, Any] = {}
        self._taken: dict[str, int] = {}
        """Number of values of each series that ``since_last`` has returned."""
        self._lock = threading.Lock()
        # Track numbers start at the file's size, above all numbers of earlier processes.
        self._first_track = self.trace_path.stat().st_size if self.trace_path.is_file() else 0
        self._tracks: dict[str, int] = {}
        self._begun, self._lost_events = False, 0
        # Holds unless the thread comes to its end, which replaces it.
        self._problems = [
            f"files in {self.run_dir} are incomplete: their thread ended early, the log says why"
        ]
        # put() of a SimpleQueue never blocks: a hanging disk cannot delay a training step.
        self._queue: queue.SimpleQueue[tuple[str, Any] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._write_loop, name="recorder", daemon=True)
        self._thread.start()
        # When its clock was 0: the next process may run on another host, which has another one.
        # With one boot both have the same, whatever the time of day was set to in between.
        named = {"name": "rank 0", "zero_s": time.time() - clock()}
        boot = {"boot": boot_id()} if clock is time.perf_counter else {}
        self._put_event({"ph": "M", "name": "process_name", "args": named | boot})
        self.add("process")

    @contextmanager
    def span(self, name: str, track: str | None = None, **args: Any) -> Iterator[None]:
        """Time a block: one bar in the trace and one value (seconds) in the series ``name``, even
        if the block raises."""
        start = self._clock()
        try:
            yield
        finally:
            self.record_span(name, start, self._clock(), track, **args)

    def record_span(
        self, name: str, start_s: float, stop_s: float, track: str | None = None, **args: Any
    ) -> None:
        """Record a span with given ends, on the recorder's clock."""
        self.observe(name, stop_s - start_s)
        self.add_span(name, start_s, stop_s, track, **args)

    def add_span(
        self, name: str, start_s: float, stop_s: float, track: str | None = None, **args: Any
    ) -> None:
        """Add a bar to the trace and nothing else."""
        # Bounded, as the trace's events are: _put_event drops and counts this one too.
        if self._traces is not None and self._queue.qsize() < PENDING_LIMIT:
            label = track or threading.current_thread().name
            self._queue.put(("span", (name, start_s, stop_s, label, args)))
        # Times of the format are in microseconds.
        times = {"ts": start_s * 1e6, "dur": (stop_s - start_s) * 1e6}
        self._put_event({"ph": "X", "name": name, "tid": self._track(track), **times, "args": args})

    def instant(self, name: str, track: str | None = None, **args: Any) -> None:
        """Mark a point in time in the trace."""
        at = {"tid": self._track(track), "ts": self._clock() * 1e6}
        self._put_event({"ph": "i", "s": "t", "name": name, **at, "args": args})

    def count(self, name: str, amount: float = 1) -> None:
        """Add to a total of the run, such as commits or bytes."""
        self.add("count", name, amount)

    def observe(self, name: str, value: float) -> None:
        self.add("value", name, float(value))

    def committed(self, server: str, version: int) -> None:
        """Record that a server holds ``version``, as read back from it."""
        self.add("commit", server, version)

    def evaluated(self, found: Mapping[str, Any]) -> None:
        """Record the outcome of an evaluation, as plain values."""
        self.add("evaluation", dict(found))
        self.instant("evaluation", message=str(found["name"]), version=found["version"])

    def holds(self, server: str, version: int | None) -> None:
        """Record what a server holds whenever that becomes known, or unknown (None): it does not
        answer, restarts, or is half loaded."""
        self.add("holds", server, version)
        self.instant("server holds", server, version=version)

    def known_server(self, server: str) -> None:
        """Add a server to the summary, even if it never commits."""
        self.add("server", server)

    def quantised(self, server: str, method: str) -> None:
        """Record the quantisation method of a server, as its engine reports it; empty: none."""
        self.add("quantised", server, method)

    def joined(self, server: str, version: int) -> None:
        """Record that a server was added at trainer version ``version``."""
        self._member(server, "joined", version, names.SERVERS_JOINED)

    def left(self, server: str, version: int) -> None:
        """Record that a server was removed at trainer version ``version``."""
        self._member(server, "left", version, names.SERVERS_LEFT)

    def _member(self, server: str, event: str, version: int, counter: str) -> None:
        self.add("member", server, event, version)
        self.count(counter)
        self.instant(f"server {event}", server, version=version)

    def error(self, message: str) -> None:
        """Record an error that did not stop the run; the summary lists it."""
        text = utf8_text(message)
        self.add("error", text)
        self.instant("error", message=text)

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """End a training step: write one line of metrics.jsonl with all metrics."""
        self.begin(step)
        row = {"step": step, "time_s": self._clock(), **_finite(metrics)}
        with self._lock:
            self._rows.append(_kept(row, names.SUMMARISED))
            self._last = row
        self._queue.put(("metrics", row))

    def after_last_step(self, metrics: Mapping[str, float]) -> None:
        """Add values from after the last step to its line. Does nothing before the first step."""
        with self._lock:
            if not self._last:
                return
            row = self._last = {**self._last, **_finite(metrics)}
            self._rows[-1] = _kept(row, names.SUMMARISED)
        self._queue.put(("last metrics", row))

    def sample(self, line: Mapping[str, Any]) -> None:
        """Add a line to samples.jsonl (:class:`titan_grpo.observe.schema.ShownStep`)."""
        self._queue.put(("samples", line))

    def begin(self, step: int) -> None:
        """Before this process's first step, drop what it repeats: later steps, or (at step 1) the
        older run whose files the directory still has, with its totals. Later calls do nothing."""
        with self._lock:
            begun, self._begun = self._begun, True
            if begun:
                return
            self._rows = [row for row in self._rows if row["step"] < step]
        if step == 1:
            self.add("first step")
        elif self._rows:
            self.add("resume", step)

    def now(self) -> float:
        """Return the recorder's clock, for :meth:`record_span`."""
        return self._clock()

    def history(self) -> History:
        """Copy the run's history, earlier processes included."""
        with self._lock:
            return self._history.whole()

    def methods(self) -> dict[str, str]:
        """Copy what ``quantised`` was last told of each server."""
        with self._lock:
            return self._history.before.quantised | self._history.own.quantised

    def rows(self) -> list[dict[str, Any]]:
        """Copy the values of each step that summary.json needs (names.SUMMARISED), earlier
        processes included."""
        with self._lock:
            return list(self._rows)

    def last_row(self) -> dict[str, Any]:
        """Copy the last line of metrics.jsonl; empty before this process's first step."""
        with self._lock:
            return dict(self._last)

    def series(self, name: str) -> list[float]:
        """Copy all values of a series, or of a step metric in names.SUMMARISED, oldest first."""
        return self.values(name).tolist()

    def values(self, name: str) -> "array[float]":
        """As ``series``, in a quarter of the memory: of a long run they are millions."""
        found = array("d")
        with self._lock:
            for part in (self._history.before, self._history.own):
                found += part.series.get(name, array("d"))
        # Not both: a step's line has the mean of the same values.
        return found or array("d", [r[name] for r in self.rows() if r.get(name) is not None])

    def since_last(self) -> dict[str, float]:
        """Return the mean of each series' values (names.WORK) since the last call, and all totals
        so far (names.TOTALS and dropped groups). For one caller, which calls ``begin`` before."""
        found = dict.fromkeys(names.TOTALS, 0.0)
        prefix = names.dropped("")
        with self._lock:
            for name in names.WORK:
                values = self._history.own.series.get(name, ())
                if fresh := values[self._taken.get(name, 0) :]:
                    found[name] = sum(fresh) / len(fresh)
                self._taken[name] = len(values)
            for history in (self._history.before, self._history.own):
                for name, amount in history.totals.items():
                    if name in names.TOTALS or name.startswith(prefix):
                        found[name] = found.get(name, 0.0) + amount
        return found

    def close(self, deadline_s: float = 10.0) -> list[str]:
        """Write the rest and close the files, and then the traces, within half the deadline.
        Returns why files or traces are incomplete; each reason is also among the errors.
        Idempotent."""
        if self._thread.is_alive():
            self._queue.put(None)
            self._thread.join(deadline_s)
        if self._thread.is_alive():
            problems = [f"files in {self.run_dir} were not written within {deadline_s:g} s"]
        else:
            if self._traces is not None:
                traces, self._traces = self._traces, None
                self._problems += filter(None, [traces.close(deadline_s / 2)])
            problems = list(self._problems)
        if self._lost_events:
            text = "events are not in it: the disk did not keep up"
            problems.append(f"{self.trace_path}: {self._lost_events} {text}")
        with self._lock:
            errors = self._history.own.errors
            errors += [p for p in problems if p not in errors]
        return problems

    def add(self, kind: str, *values: Any) -> None:
        """Add an entry to the history (Histories.add)."""
        with self._lock:
            self._history.add(kind, *values)
        self._queue.put(("history", [kind, *values]))

    def _track(self, track: str | None) -> int:
        label = track or threading.current_thread().name
        with self._lock:
            number = self._tracks.get(label)
            if number is None:
                number = self._tracks[label] = self._first_track + len(self._tracks)
                named = {"name": "thread_name", "tid": number, "args": {"name": label}}
                self._put_event({"ph": "M", **named})
        return number

    def _put_event(self, event: Event) -> None:
        if self._queue.qsize() < PENDING_LIMIT:
            self._queue.put(("trace", {**event, "pid": 0}))
        else:
            self._lost_events += 1

    def _write_loop(self) -> None:
        outputs = {
            "trace": Output(self.trace_path, open_trace),
            "metrics": Output(self.metrics_path, open_lines, again=True),
            "history": Output(self._history_path, open_lines, again=True),
            "samples": Output(self.run_dir / SAMPLES, open_lines, again=True),
        }
        first, due, gathered = True, inf, Gathered()
        while True:
            try:
                # no deadline where all is flushed: the owner's close() puts None into the queue,
                # and the thread is a daemon.
                within_s = None if due == inf else max(0.0, due - time.monotonic())
                item = self._queue.get(timeout=within_s)
            except queue.Empty:
                outputs["history"].write(gathered.text())
                self._flush(outputs.values())
                due = inf
                continue
            if item is None:
                break
            kind, body = item
            if kind == "span" and self._traces is not None:
                self._traces.span(*body)
                continue
            if kind == "trace":
                text = json.dumps(body, default=str)
                outputs[kind].write(text if first else ",\n" + text)
                first = False
            elif kind != "history" or not gathered.take(body):
                text = json.dumps(body, default=str) + "\n"
                outputs[kind.removeprefix("last ")].write(text, kind.startswith("last "))
            due = min(due, time.monotonic() + FLUSH_S)
            if kind.endswith("metrics"):
                outputs["history"].write(gathered.text())
                self._flush(outputs.values())
                due = inf
        outputs["history"].write(gathered.text())
        outputs["trace"].close("\n]\n")
        for output in list(outputs.values())[1:]:
            output.close()
        self._problems = [output.problem for output in outputs.values() if output.problem]

    def _flush(self, outputs: Iterable[Output]) -> None:
        """Let live readers see all that was written (a plot, titan-grpo watch)."""
        for output in outputs:
            if problem := output.flush():
                # At once: the run may go on for days.
                terminal.print_status(problem)
                self.error(problem)
