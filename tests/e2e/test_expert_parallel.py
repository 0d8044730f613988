"""Trainers and servers whose ranks have some of the experts each, in one run."""

from dataclasses import replace
from pathlib import Path

import pytest

from scripts.common import keys
from tests.e2e.conftest import Runs
from titan_grpo.engines.launch import Server, ServerSpec
from titan_grpo.observe import names
from titan_grpo.observe.recorder import read_metrics
from titan_grpo.titan import flavors, tiny

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(700), pytest.mark.long]

GOAL = 0.02
"""Nats: the mean gap of tokens of the same weights, as docs/measurements.md has it."""

STEPS = 3
OPTIONS = {"vllm": ("--enable-expert-parallel",), "sglang": ("--ep-size", "2")}
SPREAD = {"vllm": "Local/global number of experts: 4/8", "sglang": "TP1 EP1"}
"""What the engines' logs say of it."""


@pytest.mark.parametrize("engine", OPTIONS)
def test_expert_parallel_trainers_and_servers_agree(
    runs: Runs, request: pytest.FixtureRequest, tmp_path: Path, engine: str
) -> None:
    model = tmp_path / "model"
    tiny.write_tiny_model("qwen3_moe", model, seed=3)
    name, flavor = flavors.FLAVORS["qwen3_moe"]
    replayed = engine == "sglang"  # vLLM sends routes on a GPU only
    log = tmp_path / "server.log"
    spec = ServerSpec(
        request.getfixturevalue(f"{engine}_python"),
        str(model),
        str(log),
        engine,
        routes=replayed,
        tensor_parallel=2,
        args=OPTIONS[engine],
    )
    settings = {
        "rollout.prompts_per_step": 4,
        "rollout.group_size": 4,
        "model.name": name,
        "model.flavor": flavor,
        "parallelism.expert_parallel_degree": 2,
        "training.steps": STEPS,
    }
    words = keys(settings) + ["--grpo.router_replay"] * replayed
    with Server(spec) as server:
        server.wait_healthy(300.0)
        summary = replace(runs, model=model).complete(
            tmp_path / "run", [server.url], *words, nproc=2
        )
    assert SPREAD[engine] in log.read_text()
    rows = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert len(rows) == STEPS
    print(f"{engine}: {summary['logprob_gap_on_policy']} dropped {summary['dropped']}")
    assert summary["logprob_gap_on_policy"]["mean"] <= GOAL
    assert "no_routes" not in summary["dropped"]
    assert all((names.ROUTES_DIFFER in row) == replayed for row in rows)
