"""Events of the Chrome trace format, which Perfetto (ui.perfetto.dev) opens.

Source: "Trace Event Format" of the Chromium project. A process is a rank, a track is a thread or a
lane. The file is a JSON array with one event per line, so that the trace of a killed run is
readable too: the format allows the closing bracket to be missing.

The recorder: spans, counters and step metrics from any thread; only its own thread touches a
file."""

import itertools
import json
import math
import os
import queue
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from titan_grpo.observe import names
from titan_grpo.observe.statistics import Statistics, describe

Event = dict[str, Any]


def complete(
    name: str, process: int, track: int, start_s: float, duration_s: float, **args: Any
) -> Event:
    """A span. Times in seconds of one monotonic clock; the format wants microseconds."""
    event = {
        "ph": "X",
        "name": name,
        "pid": process,
        "tid": track,
        "ts": start_s * 1e6,
        "dur": duration_s * 1e6,
    }
    return {**event, "args": args} if args else event


def instant(name: str, process: int, track: int, at_s: float, **args: Any) -> Event:
    """A point in time on one track."""
    event = {"ph": "i", "s": "t", "name": name, "pid": process, "tid": track, "ts": at_s * 1e6}
    return {**event, "args": args} if args else event


def counter(name: str, process: int, at_s: float, value: float) -> Event:
    """A value drawn as a curve of its own."""
    return {"ph": "C", "name": name, "pid": process, "ts": at_s * 1e6, "args": {"value": value}}


def process_name(process: int, name: str) -> Event:
    """Names a process."""
    return {"ph": "M", "name": "process_name", "pid": process, "args": {"name": name}}


def track_name(process: int, track: int, name: str) -> Event:
    """Names a track and orders the tracks as they were met."""
    return {"ph": "M", "name": "thread_name", "pid": process, "tid": track, "args": {"name": name}}


def read_events(path: Path) -> list[Event]:
    """Events of a trace file, also of one that a killed process left without its end."""
    events: list[Event] = []
    for line in path.read_text().splitlines():
        text = line.strip().rstrip(",")
        if text in ("", "[", "]"):
            continue
        try:
            events.append(json.loads(text))
        except json.JSONDecodeError:
            # A kill can tear only the line that was being written; what follows it, if anything, is
            # whole.
            continue
    return events


def write_events(path: Path, events: Iterable[Event]) -> None:
    """Write a whole trace file."""
    path.write_text("[\n" + ",\n".join(json.dumps(e, default=str) for e in events) + "\n]\n")


def merge(parts: Iterable[Path], out: Path) -> None:
    """Join the traces of several ranks of one host: they share the monotonic clock, so their times
    are comparable."""
    write_events(out, [event for part in parts for event in read_events(part)])


PENDING_LIMIT = 100_000
"""Trace events that may wait for a slow disk; beyond it trace events (never metrics) are dropped
and counted."""


def finite_or_none(value: float) -> float | None:
    """JSON has no NaN and no infinity: they become null."""
    return value if math.isfinite(value) else None


