"""Soak: many versions, two servers, random faults. ``python -m tests.soak.__main__ --versions
1000``.

One trainer process with the real slots, sealer, lanes and snapshots around a small model; two
engine-less server processes (tests.rigs.server_process) with real HTTP and real receivers. Faults
come from a seeded schedule; between two windows of versions they rest, and everything is measured.
Memory is judged in long runs only. The exit status is 1 if any figure is not as demanded."""

import argparse
import json
import logging
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NoReturn

from tests.rigs.server_handle import ServerProcess
from tests.soak.faults import Kind
from tests.soak.judge import Verdict, judge, record
from tests.soak.run import NAMES, Options, Soak
from titan_grpo.errors import TitanGrpoError


class Parser(argparse.ArgumentParser):
    """Bad arguments are one line and exit status 2."""

    def error(self, message: str) -> NoReturn:
        """See argparse."""
        self.exit(2, f"soak: {message}\n")


def parse(argv: Sequence[str]) -> tuple[Options, str]:
    """(what to run, path of the JSON file or empty)."""
    parser = Parser(
        prog="soak", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--versions", type=int, default=1000, help="versions to publish (default: %(default)s)")
    step = "length of a step (default: %(default)s)"
    add("--seconds-per-version", type=float, default=0.2, help=step)
    add("--seed", type=int, default=0, help="of the schedule of faults (default: %(default)s)")
    every = "versions per fault; 0: no faults (default: %(default)s)"
    add("--fault-every", type=int, default=8, help=every)
    between = "versions between two measurements (default: %(default)s)"
    add("--window", type=int, default=50, help=between)
    add("--json", default="", metavar="PATH", help="write every figure there")
    values = parser.parse_args(argv)
    least = {"versions": 1, "window": 1, "fault_every": 0, "seconds_per_version": 0}
    for name, low in least.items():
        if (value := getattr(values, name)) < low:
            parser.error(f"--{name.replace('_', '-')} must be {low} or greater, got {value}")
    path = vars(values).pop("json")
    if path and not Path(path).absolute().parent.is_dir():
        parser.error(f"--json must name a file in a directory that exists, got {path}")
    values.window = min(values.window, values.versions)
    return Options(**vars(values)), path


def say(line: str) -> None:
    """Progress; the table goes to stdout."""
    print(line, file=sys.stderr, flush=True)


def run(options: Options, logs: Path) -> tuple[list[Verdict], dict[str, Any]]:
    """(the table, everything as JSON). The processes write their logs into ``logs``."""
    start = time.monotonic()
    with ExitStack() as stack:
        with ThreadPoolExecutor(len(NAMES)) as pool:
            begun = [
                pool.submit(ServerProcess, log_path=logs / f"server_{name}.log") for name in NAMES
            ]
        # those that did start are ended also if another one did not
        servers = [stack.enter_context(one.result()) for one in begun if one.exception() is None]
        for one in begun:
            one.result()
        soak = Soak(options, servers, logs, say)
        seen = soak.run()
    soak.after()
    struck = {kind.value: count for kind, count in soak.injector.struck.items()}
    struck[Kind.CORRUPT.value] = soak.corrupted
    faults = ", ".join(f"{count} {name}" for name, count in struck.items())
    missed, made = soak.injector.missed, len(seen.digests)
    faults = f"{sum(struck.values())}: {faults}" + (f"; missed: {', '.join(missed)}" * bool(missed))
    verdicts = [
        Verdict("versions published", f"{made}", f"{options.versions}", made == options.versions),
        Verdict("faults", faults, f"{len(soak.faults)}", not missed),
        *judge(seen),
    ]
    took = {"seconds": time.monotonic() - start, "seed": options.seed, "faults": struck}
    return verdicts, took | record(seen, verdicts)


def table(verdicts: Sequence[Verdict]) -> str:
    """For a terminal."""
    width = max(len(v.what) for v in verdicts)
    return "\n".join(
        f"{'ok  ' if v.ok else 'FAIL'}  {v.what:{width}}  {v.figure}  [demanded: {v.demanded}]"
        for v in verdicts
    )


def main(argv: Sequence[str]) -> int:
    """Run, print the table, and the summary as the last line."""
    options, path = parse(argv)
    logging.basicConfig(level=logging.WARNING, format="%(name)s: %(message)s")
    logs = Path(tempfile.mkdtemp(prefix="soak_"))
    try:
        verdicts, everything = run(options, logs)
    except TitanGrpoError as error:
        print(f"soak FAILED: {error}; logs are in {logs}")
        return 1
    if path:
        Path(path).write_text(json.dumps(everything, indent=1) + "\n")
    print(table(verdicts))
    failed = [v.what for v in verdicts if not v.ok]
    faults, slowest = sum(everything["faults"].values()), max(everything["recoveries_s"])
    outcome = f"FAILED ({', '.join(failed)}; logs are in {logs})" if failed else "passed"
    done = (
        f"{everything['published']} versions, {faults} faults, seed {options.seed}, slowest"
        f" recovery {slowest:.1f} s"
    )
    print(f"soak {outcome}: {done}, {everything['seconds']:.0f} s")
    if not failed:
        shutil.rmtree(logs)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
