#!/usr/bin/env python
"""How long does a real engine stand still for a version, and how much of it is the engine's own
load?

    python scripts/bench_pause.py --engine vllm|sglang [--shape qwen3_0.6b] [--rounds 5] [--json P]

A real server of random weights of that shape gets whole versions over a lane: images, digests,
receiver, commit and read-back are the product's. The pause is split at the points that a lane
passes. ``engine_load_s`` is of a server before it, which is told to load every version by the
engine's own loader (TITAN_GRPO_OWN_LOADER=1); ``load_s`` is the same time of the server that is
measured, which may repeat the copies of its first load. At the end each server's log-probabilities
are compared with those of transformers in float32 on the last version's weights.
"""

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the checkout, for tests and scripts

from scripts.common import (
    DEVICES,
    ENGINES,
    QWEN3_0_6B,
    deliver,
    on_device,
    options_of,
    positive,
    serving,
    spread,
    write_json,
)
from tests.conformance.engine import MAX_DIFFERENCE
from tests.rigs import vllm_unpacked
from tests.rigs.scores import apart, right, said
from tests.rigs.trainer import Trainer, manifest_of
from tests.rigs.watched_sync import WatchedSync
from titan_grpo.config import WeightSync
from titan_grpo.engines.http import ServerAccess
from titan_grpo.observe import names
from titan_grpo.protocol.lane import LaneEvent, Point, no_observer
from titan_grpo.receive.replay import OWN_LOADER
from titan_grpo.sync.lanes import SyncOptions
from titan_grpo.titan.tiny import SHAPE, Kind, TinyShape, write_tiny_model

SHAPES = {"tiny": SHAPE, "qwen3_0.6b": QWEN3_0_6B}
EXPERTS = "experts"
"""A mixture of experts of 9,411 small tensors: what a load costs for each tensor shows."""

ALL_SHAPES = SHAPES | {EXPERTS: TinyShape(layers=24, experts=128, expert_ffn=64)}
STARTUP_S, VERSION_S = 600.0, 300.0
STD = 0.02

MEANING = {
    "pause_s": "from the call that pauses to the answer of the one that resumes",
    "load_s": "the load, as the engine's plugin measures it",
    "stop_s": "the call that pauses (and clears KV where asked)",
    "load_call_s": "the call that loads: load_s, its way there and back, and its report",
    "label_s": "proof that the engine has not restarted, and the label",
    "resume_s": "the call that resumes",
    "memcpy_s": "as many bytes, one thread, memory that is mapped already",
}


def parse(argv: list[str]) -> argparse.Namespace:
    parser = options_of(__doc__)
    parser.add_argument("--engine", choices=ENGINES, required=True)
    parser.add_argument("--shape", choices=sorted(ALL_SHAPES), default="qwen3_0.6b")
    parser.add_argument(
        "--rounds", type=positive, default=5, help="measured ones, after one warm-up"
    )
    unpacked = "vLLM on a CPU: keep weights as they are loaded, as on a GPU (see tests/rigs)"
    parser.add_argument("--unpacked", action="store_true", help=unpacked)
    parser.add_argument("--kv", choices=("keep", "recompute"), default="keep")
    parser.add_argument("--device", choices=DEVICES, default="cpu", help="cuda: on the first GPU")
    options = parser.parse_args(argv)
    if options.unpacked and (options.engine, options.device) != ("vllm", "cpu"):
        parser.error("--unpacked is for vLLM on a CPU")
    return options


class Stopwatch:
    """Keeps when the lane passed each point of each version."""

    def __init__(self) -> None:
        self._at: dict[tuple[int, Point], float] = {}

    def __call__(self, event: LaneEvent, at_s: float) -> None:
        self._at[event.version, event.point] = at_s

    def between(self, version: int, first: Point, last: Point) -> float:
        return self._at[version, last] - self._at[version, first]


def changed(tensors: Mapping[str, torch.Tensor], version: int) -> dict[str, torch.Tensor]:
    """Weights of a version: those of the start with their rows in another order."""
    return {name: t.roll(version, 0).contiguous() for name, t in tensors.items()}


