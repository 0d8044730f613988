"""Events of the Chrome trace format, which Perfetto (ui.perfetto.dev) opens.

Source: "Trace Event Format" of the Chromium project. A process is a rank, a track is a thread or a lane.
The file is a JSON array with one event per line, so that the trace of a killed run is readable too:
the format allows the closing bracket to be missing.
"""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

Event = dict[str, Any]


def complete(name: str, process: int, track: int, start_s: float, duration_s: float, **args: Any) -> Event:
    """A span. Times in seconds of one monotonic clock; the format wants microseconds."""
    event = {"ph": "X", "name": name, "pid": process, "tid": track, "ts": start_s * 1e6, "dur": duration_s * 1e6}
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
            # A kill can tear only the line that was being written; what follows it, if anything, is whole.
            continue
    return events


def write_events(path: Path, events: Iterable[Event]) -> None:
    """Write a whole trace file."""
    path.write_text("[\n" + ",\n".join(json.dumps(e, default=str) for e in events) + "\n]\n")


def merge(parts: Iterable[Path], out: Path) -> None:
    """Join the traces of several ranks of one host: they share the monotonic clock, so their times are comparable."""
    write_events(out, [event for part in parts for event in read_events(part)])
