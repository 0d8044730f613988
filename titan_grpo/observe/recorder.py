"""The recorder: spans, counters and step metrics from any thread; only its own thread writes files.

The trace has the Chrome trace format, which Perfetto (ui.perfetto.dev) opens. Source: "Trace Event
Format" of the Chromium project. A track is a thread or a lane. The file is a JSON array with one
event per line, and the format allows the closing bracket to be missing: the trace of a killed run
is readable.
"""

import json
import math
import os
import queue
import threading
import time
from array import array
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

import msgspec

from titan_grpo.errors import ConfigError
from titan_grpo.observe import names
from titan_grpo.observe.dashboards import Traces

Event = dict[str, Any]

PENDING_LIMIT = 100_000
"""Trace events that may wait for a slow disk. Beyond it trace events are dropped and counted;
metrics never are."""

TAIL_BYTES = 1 << 20
"""Where the end of an earlier trace is looked for: no event is as long."""


def read_metrics(path: Path, only: Collection[str] | None = None) -> list[dict[str, Any]]:
    """Read metrics.jsonl: one line per step in rising order, with step, time_s and the values in
    ``only`` (None: all).

    A torn line is left out. A step that comes again (after a resume, or in a new run in the same
    folder) takes the place of all from it on.
    """
    rows: list[dict[str, Any]] = []
    decode = msgspec.json.Decoder().decode
    # With 64 servers 20,000 lines are 220 MB.
    with path.open("rb") as lines:
        for line in lines:
            with suppress(msgspec.DecodeError, KeyError, TypeError):
                row = decode(line)
                step = int(row["step"])
                while rows and rows[-1]["step"] >= step:
                    rows.pop()
                rows.append(row if only is None else _kept(row, only))
    return rows


def read_last(path: Path) -> dict[str, Any]:
    """Read the last whole line of metrics.jsonl, with all its values; empty without one."""
    if path.is_file():
        with path.open("rb") as lines:
            # The very last one may be torn, also with an end that a resumed run gave it.
            for line in reversed(deque(lines, maxlen=2)):
                with suppress(msgspec.DecodeError):
                    row: dict[str, Any] = msgspec.json.decode(line)
                    return row
    return {}


def _finite(metrics: Mapping[str, float]) -> dict[str, float | None]:
    """For JSON, which has no NaN and no infinity: they become null."""
    return {n: float(v) if math.isfinite(v) else None for n, v in metrics.items()}


def _kept(row: Mapping[str, Any], only: Collection[str]) -> dict[str, Any]:
    return {name: row[name] for name in ("step", "time_s", *only) if name in row}


@dataclass
class History:
    """What happened in a run besides its step metrics. history.jsonl has one line per ``add``."""

    series: dict[str, "array[float]"] = field(
        default_factory=lambda: defaultdict(lambda: array("d"))
    )
    totals: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    commits: dict[str, list[int]] = field(default_factory=dict)
    quantised: dict[str, str] = field(default_factory=dict)
    """Server -> what it last said of how it quantises its weights; empty: it does not."""
    membership: list[tuple[str, str, int]] = field(default_factory=list)
    """(server, "joined" or "left", trainer version), in order."""
    errors: list[str] = field(default_factory=list)
    resumes: list[int] = field(default_factory=list)
    """First step after each resume."""
    evaluations: list[dict[str, Any]] = field(default_factory=list)
    """Each with name, version and figures (schema.Evaluated), in order."""

    def add(self, kind: str, *values: Any) -> None:
        """Apply one entry. Raises KeyError, TypeError or ValueError if it is none."""
        match kind, values:
            case "value", (name, value):
                self.series[name].append(float(value))
            case "count", (name, amount):
                self.totals[name] += amount
            case "server", (server,):
                self.commits.setdefault(server, [])
            case "commit", (server, version):
                self.commits.setdefault(server, []).append(version)
            case "quantised", (server, str(method)):
                self.quantised[server] = method
            case "member", (server, event, version):
                self.membership.append((server, event, version))
            case "error", (message,):
                self.errors.append(message)
            case "resume", (step,):
                self.resumes.append(step)
            case "evaluation", (dict(found),):
                self.evaluations.append(found)
            case _:
                raise ValueError(f"no entry of a history: {kind!r} {values!r}")

    def extend(self, later: "History") -> None:
        """Append what another process of the same run recorded after this one."""
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


