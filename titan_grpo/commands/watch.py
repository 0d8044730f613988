"""``titan-grpo watch RUN``: follow a run in the terminal, from any shell that sees its folder."""

import argparse
import threading
import time
from collections.abc import Callable, Mapping
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from titan_grpo.config import Alerts
from titan_grpo.errors import ConfigError
from titan_grpo.observe import alerts
from titan_grpo.observe.recorder import METRICS, newest_rows
from titan_grpo.observe.run_lock import LOCK
from titan_grpo.observe.terminal import next_command
from titan_grpo.titan.jobfile import mismatches, read_toml, refuse

if TYPE_CHECKING:
    from rich.console import Console

    from titan_grpo.views.live import Follower


def _parser() -> argparse.ArgumentParser:
    out = argparse.ArgumentParser(
        prog="titan-grpo watch",
        description="Follow a run in the terminal: curves, servers, errors. It may be started"
        " before the run, ends with it, and reads files only. Where the output is no terminal it is"
        " a line per step.",
    )
    out.add_argument("run", type=Path, metavar="RUN", help="folder of the run (job.dump_folder)")
    interval = "seconds between two looks (default 1)"
    out.add_argument("--interval", type=float, default=1.0, metavar="S", help=interval)
    check = out.add_argument_group(
        "check once, for a scheduler",
        "exit code 0: nothing to tell; 3: a threshold holds, or its metric is infinite or nan; 4:"
        " no step for too long; 1: no step yet, or the run ended without a summary or before its"
        " last step; 2: a mistake in the arguments, or a file that cannot be read",
    )
    check.add_argument("--check", action="store_true", help="look once instead of following")
    threshold = 'a threshold as in [alerts], such as "ratio/max > 10 for 3" (may be repeated)'
    check.add_argument("--alert", action="append", default=[], metavar="TEXT", help=threshold)
    check.add_argument("--config", metavar="TOML", help="take those of this job's [alerts] too")
    stalled = (
        "no step for so many seconds, since the last one or the last start, is worth exit code 4,"
        " while the run has no summary"
    )
    check.add_argument("--stalled", type=float, metavar="S", help=stalled)
    return out


def run(argv: list[str], env: Mapping[str, str]) -> int:
    """Follow until the run ends. Returns 0 after its last step, 1 if it ended before, 130 on
    Ctrl-C."""
    args = _parser().parse_args(argv)
    if not 0.05 <= args.interval <= 3600:
        raise ConfigError(f"--interval must be in [0.05, 3600], got {args.interval:g}")
    if args.run.exists() and not args.run.is_dir():
        raise ConfigError(
            f"RUN must be the folder of a run (job.dump_folder), {args.run} is a file"
        )
    # Imported here, so that --help does not load numpy.
    from titan_grpo.views.live import Follower

    follower = Follower(args.run)
    if args.check:
        return _check(args, follower)
    if args.alert or args.config or args.stalled is not None:
        raise ConfigError("--alert, --config and --stalled need --check, which was not given")
    from rich.console import Console

    console, there = Console(highlight=False), args.run.exists()
    try:
        if not there:
            print(f"waiting for {args.run}, which is not there yet", flush=True)
        if console.is_terminal:
            _on_screen(follower, console, args.interval)
        else:
            if there and not (follower.ended() or _has_steps(args.run)):
                print(f"{args.run} has no step yet: waiting for the first", flush=True)
            _follow(follower, lambda rows: _print_steps(follower, rows), args.interval)
    except KeyboardInterrupt:
        return 130
    return _end(follower)


HOLDS, STALLED = 3, 4
"""Exit codes of --check."""


def _check(args: argparse.Namespace, run: "Follower") -> int:
    """Check a run's files once; print findings and return the exit code."""
    from titan_grpo.views.run import read_summary

    thresholds = [alerts.Threshold.parse(text, "--alert") for text in args.alert]
    thresholds += _of_job(args.config)
    if not thresholds and args.stalled is None:
        raise ConfigError("--check needs --stalled, --alert, or alerts in --config: got none")
    if args.stalled is not None and not 0 < args.stalled < float("inf"):
        raise ConfigError(f"--stalled must be greater than 0, got {args.stalled:g}")
    path = args.run / METRICS
    ended = run.ended()
    rows = newest_rows(path)
    if (last := next(rows, None)) is None:
        print(f"{args.run} has no step yet")
        return 1
    step = last["step"]
    holding = alerts.over(thresholds, chain([last], rows))
    for each in holding:
        print(f"step {step}: {each}")
    if holding:
        return HOLDS
    # The file grows once per step, and each start writes the lock: a resumed run must not be taken
    # for one that stands still while it loads. Both mtimes are by the file system's clock.
    known = [file for file in (path, args.run / LOCK) if file.is_file()]
    silent_s = time.time() - max(file.stat().st_mtime for file in known)
    if args.stalled is not None and not ended and silent_s > args.stalled:
        print(f"no step after step {step} for {silent_s:.0f} s")
        return STALLED
    summary = read_summary(args.run) if ended else None
    if ended and summary is None:
        print(f"the run ended after step {step} without a summary; its log says why")
        return 1
    if summary and summary.ended_by:
        print(f"the run ended after step {step}: {summary.ended_by}")
        return 1
    return 0


def _of_job(path: str | None) -> tuple[alerts.Threshold, ...]:
    """Return the thresholds of a job's [alerts]. Raises ConfigError."""
    if path is None:
        return ()
    table = read_toml(path, "--config").get("alerts", {})
    if not isinstance(table, dict):
        raise ConfigError(f"alerts must be a table, got {table!r:.200} in {path!r}")
    refuse(mismatches(Alerts, table, "alerts."))
    return alerts.watched(Alerts(**table))


def _follow(
    follower: "Follower", show: Callable[[list[dict[str, Any]]], None], interval_s: float
) -> None:
    while True:
        # Check before reading, so that everything the run wrote before its end is read.
        ended = follower.ended()
        show(follower.read())
        if ended:
            return
        # Poll: inotify does not report other hosts' writes on a network file system.
        threading.Event().wait(interval_s)


def _on_screen(follower: "Follower", console: "Console", interval_s: float) -> None:
    from rich.live import Live

    from titan_grpo.views.live import screen

    name, state = follower.folder.resolve().name, follower.state
    with Live(console=console, auto_refresh=False) as live:
        _follow(
            follower,
            lambda _: live.update(screen(name, state, time.monotonic()), refresh=True),
            interval_s,
        )


def _has_steps(folder: Path) -> bool:
    metrics = folder / METRICS
    return metrics.is_file() and metrics.stat().st_size > 0


def _print_steps(follower: "Follower", rows: list[dict[str, Any]]) -> None:
    from titan_grpo.views.live import step_line

    for row in rows:
        # what servers held is known for the last step only
        print(step_line(row, follower.state.held if row is rows[-1] else {}), flush=True)


def _end(follower: "Follower") -> int:
    from titan_grpo.observe.report import final_table
    from titan_grpo.views.run import read_summary

    summary = read_summary(follower.folder)
    if summary is None:
        print(f"the run ended after step {follower.state.step} without a summary; its log says why")
        return 1
    print(final_table(summary))
    print(next_command("report", str(follower.folder)))
    return int(bool(summary.ended_by))
