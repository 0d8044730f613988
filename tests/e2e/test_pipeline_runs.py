"""A whole run of two pipeline stages under torchrun, on recorded rollouts, to a server without an
engine."""

import pytest

from tests.rigs.server_handle import ServerProcess
from titan_grpo.observe import names
from titan_grpo.observe.recorder import read_metrics
from titan_grpo.titan.tiny import write_tiny_model

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300), pytest.mark.long]

STEPS = 3


def test_every_version_of_two_stages_is_committed(runs, small_replay, tmp_path) -> None:
    model, out = write_tiny_model("qwen3_untied", tmp_path / "model", seed=1), tmp_path / "out"
    arguments = [
        *small_replay.arguments,
        "--model.flavor=grpo_tiny_untied",
        f"--model.hf_assets_path={model}",
        "--parallelism.pipeline_parallel_degree=2",
        f"--training.steps={STEPS}",
    ]
    with ServerProcess() as server:
        summary = runs.complete(out, [server.url], *arguments, nproc=2)
    [committed] = summary["versions_committed"].values()
    assert committed["committed"][-1] == STEPS
    rows = list(read_metrics(out / "metrics.jsonl"))
    assert len(rows) == STEPS
    assert all(row[names.LOSS] for row in rows), "the last stage's loss is rank 0's metric"