def read_history(path: Path) -> History:
    """Read history.jsonl. The processes before the last one that started at step 1 belong to an
    older run and are left out; so is a line that a kill tore."""
    whole, part = History(), History()
    for line in path.read_text().splitlines() if path.is_file() else ():
        with suppress(ValueError, TypeError, KeyError):
            kind, *values = json.loads(line)
            if kind == "process":
                whole.extend(part)
                part = History()
            elif kind == "first step":
                whole = History()
            else:
                part.add(kind, *values)
    whole.extend(part)
    return whole


class _Output:
    """A file of the recorder's thread. After its first error it takes nothing more, so that the
    other files go on."""

    def __init__(self, path: Path, open_file: Callable[[Path], TextIO]) -> None:
        self._path, self._file = path, None
        self._last_bytes = 0
        self.problem = ""
        with self._noting_errors():
            self._file = open_file(path)

    @contextmanager
    def _noting_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self.problem = self.problem or f"{self._path} cannot be written: {error.strerror}"

    def write(self, text: str) -> None:
        if self._file is not None and not self.problem:
            with self._noting_errors():
                self._file.write(text)
                self._last_bytes = len(text.encode())

    def replace_last(self, text: str) -> None:
        """Put ``text`` in the place of what was written last."""
        if self._file is not None and not self.problem:
            with self._noting_errors():
                self._file.flush()
                # The file is open for appending: what is written next comes at its new end.
                self._file.truncate(os.fstat(self._file.fileno()).st_size - self._last_bytes)
        self.write(text)

    def flush(self) -> None:
        if self._file is not None and not self.problem:
            with self._noting_errors():
                self._file.flush()

    def close(self, end: str = "") -> None:
        self.write(end)
        if self._file is not None:
            # closing flushes once more, and fails again on a full disk
            with self._noting_errors():
                self._file.close()


def _open_lines(path: Path) -> TextIO:
    """Open a file of JSON lines for appending, after the line that a kill tore."""
    torn = False
    if path.is_file() and path.stat().st_size:
        with path.open("rb") as file:
            file.seek(-1, os.SEEK_END)
            torn = file.read() != b"\n"
    stream = path.open("a")
    if torn:
        stream.write("\n")
    return stream


def _open_trace(path: Path) -> TextIO:
    """Open a trace so that events can follow the ones of an earlier process. Only its last bytes
    are cut: the closing bracket, or the event that a kill tore."""
    kept = 0
    if path.is_file() and (size := path.stat().st_size):
        with path.open("r+b") as file:
            start = file.seek(max(0, size - TAIL_BYTES))
            tail = file.read()
            end = tail.rfind(b"\n]") if tail.rstrip().endswith(b"]") else tail.rfind(b",\n")
            kept = start + end if end > 0 else 0
            file.truncate(kept)
    stream = path.open("a")
    stream.write(",\n" if kept else "[\n")
    return stream