class Recorder:
    """Collects what a run did. Every method may be called from any thread and none of them waits
    for a file.

    Files in ``run_dir``: ``metrics.jsonl`` (rank 0 only, one line per step, appended to on resume)
    and ``json`` (other ranks: ``rankN.json``; see :func:`titan_grpo.observe.recorder.merge`).
    ``track`` names a row of the trace; without it the row is the calling thread's name.
    """

    def __init__(
        self, run_dir: Path | str, rank: int = 0, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.run_dir = Path(run_dir)
        self.run_dir.mkdir(parents=True, exist_ok=True)
        self.rank = rank
        self.trace_path = self.run_dir / ("trace.json" if rank == 0 else f"trace.rank{rank}.json")
        self.metrics_path = self.run_dir / "metrics.jsonl"
        self._clock = clock
        self._lock = threading.Lock()
        self._series: dict[str, list[float]] = defaultdict(list)
        self._totals: dict[str, float] = defaultdict(float)
        self._commits: dict[str, list[int]] = {}
        self._membership: list[tuple[str, str, int]] = []
        self._errors: list[str] = []
        self._tracks: dict[str, int] = {}
        self._step_times: list[float] = []
        self._steps: list[int] = []
        self._lost_events = 0
        # A SimpleQueue's put never waits, which is what keeps a stuck disk away from the training
        # step.
        self._queue: queue.SimpleQueue[tuple[str, Any] | None] = queue.SimpleQueue()
        self._failure: OSError | None = None
        self._thread = threading.Thread(target=self._write_loop, name="recorder", daemon=True)
        self._thread.start()
        self._put_event(process_name(rank, f"rank {rank}"))

    # What the other rooms call.

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
        """A span whose ends were read elsewhere, on the same clock as the recorder's."""
        self.observe(name, stop_s - start_s)
        self.draw(name, start_s, stop_s, track, **args)

    def draw(
        self, name: str, start_s: float, stop_s: float, track: str | None = None, **args: Any
    ) -> None:
        """A bar in the trace and nothing else."""
        self._put_event(
            complete(name, self.rank, self._track(track), start_s, stop_s - start_s, **args)
        )

    def instant(self, name: str, track: str | None = None, **args: Any) -> None:
        """Mark a point in time in the trace."""
        self._put_event(instant(name, self.rank, self._track(track), self._clock(), **args))

    def counter(self, name: str, value: float) -> None:
        """Draw a value that goes up and down (free slots, requests in flight) in the trace."""
        self._put_event(counter(name, self.rank, self._clock(), value))

    def count(self, name: str, amount: float = 1) -> None:
        """Add to a total of the run (commits, dropped groups, bytes)."""
        with self._lock:
            self._totals[name] += amount

    def observe(self, name: str, value: float) -> None:
        """Add one value to a series without drawing it."""
        with self._lock:
            self._series[name].append(float(value))

    def committed(self, server: str, version: int) -> None:
        """A server read back that it holds ``version``."""
        with self._lock:
            self._commits.setdefault(server, []).append(version)

    def known_server(self, server: str) -> None:
        """A server belongs to the run, though it may never commit: it shall appear in the
        summary."""
        with self._lock:
            self._commits.setdefault(server, [])

    def joined(self, server: str, version: int) -> None:
        """A server was added to the run while the trainer was at ``version``."""
        self._changed_members(server, "joined", version, names.SERVERS_JOINED)

    def left(self, server: str, version: int) -> None:
        """A server was removed from the run while the trainer was at ``version``."""
        self._changed_members(server, "left", version, names.SERVERS_LEFT)

    def _changed_members(self, server: str, event: str, version: int, counter: str) -> None:
        with self._lock:
            self._membership.append((server, event, version))
        self.count(counter)
        self.instant(f"server {event}", server, version=version)

    def error(self, message: str) -> None:
        """Latch an error that did not stop the run; the summary lists it."""
        with self._lock:
            self._errors.append(message)
        self.instant("error", message=message)

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """End of a training step: a line of metrics.jsonl, and one value in each metric's
        series."""
        now = self._clock()
        with self._lock:
            self._steps.append(step)
            self._step_times.append(now)
            for name, value in metrics.items():
                self._series[name].append(float(value))
        line = {
            "step": step,
            "time_s": now,
            **{name: finite_or_none(float(v)) for name, v in metrics.items()},
        }
        self._queue.put(("metrics", line))

    # What a report reads.

    def now(self) -> float:
        """The recorder's clock, for :meth:`record_span`."""
        return self._clock()

    def series(self, name: str) -> list[float]:
        """Copy of all values of a series, oldest first."""
        with self._lock:
            return list(self._series.get(name, ()))

    def statistics(self, name: str) -> Statistics:
        """Median, 95th percentile, mean and maximum of a series."""
        return describe(self.series(name))

    def totals(self) -> dict[str, float]:
        """Copy of all totals."""
        with self._lock:
            return dict(self._totals)

    def commits(self) -> dict[str, list[int]]:
        """Copy of the versions that each server committed, in order."""
        with self._lock:
            return {server: list(versions) for server, versions in self._commits.items()}

    def membership(self) -> list[tuple[str, str, int]]:
        """Copy of the changes of the fleet, in order: (server, "joined" or "left", trainer
        version)."""
        with self._lock:
            return list(self._membership)

    def errors(self) -> list[str]:
        """Copy of the latched errors."""
        with self._lock:
            return list(self._errors)

    def steps(self) -> tuple[list[int], list[float]]:
        """The steps recorded and when each of them ended, in seconds of the clock."""
        with self._lock:
            return list(self._steps), list(self._step_times)

    @property
    def lost_events(self) -> int:
        """Trace events dropped because the disk did not keep up."""
        return self._lost_events

    def close(self, deadline_s: float = 10.0) -> bool:
        """Write what is left and close the files. False if the disk did not take it by the
        deadline. Idempotent."""
        if self._thread.is_alive():
            self._queue.put(None)
            self._thread.join(deadline_s)
        if self._failure is not None:
            self._latch_once(
                f"metrics or trace could not be written under {self.run_dir}: {self._failure}"
            )
        return not self._thread.is_alive() and self._failure is None

    # The recorder's own side.

    def _latch_once(self, message: str) -> None:
        with self._lock:
            if message not in self._errors:
                self._errors.append(message)

    def _track(self, track: str | None) -> int:
        label = track or threading.current_thread().name
        with self._lock:
            number = self._tracks.get(label)
            if number is None:
                number = self._tracks[label] = len(self._tracks)
                self._put_event(track_name(self.rank, number, label))
        return number

    def _put_event(self, event: Event) -> None:
        if self._queue.qsize() >= PENDING_LIMIT:
            self._lost_events += 1
            return
        self._queue.put(("trace", event))

    def _write_loop(self) -> None:
        try:
            with self.trace_path.open("w") as events:
                metrics = self._open_metrics() if self.rank == 0 else None
                try:
                    self._drain(events, metrics)
                finally:
                    if metrics is not None:
                        metrics.close()
        except OSError as error:
            # A full disk must not stop training; close() puts it among the run's errors.
            self._failure = error
            # no deadline: close() of its owner puts None into the queue; the thread is a daemon
            while self._queue.get() is not None:
                pass

    def _open_metrics(self) -> TextIO:
        torn = self.metrics_path.exists() and not self.metrics_path.read_bytes().endswith(b"\n")
        stream = self.metrics_path.open("a")
        if torn and os.fstat(stream.fileno()).st_size:
            # A killed run left half a line; without the break our first line would be lost with it.
            stream.write("\n")
        return stream

    def _drain(self, events: TextIO, metrics: TextIO | None) -> None:
        separator = itertools.chain(("[\n",), itertools.repeat(",\n"))
        # no deadline: close() of its owner puts None into the queue; the thread is a daemon
        while (item := self._queue.get()) is not None:
            kind, body = item
            if kind == "trace":
                events.write(next(separator) + json.dumps(body, default=str))
            elif metrics is not None:
                metrics.write(json.dumps(body) + "\n")
                # A step is the unit a reader waits for (a live plot, tail -f), so flush once per
                # step.
                metrics.flush()
                events.flush()
        events.write("\n]\n")


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Lines of metrics.jsonl, one per step in rising order.

    A line torn by a kill is left out. A step repeated after a resume counts once, as it went last.
    """
    by_step: dict[int, dict[str, Any]] = {}
    for line in path.read_text().splitlines():
        try:
            row = json.loads(line)
            by_step[int(row["step"])] = row
        except (json.JSONDecodeError, KeyError, TypeError):
            continue
    return [by_step[step] for step in sorted(by_step)]
