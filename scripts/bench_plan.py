#!/usr/bin/env python
"""The planner's figures beside those of a real run: servers without an engine, behind one limited
link.

    python scripts/bench_plan.py [--servers 8] [--mib 8] [--rate-mbit 200] [--step 4]
    [--versions 12] [--delta off|on|auto] [--json PATH]

Needs root: it runs in a network namespace of its own, whose loopback tc limits (tbf), so every byte
that the servers fetch leaves the trainer over one link of that rate. Trainer, lanes, source, and
one receiver process per server are real; the trainer's step is a wait, and there are no groups.
Then the planner simulates the same: as many servers, bytes, link and step.
"""

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the checkout, for tests and scripts

from scripts.common import options_of, write_json
from tests.rigs.receiver_server import DirectControl, ReceiverServer
from tests.rigs.trainer import Trainer
from titan_grpo.config import WeightSync
from titan_grpo.layout.manifest import Manifest
from titan_grpo.observe import names
from titan_grpo.plan.setup import Setup
from titan_grpo.plan.simulation import Simulation, quantile
from titan_grpo.sync.lanes import SyncOptions

INSIDE = "TITAN_GRPO_BENCH_PLAN_INSIDE"
WAIT_S = 300.0
COLUMNS = 1024
FRAMES = 1514 / 1448
"""Bytes on the link for one of the payload: headers of Ethernet, IP and TCP at an MTU of 1500."""


def parse(argv: list[str]) -> argparse.Namespace:
    out = options_of(__doc__)
    out.add_argument("--servers", type=int, default=8)
    out.add_argument("--mib", type=int, default=8, help="bytes of a version, in MiB")
    out.add_argument("--rate-mbit", type=float, default=200.0, help="of the trainer's link")
    out.add_argument("--step", type=float, default=4.0, help="between two versions, in seconds")
    out.add_argument("--versions", type=int, default=12, help="that count")
    out.add_argument(
        "--delta", choices=("auto", "on", "off"), default="off",
        help="weight_sync.delta of both runs",
    )  # fmt: skip
    return out.parse_args(argv)


def limit_link(rate_mbit: float) -> None:
    """The namespace's loopback at that rate, with frames as on Ethernet."""
    rate = f"{rate_mbit:g}mbit"
    for command in (
        ["ip", "link", "set", "lo", "mtu", "1500", "up"],
        ["tc", "qdisc", "add", "dev", "lo", "root", "tbf", "rate", rate, "burst", "128kb",
         "limit", "4mb"],
    ):  # fmt: skip
        subprocess.run(command, check=True, timeout=30)


def sync_config(delta: Literal["auto", "on", "off"] = "off") -> WeightSync:
    # Servers on the trainer's host have no part in relays: the trainer sends to each of them.
    return WeightSync(
        relay=False,
        block_bytes=1 << 20, bucket_bytes=1 << 20, bind_host="127.0.0.1", connect_deadline_s=300.0,
        delta=delta,
    )  # fmt: skip


def measured(options: argparse.Namespace, folder: str) -> dict[str, Any]:
    """The real run: seconds of each fetch and of each commit since its publish, and lags."""
    torch.set_num_threads(1)
    rows = (options.mib << 20) // (2 * COLUMNS)
    manifest = Manifest.build([("w", "bfloat16", (rows, COLUMNS))], 1 << 20)
    weights = {"w": torch.randn(rows, COLUMNS) * 0.02}
    lags: list[int] = []
    published = 0
    with ExitStack() as stack:
        servers = {}
        for n in range(options.servers):
            server = stack.enter_context(ReceiverServer(f"http://127.0.0.1/server{n}"))
            servers[server.url] = server
        sync = SyncOptions(
            urls=list(servers),
            make_control=lambda url: DirectControl(servers[url]),
            # Not by their memory: the servers shall fetch over the link.
            tamper=tuple,
        )
        trainer = stack.enter_context(
            Trainer(manifest, sync_config(options.delta), Path(folder), sync)
        )
        trainer.start()
        trainer.publish(0, weights, WAIT_S)
        held = trainer.servers.versions
        if not trainer.servers.wait(lambda: None not in held().values(), WAIT_S):
            raise SystemExit(f"a server did not start: {trainer.servers.text()}")
        before = {key: len(trainer.recorder.series(key)) for key in (names.SEND_S, names.SYNC_S)}
        first = trainer.recorder.history().totals
        due = time.monotonic()
        for version in range(1, options.versions + 1):
            weights["w"] -= 1e-6 * torch.randn(rows, COLUMNS).sign()  # AdamW's longest step
            published += trainer.publish(version, weights)
            due += options.step
            time.sleep(max(0.0, due - time.monotonic()))
            lags += [max(0, version - own) for own in held().values() if own is not None]
            figures = {key: trainer.recorder.series(key)[count:] for key, count in before.items()}
        totals = trainer.recorder.history().totals
        read, spared = (totals[n] - first[n] for n in (names.SYNC_BYTES, names.SPARED_BYTES))
        error = trainer.servers.take_error()
        if error is not None:
            raise SystemExit(f"a lane failed: {error}")
    return {
        "fetch_s": figures[names.SEND_S],
        "commit_s": figures[names.SYNC_S],
        "lags": lags,
        "skipped": options.versions - published,
        "published": published,
        "patch_share": read / max(1.0, read + spared),
    }