def measure(options: argparse.Namespace, folder: Path, own: bool = False) -> dict[str, Any]:
    """All rounds on one server, and the comparison at the end. ``own``: it loads every version by
    the engine's own loader."""
    kind: Kind = "qwen3_moe" if options.shape == EXPERTS else "qwen3"
    shape = ALL_SHAPES[options.shape]
    model = write_tiny_model(kind, folder / "model", 1, std=STD, dtype="bfloat16", shape=shape)
    start = load_file(model / "model.safetensors")
    config = WeightSync(kv_after_update=options.kv)
    manifest = manifest_of(start, config.block_bytes)
    watch, rounds = Stopwatch(), []
    settings = on_device(options.engine, options.device) | {"max_num_seqs": 8, "cpu_threads": 1}
    settings["env"] = vllm_unpacked.install(folder / f"plugin{own}") if options.unpacked else {}
    settings["env"] |= {OWN_LOADER: "1"} if own else {}
    with serving(options.engine, model, folder / "server.log", STARTUP_S, **settings) as server:
        access = ServerAccess(server.url, VERSION_S)
        sync = SyncOptions(urls=[server.url], engine=options.engine)
        # No point waits for this process: what it took to answer would be part of the pause.
        watched = partial(WatchedSync, watch=no_observer, points=(), note=watch)
        source, target = (torch.ones(manifest.total_bytes, dtype=torch.uint8) for _ in range(2))
        with Trainer(manifest, config, folder / "trace", sync, sync=watched) as trainer:
            trainer.start()
            for version in range(1, options.rounds + 2):
                weights = changed(start, version)
                deliver(trainer, version, weights, VERSION_S)
                began = time.monotonic()
                target.copy_(source)
                rounds.append(
                    {
                        "pause_s": watch.between(version, Point.PAUSE, Point.RESUMED),
                        "load_s": trainer.recorder.series(names.LOAD_S)[-1],
                        "stop_s": watch.between(version, Point.PAUSE, Point.LOAD),
                        "load_call_s": watch.between(version, Point.LOAD, Point.LABEL),
                        "label_s": watch.between(version, Point.LABEL, Point.RESUME),
                        "resume_s": watch.between(version, Point.RESUME, Point.RESUMED),
                        "memcpy_s": time.monotonic() - began,
                    }
                )
                print(f"version {version}: {rounds[-1]['pause_s']:.3f} s paused", flush=True)
        save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
        difference = apart(said(access, options.engine, "last"), right(model))
    return {"rounds": rounds[1:], "total_bytes": manifest.total_bytes, "difference": difference}


def main(argv: list[str]) -> int:
    """Measure, print a table, write the JSON."""
    options = parse(argv)
    with tempfile.TemporaryDirectory() as name:
        own = measure(options, Path(name), own=True)
        found = measure(options, Path(name))
    found |= {"options": vars(options), "own_rounds": own["rounds"]}
    found["difference"] = max(found["difference"], own["difference"])
    median = {key: statistics.median(r[key] for r in found["rounds"]) for key in MEANING}
    loads = [r["load_s"] for r in own["rounds"]]
    median["engine_load_s"] = statistics.median(loads)
    ratio = median["pause_s"] / median["engine_load_s"]
    found |= {"median": median, "pause_over_engine_load": ratio}
    mib = found["total_bytes"] / 2**20
    print(f"\n{options.engine}, {options.shape}, {mib:.0f} MiB; median of {options.rounds} rounds")
    for key, meaning in MEANING.items():
        print(f"{key:14} {spread([r[key] for r in found['rounds']])}  {meaning}")
    print(f"{'engine_load_s':14} {spread(loads)}  the engine's own loader, of the server before")
    print(f"its pauses     {spread([r['pause_s'] for r in own['rounds']])}")
    print(f"pause / engine's load {ratio:.3f}")
    print(f"log-probabilities differ from transformers' by {found['difference']:.4f} at most")
    write_json(options.json, found)
    if not found["difference"] <= MAX_DIFFERENCE:
        print(f"they must agree within {MAX_DIFFERENCE}: the server holds other weights")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
