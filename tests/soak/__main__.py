"""Soak: many versions, two servers, random faults. ``scripts/soak.sh --versions 1000``.

One trainer process with the real slots, sealer, lanes and snapshots around a small model; two
engine-less server processes (tests.rigs.server_process) with real HTTP and real receivers. Faults
come from a seeded schedule; between two windows of versions they rest, and everything is measured.
Memory is judged in long runs only. The exit status is 1 if any figure is not as demanded."""

import logging
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from scripts.common import options_of, positive, write_json
from tests.rigs.server_handle import ServerProcess
from tests.soak.faults import Kind
from tests.soak.judge import Verdict, judge, record
from tests.soak.run import NAMES, Options, Soak
from titan_grpo.commands.processes import print_progress
from titan_grpo.errors import TitanGrpoError


def parse(argv: Sequence[str]) -> tuple[Options, Path | None]:
    """(what to run, path of the JSON file). Exit code 2 for wrong arguments."""
    parser = options_of(__doc__)
    parser.prog = "scripts/soak.sh"
    add = parser.add_argument
    add("--versions", type=positive, default=1000, help="versions to publish")
    add("--seconds-per-version", type=float, default=0.2, help="length of a step")
    add("--seed", type=int, default=0, help="of the schedule of faults")
    add("--fault-every", type=int, default=8, help="versions per fault; 0: no faults")
    add("--window", type=positive, default=50, help="versions between two measurements")
    values = vars(parser.parse_args(argv))
    if values["fault_every"] < 0:
        parser.error(f"--fault-every must be 0 or more, got {values['fault_every']}")
    path: Path | None = values.pop("json")
    values["window"] = min(values["window"], values["versions"])
    return Options(**values), path


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
        soak = Soak(options, servers, logs, print_progress)
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
    write_json(path, everything)
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