class Recorder:
    """Collects what a run did, on rank 0. Every method may be called from any thread; none waits
    for a file.

    Files in ``run_dir``: ``trace.json``, ``metrics.jsonl`` (one line per step), ``history.jsonl``
    (what summary.json needs of earlier processes of the run) and ``samples.jsonl`` (completions to
    look at). A resumed run appends to all of them. ``track`` names a row of the trace; without it
    the row is the calling thread's name. Raises ConfigError if ``run_dir`` cannot be written.
    """

    def __init__(
        self,
        run_dir: Path | str,
        clock: Callable[[], float] = time.perf_counter,
        traces: Traces | None = None,
    ) -> None:
        """``traces``: gets each span too, and is closed with the recorder."""
        self.run_dir, self._clock, self._traces = Path(run_dir), clock, traces
        self.trace_path = self.run_dir / "trace.json"
        self.metrics_path = self.run_dir / "metrics.jsonl"
        self._history_path = self.run_dir / "history.jsonl"
        self._history = History()
        self._rows: list[dict[str, Any]] = []
        try:
            self.run_dir.mkdir(parents=True, exist_ok=True)
            self._history_path.open("a").close()
            self._history = read_history(self._history_path)
            if self.metrics_path.exists():
                self._rows = read_metrics(self.metrics_path, names.SUMMARISED)
        except OSError as error:
            raise ConfigError(
                f"job.dump_folder must be a directory that can be written, {self.run_dir} is not"
                f" ({error.strerror}): name another one"
            ) from error
        self._own = History()
        self._last: dict[str, Any] = {}
        self._taken: dict[str, int] = {}
        """Values of each series that ``since_last`` gave already."""
        self._lock = threading.Lock()
        # The rows of an earlier process stay apart: their numbers are below the file's size.
        self._first_track = self.trace_path.stat().st_size if self.trace_path.is_file() else 0
        self._tracks: dict[str, int] = {}
        self._lost_events = 0
        self._problems: list[str] = []
        # put() of a SimpleQueue never waits: a disk that hangs cannot hold up a training step.
        self._queue: queue.SimpleQueue[tuple[str, Any] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._write_loop, name="recorder", daemon=True)
        self._thread.start()
        self._put_event({"ph": "M", "name": "process_name", "args": {"name": "rank 0"}})
        self._queue.put(("history", ["process"]))

    @contextmanager
    def span(self, name: str, track: str | None = None, **args: Any) -> Iterator[None]:
        """Time a block: one bar in the trace and one value in the series ``name`` (seconds), also
        if it raises."""
        start = self._clock()
        try:
            yield
        finally:
            self.record_span(name, start, self._clock(), track, **args)

    def record_span(
        self, name: str, start_s: float, stop_s: float, track: str | None = None, **args: Any
    ) -> None:
        """Record a span whose ends were read elsewhere, on the recorder's clock."""
        self.observe(name, stop_s - start_s)
        self.add_span(name, start_s, stop_s, track, **args)

    def add_span(
        self, name: str, start_s: float, stop_s: float, track: str | None = None, **args: Any
    ) -> None:
        """Add a bar to the trace and nothing else."""
        # the format has microseconds
        if self._traces is not None:
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
        """Add to a total of the run (commits, dropped groups, bytes)."""
        self.add("count", name, amount)

    def observe(self, name: str, value: float) -> None:
        """Add one value to a series."""
        self.add("value", name, float(value))

    def committed(self, server: str, version: int) -> None:
        """Record that a server holds ``version``, as it was read back."""
        self.add("commit", server, version)

    def evaluated(self, found: Mapping[str, Any]) -> None:
        """Record the outcome of an evaluation, as plain values."""
        self.add("evaluation", dict(found))
        self.instant("evaluation", message=str(found["name"]), version=found["version"])

    def known_server(self, server: str) -> None:
        """Name a server of the run: the summary shows it, also if it never commits."""
        self.add("server", server)

    def quantised(self, server: str, method: str) -> None:
        """Record how a server quantises its weights, as its engine says; empty: it does not."""
        self.add("quantised", server, method)

    def joined(self, server: str, version: int) -> None:
        """Record a server that was added while the trainer was at ``version``."""
        self._member(server, "joined", version, names.SERVERS_JOINED)

    def left(self, server: str, version: int) -> None:
        """Record a server that was removed while the trainer was at ``version``."""
        self._member(server, "left", version, names.SERVERS_LEFT)

    def _member(self, server: str, event: str, version: int, counter: str) -> None:
        self.add("member", server, event, version)
        self.count(counter)
        self.instant(f"server {event}", server, version=version)

    def error(self, message: str) -> None:
        """Record an error that did not stop the run; the summary lists it."""
        self.add("error", message)
        self.instant("error", message=message)

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """End a training step: one line of metrics.jsonl, and one value of each metric."""
        row = {"step": step, "time_s": self._clock(), **_finite(metrics)}
        if not self._last:
            self._begin(step)
        with self._lock:
            self._rows.append(_kept(row, names.SUMMARISED))
            self._last = row
        self._queue.put(("metrics", row))

    def after_last_step(self, metrics: Mapping[str, float]) -> None:
        """Add what became known after the last step to its line. Nothing without a step of this
        process."""
        with self._lock:
            if not self._last:
                return
            row = self._last = {**self._last, **_finite(metrics)}
            self._rows[-1] = _kept(row, names.SUMMARISED)
        self._queue.put(("last metrics", row))

    def sample(self, line: Mapping[str, Any]) -> None:
        """Add a line to samples.jsonl (:class:`titan_grpo.observe.schema.ShownStep`)."""
        self._queue.put(("samples", line))

    def _begin(self, step: int) -> None:
        """Before the first step of this process: forget what it repeats, or the older run of which
        the directory still has the files."""
        with self._lock:
            self._rows = [row for row in self._rows if row["step"] < step]
            older = step == 1
            if older:
                self._history = History()
        if older:
            self._queue.put(("history", ["first step"]))
        elif self._rows:
            self.add("resume", step)

    def now(self) -> float:
        """Read the recorder's clock, for :meth:`record_span`."""
        return self._clock()

    def history(self) -> History:
        """Copy the history of the run, earlier processes included."""
        out = History()
        with self._lock:
            out.extend(self._history)
            out.extend(self._own)
        return out

    def rows(self) -> list[dict[str, Any]]:
        """Copy of each step of the run what summary.json needs (names.SUMMARISED), earlier
        processes included."""
        with self._lock:
            return list(self._rows)

    def last_row(self) -> dict[str, Any]:
        """Copy the last line of metrics.jsonl; empty before this process's first."""
        with self._lock:
            return dict(self._last)

    def series(self, name: str) -> list[float]:
        """Copy all values of a series, or of a step metric of names.SUMMARISED, oldest first."""
        with self._lock:
            own = [*self._history.series.get(name, ()), *self._own.series.get(name, ())]
        # a step's line has the mean of what it observed: not once more
        return own or [row[name] for row in self.rows() if row.get(name) is not None]

    def since_last(self) -> dict[str, float]:
        """Mean of the values that each series (names.WORK) got since the last call, and all totals
        so far (names.TOTALS, and what was dropped). For one caller."""
        found = dict.fromkeys(names.TOTALS, 0.0)
        prefix = names.dropped("")
        with self._lock:
            for name in names.WORK:
                values = self._own.series.get(name, ())
                if fresh := values[self._taken.get(name, 0) :]:
                    found[name] = sum(fresh) / len(fresh)
                self._taken[name] = len(values)
            for history in (self._history, self._own):
                for name, amount in history.totals.items():
                    if name in names.TOTALS or name.startswith(prefix):
                        found[name] = found.get(name, 0.0) + amount
        return found

    def close(self, deadline_s: float = 10.0) -> list[str]:
        """Write what is left and close the files. Returns why one of them is not whole, each reason
        also among the errors. Idempotent."""
        if self._thread.is_alive():
            self._queue.put(None)
            self._thread.join(deadline_s)
        problems = list(self._problems)
        if self._thread.is_alive():
            problems.append(f"files in {self.run_dir} were not written within {deadline_s:g} s")
        if self._lost_events:
            text = "events are not in it: the disk did not keep up"
            problems.append(f"{self.trace_path}: {self._lost_events} {text}")
        with self._lock:
            self._own.errors += [p for p in problems if p not in self._own.errors]
        return problems

    def add(self, kind: str, *values: Any) -> None:
        """Add an entry of the history (History.add)."""
        with self._lock:
            self._own.add(kind, *values)
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
            "trace": _Output(self.trace_path, _open_trace),
            "metrics": _Output(self.metrics_path, _open_lines),
            "history": _Output(self._history_path, _open_lines),
            "samples": _Output(self.run_dir / "samples.jsonl", _open_lines),
        }
        first = True
        # no deadline: close() of the owner puts None into the queue; the thread is a daemon
        while (item := self._queue.get()) is not None:
            kind, body = item
            if kind == "span" and self._traces is not None:
                self._traces.span(*body)
                continue
            text = json.dumps(body, default=str)
            if kind == "trace":
                outputs[kind].write(text if first else ",\n" + text)
                first = False
            elif kind == "last metrics":
                outputs["metrics"].replace_last(text + "\n")
            else:
                outputs[kind].write(text + "\n")
            if kind.endswith("metrics"):
                # A step is the unit that a reader waits for: a live plot, tail -f.
                for output in outputs.values():
                    output.flush()
        outputs["trace"].close("\n]\n")
        for output in list(outputs.values())[1:]:
            output.close()
        self._problems = [output.problem for output in outputs.values() if output.problem]
        if self._traces is not None:
            self._traces.close()
