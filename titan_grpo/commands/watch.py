"""``titan-grpo watch RUN``: follow a run in the terminal, from any shell that sees its folder."""

import argparse
import json
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from titan_grpo.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

    from titan_grpo.views.live import Follower


def parser() -> argparse.ArgumentParser:
    """Arguments of the command."""
    out = argparse.ArgumentParser(
        prog="titan-grpo watch",
        description="Follow a run in the terminal: curves, servers, errors. It may be started"
        " before the run, ends with it, and reads files only. Where the output is no terminal it is"
        " a line per step.",
    )
    out.add_argument("run", type=Path, metavar="RUN", help="folder of the run (job.dump_folder)")
    interval = "seconds between two looks (default 1)"
    out.add_argument("--interval", type=float, default=1.0, metavar="S", help=interval)
    return out


def run(argv: list[str], env: Mapping[str, str]) -> int:
    """Follow until the run ends: 0 with a summary, 1 if it ended without one, 130 on Ctrl-C.
    ``env`` is not used."""
    args = parser().parse_args(argv)
    if not 0.05 <= args.interval <= 3600:
        raise ConfigError(f"--interval must be in [0.05, 3600], got {args.interval:g}")
    # Imported here: --help is answered before numpy is loaded.
    from rich.console import Console

    from titan_grpo.views.live import Follower

    follower, console = Follower(args.run), Console(highlight=False)
    try:
        if console.is_terminal:
            _on_screen(follower, console, args.interval)
        else:
            _in_lines(follower, args.interval)
    except KeyboardInterrupt:
        return 130
    return _end(follower)


def _on_screen(follower: "Follower", console: "Console", interval_s: float) -> None:
    from rich.live import Live

    from titan_grpo.views.live import screen

    name = follower.folder.resolve().name
    with Live(console=console, auto_refresh=False) as live:
        while True:
            # Asked before reading: what a run writes before its end is then read in any case.
            ended = follower.ended()
            follower.read()
            live.update(screen(name, follower.state, time.monotonic()), refresh=True)
            if ended:
                return
            _rest(interval_s)


def _in_lines(follower: "Follower", interval_s: float) -> None:
    from titan_grpo.views.live import step_line

    while True:
        ended = follower.ended()
        rows = follower.read()
        for row in rows:
            # what servers held at earlier steps is not known
            held = follower.state.held if row is rows[-1] else {}
            print(step_line(row, held), flush=True)
        if ended:
            return
        _rest(interval_s)


def _rest(interval_s: float) -> None:
    # inotify sees no write of another host on a network file system, so files are read again.
    threading.Event().wait(interval_s)


def _end(follower: "Follower") -> int:
    from titan_grpo.observe.report import final_table

    summary = follower.summary()
    if summary is None:
        print(f"the run ended after step {follower.state.step} without a summary; its log says why")
        return 1
    print(final_table(json.loads(summary.read_text())))
    print(f"next: titan-grpo report {follower.folder}")
    return 0
