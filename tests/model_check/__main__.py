"""``scripts/explore.sh``: every interleaving of trainer, lanes and servers, on the tables that
production runs on."""

import argparse
import json
import sys
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from tests.model_check.bugs import BUGS, Bug
from tests.model_check.hosts import HOST_BUGS, explore_hosts
from tests.model_check.relay import RELAY_BUGS, explore_relay
from tests.model_check.rollouts import explore_rollouts
from tests.model_check.search import Bounds, Explorer, Result
from titan_grpo.cli import guarded
from titan_grpo.errors import ConfigError

LIMITS = {
    "ranks": (1, 8),
    "servers": (1, 4),
    "versions": (2, 6),
    "slots": (2, 4),
    "faults": (-1, 9),
}
"""Least and greatest value of each bound."""


def _arguments(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="scripts/explore.sh",
        description=(
            "Explore all reachable states of the sync protocol, with lost, late and repeated"
            " messages and with crashes and restarts of either side at every step. Ends with 1 on a"
            " violation, or if a seeded bug is not caught."
        ),
    )
    parser.add_argument(
        "--ranks", type=int, default=2, help="trainer ranks that write a part of each version"
    )
    parser.add_argument("--servers", type=int, default=2)
    parser.add_argument("--versions", type=int, default=3)
    parser.add_argument("--slots", type=int, default=2, help="version images in host memory")
    parser.add_argument(
        "--faults",
        type=int,
        default=1,
        help="how many per run, at any step; -1: any number (large)",
    )
    parser.add_argument(
        "--streamed", action="store_true", help='apply = "streamed" instead of "staged"'
    )
    parser.add_argument("--seconds", type=float, default=600.0, help="give up after this long")
    parser.add_argument("--no-bugs", action="store_true", help="leave the seeded bugs out")
    parser.add_argument("--json", type=Path, help="write the results there")
    return parser.parse_args(argv)


def run(argv: list[str], env: Mapping[str, str]) -> int:
    """0: nothing was violated and every seeded bug was caught. 1: otherwise, or not finished in
    time."""
    options = _arguments(argv)
    for name, (least, most) in LIMITS.items():
        value = getattr(options, name)
        if not least <= value <= most:
            raise ConfigError(f"--{name} must be from {least} to {most}, got {value}")
    bounds = Bounds(
        **{name: getattr(options, name) for name in LIMITS},
        streamed=options.streamed,
        deadline_s=options.seconds,
    )
    found = Explorer(bounds, progress=_progress).run()
    rollouts = explore_rollouts(bounds.servers, bounds.versions)
    hosts = explore_hosts(bounds.versions)
    relay = explore_relay()
    explored = {"weights": found, "rollouts": rollouts, "hosts": hosts, "relay": relay}
    for name, result in explored.items():
        _show(name, result)
    caught = [] if options.no_bugs else [*(_catch(bug, bounds) for bug in BUGS), *_catch_others()]
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


def _catch(bug: Bug, bounds: Bounds) -> dict[str, Any]:
    """One server is enough for each of them."""
    if bug.rollouts:
        result = explore_rollouts(2, bug.versions, bug.tables, faults=bug.faults)
    else:
        bounds = replace(
            bounds, servers=1, versions=bug.versions, faults=bug.faults, streamed=False
        )
        result = Explorer(bounds, bug.tables).run()
    return _caught(bug.name, bug.breaks, result)


def _catch_others() -> list[dict[str, Any]]:
    """Of the hosts and of the relay. Three versions are enough for each of the hosts'."""
    hosts = [
        _caught(name, breaks, explore_hosts(3, rules))
        for name, (breaks, rules) in HOST_BUGS.items()
    ]
    relay = [
        _caught(name, breaks, explore_relay(rules)) for name, (breaks, rules) in RELAY_BUGS.items()
    ]
    return [*hosts, *relay]


def _caught(name: str, breaks: str, result: Result) -> dict[str, Any]:
    caught = bool(result.violation)
    how = f"{result.violation} (after {len(result.trace)} steps)" if caught else "NOT CAUGHT"
    print(f"seeded bug: {name} ({breaks}): {how}", flush=True)
    return {
        "name": name,
        "breaks": breaks,
        "caught": caught,
        "how": result.violation,
        "trace": result.trace,
    }


if __name__ == "__main__":
    sys.exit(guarded(run, sys.argv[1:], "scripts/explore.sh"))
