#!/usr/bin/env python
"""How long does a real engine stand still for a version, and how much of it is the engine's own
load?

    python scripts/bench_pause.py --engine vllm|sglang [--shape qwen3_0.6b] [--rounds 5] [--json P]

A real server of random weights of that shape gets whole versions over a lane: images, digests,
receiver, commit and read-back are the product's. ``engine_load_s`` is what the plugin measures
around the engine's own loader; the rest of the pause is split at the points that a lane passes.
With ``--alone`` (vLLM) the same tensors are also loaded by vLLM's own reload in a process without
a server. At the end the server's log-probabilities are compared with those of
transformers in float32 on the last version's weights.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the checkout, for tests and scripts

from tests.conformance.crowd import prompt
from tests.conformance.engine import MAX_DIFFERENCE, furthest
from tests.conformance.reference import Reference
from tests.rigs.trainer import Trainer
from tests.rigs.watched_sync import WatchedSync
from titan_grpo.config import WeightSync
from titan_grpo.engines.http import ServerAccess
from titan_grpo.engines.launch import Server, ServerSpec
from titan_grpo.engines.server import dialect
from titan_grpo.layout.manifest import Manifest
from titan_grpo.observe import names
from titan_grpo.protocol.lane_events import LaneEvent, Point
from titan_grpo.sync.lanes import SyncOptions
from titan_grpo.titan.tiny import QWEN3_0_6B, SHAPE, write_tiny_model

ROOT = Path(__file__).resolve().parents[1]
SHAPES = {"tiny": SHAPE, "qwen3_0.6b": QWEN3_0_6B}
STARTUP_S, VERSION_S = 600.0, 300.0
STD = 0.02

MEANING = {
    "pause_s": "from the call that pauses to the answer of the one that resumes",
    "engine_load_s": "the engine's own loader, as its plugin measures it",
    "stop_s": "the call that pauses (and clears KV where asked)",
    "load_call_s": "the call that loads: engine_load_s, its way there and back, and its report",
    "label_s": "proof that the engine has not restarted, and the label",
    "resume_s": "the call that resumes",
    "memcpy_s": "as many bytes, one thread, memory that is mapped already",
}

ALONE = """
import sys, time, torch
from safetensors.torch import load_file
from vllm import LLM
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload, initialize_layerwise_reload
)

def timed(model):
    seconds = []
    for _ in range(int(sys.argv[2]) + 1):
        start = time.monotonic()
        with torch.no_grad():
            initialize_layerwise_reload(model)
            model.load_weights(iter(tensors.items()))
            finalize_layerwise_reload(model, llm.llm_engine.model_config)
        seconds.append(time.monotonic() - start)
    return seconds[1:]

