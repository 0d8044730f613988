#!/usr/bin/env python
"""What does a version cost as an adapter (``lora.sync = "adapter"``), and as merged weights?

    python scripts/bench_lora.py [--shape tiny|qwen3_0.6b] [--rank 8] [--rounds 5]
        [--targets q_proj ...] [--json P]

Two real vLLM servers get the same versions over lanes, one after the other: the first one whole
weights with the adapter added, the second one, which has vLLM's LoRA, the adapters. Images,
digests, receiver, commit and read-back are the product's. After each version the log-probabilities
of both are compared with those of transformers in float32 on base + scale * B A, and with each
other. ``sync_s``: from the call that publishes a version until the server is known to hold it.
"""

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the checkout, for tests and scripts

from scripts.bench_pause import SHAPES
from scripts.common import deliver, options_of, write_json
from tests.rigs.scores import PROMPTS, Scores, said
from tests.rigs.trainer import Trainer, manifest_of
from titan_grpo.commands.processes import engine_python
from titan_grpo.config import LINEAR, WeightSync
from titan_grpo.engines import vllm
from titan_grpo.engines.http import ServerAccess
from titan_grpo.engines.launch import Server, ServerSpec
from titan_grpo.layout.peft import tensor_name
from titan_grpo.observe import names
from titan_grpo.sync.lanes import SyncOptions
from titan_grpo.titan.tiny import write_tiny_model

