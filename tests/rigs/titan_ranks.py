"""Ranks that train without rollouts, on the torchtitan and the torch of an environment."""

import json
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.rigs.ranks import ROOT, run_ranks
from tests.rigs.sockets import free_port
from titan_grpo.titan.flavors import FLAVORS
from titan_grpo.titan.tiny import Kind, write_tiny_model

SCRIPT = ROOT / "tests/titan/pipeline_rank.py"
EXACT = "--weight_sync.wire_dtype=float32 --optimizer.eps=1e-2 --grpo.token_budget=128"
"""A larger eps: where a gradient is nearly zero, Adam's first steps follow its sign, which rounding
decides."""

Run = tuple[str, int, int, str]
"""(name, ranks, steps, arguments)."""


def trained(
    folder: Path, *runs: Run, kind: Kind = "llama3", python: str = sys.executable
) -> dict[str, dict[str, Any]]:
    """What rank 0 of each run says (pipeline_rank.py), by name; all runs at once, each in the
    folder of its name, from the checkpoint there if there is one."""
    model = write_tiny_model(kind, folder / "model", seed=1)
    name, flavor = FLAVORS[kind]
    words: list[str] = []
    for place, ranks, steps, more in runs:
        given = {"name": name, "flavor": flavor, "hf_assets_path": model}
        options = [f"--model.{key}={value}" for key, value in given.items()]
        options += [f"--job.dump_folder={folder / place}", *shlex.split(f"{EXACT} {more}")]
        arguments = shlex.join(options)
        words += [str(folder / place), str(free_port()), str(ranks), str(steps), arguments]
    count = sum(ranks for _, ranks, _, _ in runs)
    outputs = run_ranks(SCRIPT, count, *words, python=python)
    lines = (line for out in outputs for line in out.splitlines() if line.startswith('{"said'))
    return dict(zip([place for place, *_ in runs], map(json.loads, lines), strict=True))


def assert_alike(one: dict[str, Any], other: dict[str, Any]) -> None:
    """Same losses, norms and metrics, and the same weights."""
    for ours, theirs in zip(one["said"], other["said"], strict=True):
        assert ours["values"].keys() == theirs["values"].keys()
        assert ours["values"] == pytest.approx(theirs["values"], rel=2e-4, abs=2e-6)
        # Micro-batches differ, so their first ones have some sequences in common.
        shown = ours["shown"].keys() & theirs["shown"].keys()
        assert shown
        for ids in shown:
            pairs = zip(ours["shown"][ids], theirs["shown"][ids], strict=True)
            assert all(a == b or abs(a - b) < 2e-4 for a, b in pairs)
    weights, others = (load_file(Path(run["out"]) / "model.safetensors") for run in (one, other))
    assert weights.keys() == others.keys()
    for name, weight in weights.items():
        torch.testing.assert_close(weight, others[name], rtol=0, atol=2e-6)
