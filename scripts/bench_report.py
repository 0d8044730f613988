#!/usr/bin/env python
"""How long ``titan-grpo report`` takes for a long run with many servers, and how large its page is.

    python scripts/bench_report.py [--steps 20000] [--servers 64] [--repeat 3] [--run DIR]
    [--json PATH]

The run is written by the recorder on a clock that is moved by hand, every server commits every
version; that takes far longer than the report (a quarter of an hour for the largest). ``--run``
keeps it, and takes it as it is if it is there. Printed: median, least and largest wall and
processor time of the command as a process of its own, and the size of the page.
"""

import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the checkout, for tests and scripts

from scripts.common import ROOT, options_of, write_json
from tests.views.runs import Made, make_run

PACE_STEPS = 50
DEADLINE_S = 300.0
LINE_BYTES = 1 << 16
"""More than a line of metrics.jsonl with 64 servers has."""


def written(folder: Path, step: int) -> None:
    """Wait for the recorder's thread: beyond its bound it drops trace events."""
    if step % PACE_STEPS:
        return
    deadline, mark = time.monotonic() + DEADLINE_S, f'{{"step": {step},'.encode()
    metrics = folder / "metrics.jsonl"
    while time.monotonic() < deadline:
        with metrics.open("rb") as file:
            file.seek(max(0, metrics.stat().st_size - LINE_BYTES))
            if mark in file.read():
                return
        threading.Event().wait(0.01)
    raise SystemExit(f"the recorder did not write step {step} within {DEADLINE_S:g} s")


def timed(run: Path, out: Path) -> tuple[float, float]:
    """Wall and processor seconds of one call."""
    command = [sys.executable, "-m", "titan_grpo.cli", "report", str(run), "--out", str(out)]
    before, start = os.times(), time.perf_counter()
    subprocess.run(command, check=True, cwd=ROOT, stdout=subprocess.DEVNULL, timeout=600)
    wall, after = time.perf_counter() - start, os.times()
    used = (after.children_user - before.children_user) + (
        after.children_system - before.children_system
    )
    return wall, used


def main() -> None:
    """Make the run if it is not there, time the report, print."""
    parser = options_of(__doc__)
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--servers", type=int, default=64)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--run", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        run = options.run or Path(scratch) / "run"
        if not (run / "metrics.jsonl").exists():
            made = Made(options.steps, options.servers, slow_server=1, faulty_server=2)
            make_run(run, made, pace=lambda step: written(run, step))
        page = Path(scratch) / "page.html"
        times = [timed(run, page) for _ in range(options.repeat)]
        figures = {"page_mb": page.stat().st_size / 1e6}
    for name, column in zip(("wall_s", "cpu_s"), zip(*times, strict=True), strict=True):
        figures |= {name: statistics.median(column)}
        figures |= {f"{name}_min": min(column), f"{name}_max": max(column)}
    for name, value in figures.items():
        print(f"{name:<12} {value:.2f}")
    write_json(options.json, figures)


if __name__ == "__main__":
    main()