STARTUP_S, VERSION_S = 600.0, 300.0
STD, SCALE = 0.02, 2.0

Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Versions:
    """The base model in ``folder``, and adapters of it by their number; 0 changes nothing."""

    folder: Path
    rank: int
    targets: tuple[str, ...]

    def adapters(self, version: int) -> dict[str, torch.Tensor]:
        """Under PEFT's names, bfloat16; B has the scale in it."""
        drawn = torch.Generator().manual_seed(version)
        out = {}
        for name, weight in self.base().items():
            layer = name.removesuffix(".weight")
            if layer.rpartition(".")[2] not in self.targets:
                continue
            rows, columns = weight.shape
            a = torch.empty(self.rank, columns).uniform_(-1, 1, generator=drawn) / columns**0.5
            b = torch.randn(rows, self.rank, generator=drawn) * STD * bool(version)
            out[tensor_name(layer, "A")] = a.bfloat16()
            out[tensor_name(layer, "B")] = (SCALE * b).bfloat16()
        return out

    def base(self) -> dict[str, torch.Tensor]:
        """Weights of the frozen model, bfloat16."""
        return load_file(self.folder / "model.safetensors")

    def merged(self, version: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """The base with the adapter added in float64, as titan_grpo.layout.peft does."""
        out, adapters = self.base(), self.adapters(version)
        for name, weight in out.items():
            layer = name.removesuffix(".weight")
            if (a := adapters.get(tensor_name(layer, "A"))) is not None:
                b = adapters[tensor_name(layer, "B")]
                out[name] = (weight.double() + b.double() @ a.double()).to(dtype)
        return {name: tensor.to(dtype) for name, tensor in out.items()}


class Fleet:
    """One server and what sends it versions. A context manager: nothing stays."""

    def __init__(self, versions: Versions, folder: Path, lora: bool) -> None:
        """Start the server; ``lora``: versions are adapters."""
        self.versions, self.lora = versions, lora
        spec = ServerSpec(
            engine_python(vllm.NAME),
            str(versions.folder),
            str(folder / f"server_{lora}.log"),
            max_num_seqs=8,
            lora_rank=versions.rank if lora else 0,
        )
        config = WeightSync()
        self.manifest = manifest_of(self.tensors(0), config.block_bytes)
        self._stack = ExitStack()
        self.server = self._stack.enter_context(Server(spec))
        self.access = ServerAccess(self.server.url, VERSION_S)
        options = SyncOptions(urls=[self.server.url], engine=vllm.NAME)
        self.trainer = self._stack.enter_context(
            Trainer(self.manifest, config, folder / f"trace_{lora}", options)
        )

    def tensors(self, version: int) -> Tensors:
        """What is sent of a version."""
        if self.lora:
            return self.versions.adapters(version)
        return self.versions.merged(version, torch.bfloat16)

    def start(self) -> None:
        """Wait for the server, then start its lane."""
        self.server.wait_healthy(STARTUP_S)
        self.trainer.start()

    def send(self, version: int) -> dict[str, float]:
        weights, began = self.tensors(version), time.monotonic()
        deliver(self.trainer, version, weights, VERSION_S)
        return {
            "bytes": self.manifest.total_bytes,
            "sync_s": time.monotonic() - began,
            "pause_s": self.trainer.recorder.series(names.PAUSE_S)[-1],
        }

    def __enter__(self) -> "Fleet":
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()


def differences(one: Scores, other: Scores) -> list[float]:
    pairs = zip(chain.from_iterable(one), chain.from_iterable(other), strict=True)
    return [abs(a - b) for a, b in pairs]


def expected(versions: Versions, version: int, model: Any) -> Scores:
    """By ``model`` of transformers with that version's merged weights, in float32."""
    _, unknown = model.load_state_dict(versions.merged(version, torch.float32), strict=False)
    assert not unknown, unknown
    out = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        with torch.inference_mode():
            found = model(ids).logits[0, :-1].log_softmax(-1)
        out.append(found.gather(1, ids[0, 1:, None])[:, 0].tolist())
    return out


def main() -> int:
    """Measure, print a table, write the JSON."""
    parser = options_of(__doc__)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="qwen3_0.6b")
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5, help="measured ones, after one warm-up")
    parser.add_argument("--targets", nargs="+", choices=LINEAR, default=list(LINEAR))
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shape = SHAPES[options.shape]
        model = write_tiny_model(
            "qwen3", folder / "model", 1, std=STD, dtype="bfloat16", shape=shape
        )
        versions = Versions(model, options.rank, tuple(options.targets))
        apart: dict[str, list[float]] = {"merged": [], "adapter": [], "both": [], "moved": []}
        costs: dict[str, list[dict[str, float]]] = {"merged": [], "adapter": []}
        reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
        before = expected(versions, 0, reference)
        with Fleet(versions, folder, False) as whole, Fleet(versions, folder, True) as small:
            fleets = {"merged": whole, "adapter": small}
            for fleet in fleets.values():
                fleet.start()
            for version in range(1, options.rounds + 2):
                wanted, got = expected(versions, version, reference), {}
                for kind, fleet in fleets.items():
                    costs[kind].append(fleet.send(version))
                    got[kind] = said(fleet.access, vllm.NAME, f"{version}")
                    apart[kind] += differences(got[kind], wanted)
                    print(kind, version, costs[kind][-1], max(apart[kind]), flush=True)
                apart["both"] += differences(*got.values())
                apart["moved"] += differences(wanted, before)
    return report(options, costs["merged"][1:], costs["adapter"][1:], apart)


def report(
    options: argparse.Namespace,
    merged: list[dict[str, float]],
    adapter: list[dict[str, float]],
    apart: Mapping[str, list[float]],
) -> int:
    """Print the figures; 1 if a server did not hold what was sent."""
    out: dict[str, Any] = {"options": vars(options)}
    for key in ("bytes", "sync_s", "pause_s"):
        whole, small = (statistics.median(r[key] for r in rounds) for rounds in (merged, adapter))
        out[key] = {"merged": whole, "adapter": small, "ratio": small / whole}
        print(f"{key:8} merged {whole:.4g}, adapter {small:.4g}, ratio {small / whole:.4f}")
    for key, values in apart.items():
        out[key] = {"mean": statistics.fmean(values), "max": max(values)}
        print(f"{key:8} apart by {statistics.fmean(values):.5f} nats on average, {max(values):.5f}")
    write_json(options.json, out)
    return int(max(out["merged"]["max"], out["adapter"]["max"]) > 0.05)


if __name__ == "__main__":
    sys.exit(main())
