"""``scripts/explore.sh``: every interleaving of trainer, lanes and servers, on the tables that
production runs on."""

import argparse
import json
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tests.model_check.bugs import BUGS
from tests.model_check.hosts import HOST_BUGS, explore_hosts
from tests.model_check.patches import PATCH_BUGS, explore_patches
from tests.model_check.relay import BOUNDS, RELAY_BUGS, explore_relay
from tests.model_check.rollouts import explore_rollouts
from tests.model_check.search import Bounds, Explorer
from tests.model_check.small import Bug, Result
from titan_grpo.cli import guarded
from titan_grpo.commands.processes import require_file
from titan_grpo.errors import ConfigError

LIMITS = {
    "ranks": (1, 8),
    "servers": (1, 4),
    "versions": (2, 6),
    "slots": (2, 4),
    "faults": (-1, 9),
}
"""Least and greatest value of each bound."""

ALL_BUGS = (*BUGS, *HOST_BUGS, *RELAY_BUGS, *PATCH_BUGS)


def _arguments(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="scripts/explore.sh",
        description=(
            "Explore all reachable states of the sync protocol, with lost, late and repeated"
            " messages and with crashes and restarts of either side at every step. Ends with 1 on a"
            " violation, or if a seeded bug is not caught."
        ),
    )
    add = parser.add_argument
    add("--ranks", type=int, default=2, help="trainer ranks that write a part of each version")
    add("--servers", type=int, default=2)
    add("--versions", type=int, default=3)
    add("--slots", type=int, default=2, help="version images in host memory")
    add("--faults", type=int, default=1, help="per run, at any step; -1: any number (large)")
    add("--streamed", action="store_true", help='apply = "streamed" instead of "staged"')
    add("--seconds", type=float, default=600.0, help="give up after this long")
    add("--no-bugs", action="store_true", help="leave the seeded bugs out")
    add("--json", type=Path, help="write the results there")
    return parser.parse_args(argv)


def run(argv: list[str], env: Mapping[str, str]) -> int:
    """0: nothing was violated and every seeded bug was caught. 1: otherwise, or not finished in
    time."""
    options = _arguments(argv)
    for name, (least, most) in LIMITS.items():
        value = getattr(options, name)
        if not least <= value <= most:
            raise ConfigError(f"--{name} must be from {least} to {most}, got {value}")
    if options.json is not None:
        require_file("--json", options.json)
    bounds = Bounds(
        **{name: getattr(options, name) for name in LIMITS},
        streamed=options.streamed,
        deadline_s=options.seconds,
    )
    found = Explorer(bounds, progress=_progress).run()
    explored = {"weights": found}
    if found.complete:
        explored["rollouts"] = explore_rollouts(bounds.servers, bounds.versions)
        explored["hosts"] = explore_hosts(bounds.versions)
        explored["relay"] = explore_relay(bounds=BOUNDS)
        explored["patches"] = explore_patches(bounds.versions + 2, faults=2)
        explored["patches of two hosts"] = explore_patches(bounds.versions + 1, hosts=2)
    for name, result in explored.items():
        _show(name, result)
    caught = [] if options.no_bugs else [_catch(bug) for bug in ALL_BUGS]
    missed = [bug["name"] for bug in caught if not bug["caught"]]
    if options.json is not None:
        report = {
            "bounds": asdict(bounds),
            **{name: asdict(result) for name, result in explored.items()},
            "bugs": caught,
        }
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    results = explored.values()
    violations = sum(bool(r.violation) for r in results)
    states, steps = sum(r.states for r in results), sum(r.steps for r in results)
    print(
        f"explored {'all' if found.complete else 'NOT all'} {states:,} states ({steps:,} steps) in "
        f"{sum(r.seconds for r in results):.1f} s: {violations} violations; "
        f"seeded bugs caught: {len(caught) - len(missed)} of {len(caught)}"
    )
    return 1 if violations or missed or not found.complete else 0


def _progress(states: int, seconds: float) -> None:
    print(f"  {states:,} states after {seconds:.0f} s", flush=True)


def _show(name: str, result: Result) -> None:
    verdict = f"VIOLATION: {result.violation}" if result.violation else "no violation"
    print(
        f"{name}: {result.states:,} states, {result.steps:,} steps, {result.seconds:.1f} s:"
        f" {verdict}",
        flush=True,
    )
    for number, step in enumerate(result.trace, start=1):
        print(f"  {number:3} {step}")


def _catch(bug: Bug) -> dict[str, Any]:
    result = bug.find()
    caught = bool(result.violation)
    how = f"{result.violation} (after {len(result.trace)} steps)" if caught else "NOT CAUGHT"
    print(f"seeded bug: {bug.name} ({bug.breaks}): {how}", flush=True)
    return {
        "name": bug.name,
        "breaks": bug.breaks,
        "caught": caught,
        "how": result.violation,
        "trace": result.trace,
    }


if __name__ == "__main__":
    sys.exit(guarded(run, sys.argv[1:], "scripts/explore.sh"))