tensors = load_file(sys.argv[1] + "/model.safetensors")
llm = LLM(sys.argv[1], dtype="bfloat16", enforce_eager=True, max_model_len=256)
print("ALONE", *llm.apply_model(timed)[0])
"""
"""Run by vLLM's interpreter: seconds of its reload of all weights, after one that is not counted.
(The bare load_weights cannot load twice on a CPU: the first load packs the matrices.)"""


@dataclass(frozen=True)
class Options:
    """What to measure."""

    engine: str
    shape: str
    rounds: int
    alone: bool
    threads: int
    kv: str
    json: str


def parse(argv: list[str]) -> Options:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--engine", choices=("vllm", "sglang"), required=True)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="qwen3_0.6b")
    parser.add_argument("--rounds", type=int, default=5, help="measured ones, after one warm-up")
    parser.add_argument(
        "--alone", action="store_true", help="vLLM: its own reload, without a server"
    )
    parser.add_argument("--threads", type=int, default=1, help="of the server")
    parser.add_argument("--kv", choices=("keep", "recompute"), default="keep")
    parser.add_argument("--json", default="", metavar="PATH")
    options = parser.parse_args(argv)
    if options.alone and options.engine != "vllm":
        parser.error(
            "--alone is for --engine vllm: nothing loads SGLang's model without its server"
        )
    return Options(**vars(options))


class Stopwatch:
    """Notes when the lane passed each point of each version."""

    def __init__(self) -> None:
        self._at: dict[tuple[int, Point], float] = {}

    def __call__(self, event: LaneEvent) -> None:
        self._at[event.version, event.point] = time.monotonic()

    def between(self, version: int, first: Point, last: Point) -> float:
        """Seconds."""
        return self._at[version, last] - self._at[version, first]


def changed(tensors: Mapping[str, torch.Tensor], version: int) -> dict[str, torch.Tensor]:
    """Weights of a version: those of the start with their rows in another order."""
    return {name: t.roll(version, 0).contiguous() for name, t in tensors.items()}


def measure(options: Options, folder: Path) -> dict[str, Any]:
    """All rounds on one server, and the comparison at the end."""
    model = write_tiny_model(
        "qwen3", folder / "model", 1, std=STD, dtype="bfloat16", shape=SHAPES[options.shape]
    )
    start = load_file(model / "model.safetensors")
    config = WeightSync(kv_after_update=options.kv)  # type: ignore[arg-type]
    manifest = Manifest.build(
        [(n, "bfloat16", tuple(t.shape)) for n, t in start.items()], config.block_bytes
    )
    spec = ServerSpec(
        str(ROOT / f".venv-{options.engine}" / "bin" / "python"),
        str(model),
        str(folder / "server.log"),
        options.engine,
        max_num_seqs=8,
        cpu_threads=options.threads,
    )
    watch, rounds = Stopwatch(), []
    with Server(spec) as server:
        began = time.monotonic()
        server.wait_healthy(STARTUP_S)
        print(f"{options.engine} is up after {time.monotonic() - began:.0f} s", flush=True)
        access = ServerAccess(server.url, VERSION_S)
        sync = SyncOptions(
            urls=[server.url],
            engine=options.engine,
        )
        watched = partial(WatchedSync, watch=watch)
        source, target = (torch.ones(manifest.total_bytes, dtype=torch.uint8) for _ in range(2))
        with Trainer(manifest, config, folder / "trace", sync, sync=watched) as trainer:
            trainer.start()
            for version in range(1, options.rounds + 2):
                weights = changed(start, version)
                if not trainer.publish(version, weights, VERSION_S):
                    raise SystemExit(f"no slot was free for version {version}: the lane hangs")
                if not trainer.servers.wait_held(version, VERSION_S, everyone=True):
                    raise SystemExit(
                        f"version {version} must be committed within {VERSION_S:g} s, it was not:"
                        f" {trainer.servers.take_error()}; see {spec.log_path}"
                    )
                began = time.monotonic()
                target.copy_(source)
                rounds.append(
                    {
                        "pause_s": watch.between(version, Point.PAUSE, Point.RESUMED),
                        "engine_load_s": trainer.recorder.series(names.LOAD_S)[-1],
                        "stop_s": watch.between(version, Point.PAUSE, Point.LOAD),
                        "load_call_s": watch.between(version, Point.LOAD, Point.LABEL),
                        "label_s": watch.between(version, Point.LABEL, Point.RESUME),
                        "resume_s": watch.between(version, Point.RESUME, Point.RESUMED),
                        "memcpy_s": time.monotonic() - began,
                    }
                )
                print(f"version {version}: {rounds[-1]['pause_s']:.3f} s paused", flush=True)
        save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
        difference = disagreement(options.engine, access, model)
    return {"rounds": rounds[1:], "total_bytes": manifest.total_bytes, "difference": difference}


def disagreement(engine: str, access: ServerAccess, model: Path) -> float:
    """The largest difference to transformers of a token's log-probability, over four prompts, in
    nats."""
    reference, worst = Reference(model), 0.0
    with access.driver() as driver:
        for seed in range(1, 5):
            ids = prompt(seed)
            scores = driver.run(dialect(engine).score(ids, VERSION_S, f"last {seed}"))
            worst = max(worst, furthest(scores, reference.logprobs(ids)))
    return worst


def loads_alone(options: Options, folder: Path) -> list[float]:
    """Seconds of vLLM's own reload."""
    python = str(ROOT / ".venv-vllm" / "bin" / "python")
    # In one process: the tensors reach the model without a copy.
    env = os.environ | {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "OMP_NUM_THREADS": str(options.threads),
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
    }
    done = subprocess.run(
        [python, "-c", ALONE, str(folder / "model"), str(options.rounds)],
        capture_output=True,
        text=True,
        env=env,
        timeout=STARTUP_S,
        check=False,
    )
    for line in done.stdout.splitlines():
        if line.startswith("ALONE "):
            return [float(value) for value in line.split()[1:]]
    raise SystemExit(f"vLLM could not load the model by itself:\n{done.stderr[-2000:]}")


def main() -> int:
    """Measure, print a table, write the JSON."""
    options = parse(sys.argv[1:])
    with tempfile.TemporaryDirectory() as name:
        found = measure(options, Path(name))
        alone = loads_alone(options, Path(name)) if options.alone else []
    median = {key: statistics.median(r[key] for r in found["rounds"]) for key in MEANING}
    ratio = median["pause_s"] / median["engine_load_s"]
    found |= {"options": vars(options), "median": median, "pause_over_engine_load": ratio}
    mib = found["total_bytes"] / 2**20
    print(f"\n{options.engine}, {options.shape}, {mib:.0f} MiB; median of {options.rounds} rounds")
    for key, meaning in MEANING.items():
        values = [r[key] for r in found["rounds"]]
        print(f"{key:14} {median[key]:8.4f}  [{min(values):.4f} .. {max(values):.4f}]  {meaning}")
    print(f"pause / engine's load {ratio:.3f}")
    if alone:
        own = statistics.median(alone)
        found |= {"alone_s": alone, "pause_over_alone": median["pause_s"] / own}
        print(
            f"vLLM's reload without a server {own:.4f} [{min(alone):.4f} .. {max(alone):.4f}];"
            f" pause / it {found['pause_over_alone']:.3f}"
        )
    print(f"log-probabilities differ from transformers' by {found['difference']:.4f} at most")
    if options.json:
        Path(options.json).write_text(json.dumps(found, indent=1) + "\n")
    if not found["difference"] <= MAX_DIFFERENCE:
        print(f"they must agree within {MAX_DIFFERENCE}: the server holds other weights")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
