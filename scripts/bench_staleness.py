#!/usr/bin/env python
"""Does bounded staleness cost reward? The quickstart's task, trained with bounds 0 (on-policy), 1,
2, 4, and 4 uncorrected.

    python scripts/bench_staleness.py [--seeds 3] [--steps 20] [--engine vllm|sglang] [--out DIR]
    [--json PATH]

One real server and two CPU ranks for all runs; a run starts from the same weights and publishes
them first. Each batch is four optimizer steps at a high learning rate, so that the policy has moved
far from the one that sampled. Printed per bound, as means over the seeds: the final reward (of a
run's last five steps), its share of the on-policy one, the reward over the whole run, and the
staleness that the consumed groups really had. The toy is learnt in the end with or without a
correction; what is lost without one is the way there, so the reward over the whole run is what
counts.
"""

import argparse
import os
import statistics
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the checkout, for scripts

from scripts.common import ENGINES, RECIPE, Table, keys, options_of, serving, write_json
from titan_grpo.commands.processes import run_logged, torchrun
from titan_grpo.observe import names
from titan_grpo.observe.recorder import read_metrics
from titan_grpo.runkey import Key, with_run_key
from titan_grpo.titan.tiny import write_tiny_model

LAST = 5
FAR = ("--optimizer.lr", "1e-2", "--grpo.num_microbatches", "4")
UNCORRECTED = ("--grpo.rollout_is_threshold", "0", "--grpo.allow_uncorrected_off_policy")


@dataclass(frozen=True)
class Setting:
    """One line of the table."""

    bound: int
    corrected: bool = True

    @property
    def name(self) -> str:
        return f"{self.bound}" + ("" if self.corrected else " uncorrected")


SETTINGS = (Setting(0), Setting(1), Setting(2), Setting(4), Setting(4, False))


@dataclass(frozen=True)
class Outcome:
    """One run: mean reward of the last steps and of all, mean staleness of the consumed groups."""

    setting: str
    seed: int
    final: float
    overall: float
    staleness: float


def train(
    setting: Setting, seed: int, url: str, options: argparse.Namespace, env: Mapping[str, str]
) -> Outcome:
    """One run to its end."""
    out = Path(options.out) / f"bound{setting.name.replace(' ', '-')}-seed{seed}"
    values = {
        "rollout.servers": url,
        "rollout.seed": seed,
        "rollout.max_staleness": setting.bound,
        "job.dump_folder": out,
        "model.hf_assets_path": Path(options.out) / "model",
        "training.steps": options.steps,
        "debug.seed": seed,
    }
    mode = "async-weight-update" if setting.bound else "no-async-weight-update"
    arguments = [*keys(values), f"--grpo.{mode}", *FAR]
    arguments += () if setting.corrected else UNCORRECTED
    run_logged(torchrun(2, RECIPE, arguments), out / "train.log", env, None)
    rows = list(read_metrics(out / "metrics.jsonl"))
    rewards = [row[names.REWARD] for row in rows]
    staleness = statistics.mean(row[names.STALENESS] for row in rows)
    return Outcome(
        setting.name, seed, statistics.mean(rewards[-LAST:]), statistics.mean(rewards), staleness
    )


def report(found: list[Outcome]) -> int:
    """Print the table; 1 if a corrected bound ends more than 2 % below on-policy, or the correction
    makes no difference."""
    table = Table(text=13)
    final, overall = {}, {}
    for name in (s.name for s in SETTINGS):
        runs = [run for run in found if run.setting == name]
        final[name], overall[name], staleness = (
            statistics.mean(getattr(run, column) for run in runs)
            for column in ("final", "overall", "staleness")
        )
        row = {"bound": name, "final": final[name], "whole run": overall[name]}
        table.add(row | {"of on-policy": final[name] / final["0"], "staleness": staleness})
    corrected, uncorrected = (overall[Setting(4, by).name] for by in (True, False))
    print(f"uncorrected at 4: {uncorrected / corrected - 1:+.1%} reward over the whole run")
    lost = any(final[s.name] < 0.98 * final["0"] for s in SETTINGS if s.corrected)
    return int(lost or uncorrected >= corrected)


def main() -> int:
    """Run all settings; see ``report`` for the exit code."""
    parser = options_of(__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--engine", choices=ENGINES, default="vllm")
    parser.add_argument("--out", default="outputs/bench_staleness")
    options = parser.parse_args()
    out, key = Path(options.out), Key.generate()
    write_tiny_model("qwen3", out / "model", seed=1)
    write_tiny_model("qwen3", out / "server_model", seed=2)
    env = {**with_run_key(os.environ, key), "OMP_NUM_THREADS": "1"}
    found: list[Outcome] = []
    model, log = out / "server_model", out / "server.log"
    with serving(options.engine, model, log, run_key=key) as server:
        for seed in range(options.seeds):
            for setting in SETTINGS:
                found.append(train(setting, seed, server.url, options, env))
                print(found[-1], flush=True)
    write_json(options.json, [asdict(run) for run in found])
    return report(found)


if __name__ == "__main__":
    sys.exit(main())
