#!/usr/bin/env python
"""What an evaluation on a server of its own costs a training step.

    python scripts/bench_evaluation.py [--steps 800] [--every 80] [--seconds 2] [--json PATH]

A real run: one CPU rank with the recipe's tiny model, recorded rollouts, a lane to a server of the
rollouts and one to a server of evaluations. These have no engine: real receivers take the versions,
and a completion takes a set time. As on hosts of their own, servers and the evaluation's process
share no core with the trainer, which has the first one (a machine with one core has no choice).
Every ``--every`` versions an evaluation of about ``--seconds`` begins, so that steps with and
without one take turns in the same run, which neither a busy machine nor a warm one favours. A step
counts as one with an evaluation if any part of it is beside one, its process's start included.

Printed: median step with and without, what of it the trainer waited (for rollouts and weight sync),
and the difference of the medians in percent of a step, with the range that holds 95 of 100 of it
when stretches of steps are drawn again (bootstrap over the stretches between two evaluations).
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Event, Thread

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the checkout, for tests and scripts

from scripts.common import RECIPE, ROOT, keys, options_of, write_json
from tests.e2e.conftest import Replay
from tests.rigs.server_handle import ServerProcess
from titan_grpo.commands.processes import stop_on_signals, torchrun
from titan_grpo.observe import names
from titan_grpo.observe.recorder import read_metrics
from titan_grpo.titan.tiny import write_tiny_model

RUN_S = 1800.0
LIMIT_PERCENT = 2.0
SAMPLES, AT_ONCE, TOKENS, TOKEN_S = 4, 16, 10, 0.05
NICE = 10
"""Of the servers, which have hosts of their own elsewhere."""

WARM_STEPS, LEAST = 10, 3
"""Steps that are left out; evaluations that it takes."""

DRAWS = 1000


@dataclass(frozen=True)
class Step:
    """One step: its seconds, those in which the trainer waited, and whether an evaluation ran."""

    seconds: float
    waited: float
    beside: bool


def job(options: argparse.Namespace, out: Path, server: str) -> Path:
    """The recipe with an evaluation on ``server``."""
    rows = max(1, round(options.seconds * AT_ONCE / (SAMPLES * TOKENS * TOKEN_S)))
    table = f"""
[[evaluation]]
name = "digits"
task = "digits"
servers = ["{server}"]
every = {options.every}
at_end = false
rows = {rows}
samples = {SAMPLES}
concurrent_requests = {AT_ONCE}
max_completion_tokens = {TOKENS}
"""
    path = out / "job.toml"
    path.write_text((ROOT / RECIPE).read_text() + table)
    return path


@contextmanager
def moved(trainer: int, cores: Sequence[int]) -> Iterator[None]:
    """Keep every process of an evaluation under ``trainer`` on ``cores``, soon after its start."""
    over = Event()

    def watch() -> None:
        while not over.wait(0.1):
            with suppress(psutil.NoSuchProcess):
                for process in psutil.Process(trainer).children(recursive=True):
                    with suppress(psutil.NoSuchProcess):
                        if "titan_grpo.rollout.evaluation" in process.cmdline():
                            process.cpu_affinity(list(cores))

    thread = Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(10)


def train(options: argparse.Namespace, out: Path) -> None:
    """One run to its end."""
    model = write_tiny_model("qwen3", out / "model", seed=1)
    replay = Replay(out / "replay.jsonl", 8, 8, 48).write(options.steps)
    first, *others = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, others or [first])  # the servers inherit it
    with ExitStack() as stack:
        args = ("--token-seconds", str(TOKEN_S))
        rollouts, own = (stack.enter_context(ServerProcess(args=args)) for _ in range(2))
        for server in (rollouts, own):
            psutil.Process(server.pid).nice(NICE)
        settings = {
            "job.dump_folder": out / "run",
            "model.hf_assets_path": model,
            "rollout.servers": rollouts.url,
            "training.steps": options.steps,
        }
        arguments = keys(settings) + replay.arguments
        command = ["taskset", "-c", str(first)]
        command += torchrun(1, str(job(options, out, own.url)), arguments)
        log = stack.enter_context((out / "log").open("w+"))
        trainer = stack.enter_context(
            subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT)
        )
        with moved(trainer.pid, others or [first]):
            try:
                status = trainer.wait(RUN_S)
            finally:
                trainer.kill()
    if status:
        raise SystemExit((out / "log").read_text()[-6000:])


def steps_of(run: Path) -> list[list[Step]]:
    """Steps, in stretches that begin where an evaluation does. The step after that in which a
    result came is without one."""
    rows = read_metrics(run / "metrics.jsonl")
    summary = json.loads((run / "summary.json").read_text())
    began = {each["version"] for each in summary["evaluations"]}
    # The recorded completions are no engine's: their gap to the trainer is an alert.
    errors = [error for error in summary["errors"] if not error.startswith("alert ")]
    if errors or len(began) < LEAST:
        raise SystemExit(f"too few evaluations ({len(began)}), or errors: {errors}")
    out: list[list[Step]] = [[]]
    key, beside, newest = f"{names.EVALUATION}/digits/version", False, -1
    for row in rows:
        # A server holds version n at some time in step n + 1, or a later one.
        if row["step"] - 1 in began:
            beside, newest = True, row["step"] - 1
            out.append([])
        waited = row[names.ROLLOUT_WAIT_S] + row[names.BLOCKED_S]
        if row["step"] > WARM_STEPS:
            out[-1].append(Step(row[names.STEP_S], waited, beside))
        # The result of an earlier one may come after the next has begun.
        if row.get(key) == newest:
            beside = False
    return [stretch for stretch in out if len({each.beside for each in stretch}) == 2]


def difference(stretches: Sequence[Sequence[Step]], what: str) -> float:
    """Median with an evaluation minus median without, in percent of the median step without."""

    def median(beside: bool, of: str) -> float:
        steps = [each for stretch in stretches for each in stretch if each.beside == beside]
        return float(statistics.median(getattr(each, of) for each in steps))

    return 100.0 * (median(True, what) - median(False, what)) / median(False, "seconds")


def main() -> int:
    """Train, print; 1 if the trainer's waiting differs by more than the limit."""
    parser = options_of(__doc__)
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument("--every", type=int, default=80, help="versions between two evaluations")
    parser.add_argument("--seconds", type=float, default=2.0, help="of an evaluation")
    options = parser.parse_args()
    stop_on_signals()
    with tempfile.TemporaryDirectory() as scratch:
        train(options, Path(scratch))
        stretches = steps_of(Path(scratch) / "run")
    figures: dict[str, float] = {"stretches": len(stretches)}
    flat = [each for stretch in stretches for each in stretch]
    for beside, name in ((True, "with"), (False, "without")):
        chosen = [each for each in flat if each.beside == beside]
        figures[f"steps_{name}"] = len(chosen)
        figures[f"step_{name}_s"] = statistics.median(each.seconds for each in chosen)
        figures[f"waited_{name}_s"] = statistics.median(each.waited for each in chosen)
    draw = random.Random(0)
    for what in ("seconds", "waited"):
        figures[f"{what}_percent"] = difference(stretches, what)
        again = sorted(
            difference(draw.choices(stretches, k=len(stretches)), what) for _ in range(DRAWS)
        )
        figures[f"{what}_percent_low"], figures[f"{what}_percent_high"] = again[25], again[-26]
    for name, value in figures.items():
        print(f"{name:<22} {value:.4f}")
    write_json(options.json, figures)
    return int(figures["waited_percent"] > LIMIT_PERCENT)


if __name__ == "__main__":
    sys.exit(main())
