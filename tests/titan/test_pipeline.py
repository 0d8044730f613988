"""A model cut into pipeline stages trains like a whole one, and each rank publishes its stage. So
do batches and models in other forms together, on both torchtitans."""

import json
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.rigs.ranks import run_ranks
from tests.rigs.sockets import free_port
from titan_grpo.titan.flavors import FLAVORS
from titan_grpo.titan.tiny import Kind, write_tiny_model

pytestmark = pytest.mark.e2e

SCRIPT = Path(__file__).with_name("pipeline_rank.py")
TWO_STAGES = "--parallelism.pipeline_parallel_degree=2"
EXACT = "--weight_sync.wire_dtype=float32 --optimizer.eps=1e-2 --grpo.token_budget=128"
"""A larger eps: where a gradient is nearly zero, Adam's first steps follow its sign, which rounding
decides."""


Trained = Callable[..., dict[str, dict[str, Any]]]


@pytest.fixture
def trained(tmp_path: Path) -> Trained:
    """``trained((name, ranks, steps, arguments), ...)``: what rank 0 of each run says, by name;
    all runs at once, each in the folder of its name."""

    def run(
        *runs: tuple[str, int, int, str], kind: Kind = "llama3", python: str = sys.executable
    ) -> dict[str, dict[str, Any]]:
        model = write_tiny_model(kind, tmp_path / "model", seed=1)
        name, flavor = FLAVORS[kind]
        words: list[str] = []
        for folder, ranks, steps, more in runs:
            given = {"name": name, "flavor": flavor, "hf_assets_path": model}
            options = [f"--model.{key}={value}" for key, value in given.items()]
            options += [f"--job.dump_folder={tmp_path / folder}", *shlex.split(f"{EXACT} {more}")]
            arguments = shlex.join(options)
            words += [str(tmp_path / folder), str(free_port()), str(ranks), str(steps), arguments]
        count = sum(ranks for _, ranks, _, _ in runs)
        outputs = run_ranks(SCRIPT, count, *words, python=python)
        lines = (line for out in outputs for line in out.splitlines() if line.startswith('{"said'))
        names = [folder for folder, *_ in runs]
        return dict(zip(names, map(json.loads, lines), strict=True))

    return run


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
    for name, weight in weights.items():
        torch.testing.assert_close(weight, others[name], rtol=0, atol=2e-6)


def test_two_stages_train_like_one_rank(trained: Trained) -> None:
    found = trained(("whole", 1, 3, ""), ("stages", 2, 3, TWO_STAGES))
    assert_alike(found["stages"], found["whole"])
    assert found["stages"]["same_as_export"]
    assert all(found["stages"]["writing"]), "each rank publishes its own stage"


EVERYTHING = (
    "--grpo.kl_beta=0.05 --grpo.ref_model_ema=0.9 --grpo.num_microbatches=2 --grpo.fp32_lm_head"
    " --grpo.entropy_loss_weight=0.01 --grpo.top_entropy_share=0.5"
)
"""What needs the policy before the step, a reference or the whole distribution."""


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "ranks", "sharding", "terms"),
    [
        ("qwen3_untied", 4, "", EVERYTHING),
        ("qwen3_moe", 2, "", ""),
        ("qwen3_moe", 4, "expert_parallel_degree=2", ""),
        ("llama3", 2, "pipeline_parallel_schedule=Interleaved1F1B", ""),
        ("llama3", 2, "pipeline_parallel_schedule=GPipe", ""),
        ("llama3", 2, "pipeline_parallel_schedule=LoopedBFS", ""),
        ("llama3", 2, "pipeline_parallel_schedule=InterleavedZeroBubble", ""),
        ("llama3", 4, "tensor_parallel_degree=2", "--grpo.m2_threshold=0.01"),
    ],
    ids=[
        *("FSDP and every term", "MoE", "EP"),
        *("Interleaved1F1B", "GPipe", "LoopedBFS", "InterleavedZeroBubble", "TP"),
    ],
)
def test_stages_beside_other_ways_of_sharding_train_like_one_rank(
    trained: Trained, kind: Kind, ranks: int, sharding: str, terms: str
) -> None:
    more = f"{TWO_STAGES} {terms} {sharding and '--parallelism.' + sharding}"
    found = trained(("whole", 1, 3, terms), ("stages", ranks, 3, more), kind=kind)
    assert_alike(found["stages"], found["whole"])
    assert found["stages"]["same_as_export"]
    assert all(found["stages"]["writing"])


@pytest.mark.long
def test_a_run_of_stages_that_stopped_goes_on_bit_for_bit(trained: Trained) -> None:
    straight = trained(("straight", 2, 4, TWO_STAGES), ("halves", 2, 2, TWO_STAGES))["straight"]
    halves = trained(("halves", 2, 4, TWO_STAGES))["halves"]
    assert halves["said"] == straight["said"][2:]
    assert halves["digest"] == straight["digest"]


REPLAY, LORA, PACKED = "--grpo.router_replay", "--lora.rank=4", "--grpo.pack_sequences"
TOGETHER = {
    "replay, EP": ("qwen3_moe", REPLAY, "--parallelism.expert_parallel_degree=2"),
    "replay, packed": ("qwen3_moe", REPLAY, PACKED),
    "LoRA and replay, EP and packed": (
        "qwen3_moe",
        f"{LORA} --lora.targets=q_proj,v_proj {REPLAY}",
        f"{PACKED} --parallelism.expert_parallel_degree=2",
    ),
    "LoRA, TP": ("llama3", LORA, "--parallelism.tensor_parallel_degree=2"),
    "LoRA, packed": ("llama3", LORA, PACKED),
}


@pytest.mark.long
@pytest.mark.parametrize("job", TOGETHER.values(), ids=TOGETHER)
@pytest.mark.parametrize("version", ["0.2.2", "0.3"])
def test_what_may_be_combined_trains_like_one_rank_that_pads(
    trained: Trained, root: Path, job: tuple[Kind, str, str], version: str
) -> None:
    python = sys.executable
    if version == "0.3":
        python = str(root / ".venv-titan03/bin/python")
        if not Path(python).exists():
            pytest.skip("no environment with torchtitan 0.3: scripts/setup.sh --torchtitan 0.3")
    kind, both, more = job
    found = trained(
        ("whole", 1, 2, both), ("split", 2, 2, f"{both} {more}"), kind=kind, python=python
    )
    assert_alike(found["split"], found["whole"])
    if REPLAY in both:
        assert found["split"]["said"][0]["values"]["routes_differ"] > 0
    if LORA not in both:
        # with adapters the image here is of the base: tests/titan/test_lora.py
        assert found["split"]["same_as_export"]