def planned(options: argparse.Namespace, patch_share: float) -> dict[str, Any]:
    """The planner's run of the same, with patches of the measured size."""
    setup = Setup(
        parameters=(options.mib << 20) // 2,
        servers=options.servers,
        trainer_hosts=1,
        trainer_gpus=1,
        trainer_link_gbit=options.rate_mbit / 1000 / FRAMES,
        step_s=options.step,
        group_s=options.step / 4,
        max_staleness=1_000_000,
        in_flight=1,
        groups=1,
        hours=100 * options.step / 3600,
        patch_share=patch_share,
        sync=sync_config(options.delta),
    )
    result = Simulation(setup).run()
    return {
        "fetch_s": result.send_s,
        "commit_s": result.commit_s,
        "lags": result.lags,
        "skipped": result.skipped,
        "published": result.published,
        "steps": result.steps,
    }


def compare(options: argparse.Namespace, real: dict[str, Any], plan: dict[str, Any]) -> int:
    """Print both; 0 where each median is within 25 %."""
    out: dict[str, Any] = {"options": vars(options), "measured": real, "planned": plan}
    rows = {
        "fetch_s": (statistics.median(real["fetch_s"]), quantile(plan["fetch_s"], 0.5)),
        "publish_to_commit_s": (
            statistics.median(real["commit_s"]),
            quantile(plan["commit_s"], 0.5),
        ),
        "commits_per_server_and_step": (
            len(real["commit_s"]) / options.servers / options.versions,
            len(plan["commit_s"]) / options.servers / plan["steps"],
        ),
    }
    out["median"] = rows
    ok = True
    print(f"{options.servers} servers, {options.mib} MiB, {options.rate_mbit:g} Mbit/s, a version"
          f" each {options.step:g} s")  # fmt: skip
    for name, (one, other) in rows.items():
        off = other / one - 1
        ok &= abs(off) <= 0.25
        print(f"{name:30} measured {one:8.3f}  planned {other:8.3f}  ({off:+.0%})")
    lags = [statistics.fmean(x["lags"]) for x in (real, plan)]
    print(f"{'lag, mean':30} measured {lags[0]:8.3f}  planned {lags[1]:8.3f}")
    skips = real["skipped"] / options.versions, plan["skipped"] / plan["steps"]
    print(f"{'share of versions skipped':30} measured {skips[0]:8.3f}  planned {skips[1]:8.3f}")
    out |= {"lag_mean": lags, "skipped_share": skips, "within_25_percent": ok}
    write_json(options.json, out)
    return 0 if ok else 1


def main(argv: list[str]) -> int:
    """0: within 25 %; 1: not; 2: it cannot run here."""
    options = parse(argv)
    if INSIDE in os.environ:
        limit_link(options.rate_mbit)
        with tempfile.TemporaryDirectory() as folder:
            real = measured(options, folder)
        return compare(options, real, planned(options, real["patch_share"]))
    if os.geteuid() != 0 or not all(map(shutil.which, ("ip", "tc", "unshare"))):
        print("bench_plan needs root, ip, tc and unshare: it limits a link", file=sys.stderr)
        return 2
    command = ["unshare", "--net", sys.executable, __file__, *argv]
    return subprocess.run(command, env={**os.environ, INSIDE: "1"}, timeout=900).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
