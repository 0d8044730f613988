"""A model cut into pipeline stages trains like a whole one, and each rank publishes its stage."""

import json
import shlex
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.rigs.ranks import run_ranks
from tests.rigs.sockets import free_port
from titan_grpo.titan.flavors import FLAVORS
from titan_grpo.titan.tiny import write_tiny_model

pytestmark = pytest.mark.e2e

SCRIPT = Path(__file__).with_name("pipeline_rank.py")
TWO_STAGES = "--parallelism.pipeline_parallel_degree=2"
EXACT = "--weight_sync.wire_dtype=float32 --optimizer.eps=1e-2 --grpo.token_budget=128"
"""A larger eps: where a gradient is nearly zero, Adam's first steps follow its sign, which rounding
decides."""


@pytest.fixture
def trained(tmp_path):
    """``trained((name, ranks, steps, arguments), ...)``: what rank 0 of each run says, by name;
    all runs at once, each in the folder of its name."""

    def run(*runs: tuple[str, int, int, str], kind: str = "llama3") -> dict[str, dict]:
        model = write_tiny_model(kind, tmp_path / "model", seed=1)
        name, flavor = FLAVORS[kind]
        words: list[str] = []
        for folder, ranks, steps, more in runs:
            given = {"name": name, "flavor": flavor, "hf_assets_path": model}
            options = [f"--model.{key}={value}" for key, value in given.items()]
            options += [f"--job.dump_folder={tmp_path / folder}", *shlex.split(f"{EXACT} {more}")]
            arguments = shlex.join(options)
            words += [str(tmp_path / folder), str(free_port()), str(ranks), str(steps), arguments]
        outputs = run_ranks(SCRIPT, sum(ranks for _, ranks, _, _ in runs), *words)
        lines = (line for out in outputs for line in out.splitlines() if line.startswith('{"said'))
        names = [folder for folder, *_ in runs]
        return dict(zip(names, map(json.loads, lines), strict=True))

    return run


def assert_alike(one: dict, other: dict) -> None:
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
    for name, weight in weights.items():
        torch.testing.assert_close(weight, others[name], rtol=0, atol=2e-6)


def test_two_stages_train_like_one_rank(trained) -> None:
    found = trained(("whole", 1, 3, ""), ("stages", 2, 3, TWO_STAGES))
    assert_alike(found["stages"], found["whole"])
    assert found["stages"]["same_as_export"]
    assert all(found["stages"]["writing"]), "each rank publishes its own stage"
