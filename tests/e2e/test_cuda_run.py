"""A real training run on a GPU, whose server has no engine: every version that was committed has
the bytes of the weights that training had."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from scripts.common import keys
from tests.e2e.conftest import Replay, Runs
from tests.rigs.server_handle import ServerProcess
from titan_grpo.commands.processes import run_logged, torchrun
from titan_grpo.runkey import Key, with_run_key
from titan_grpo.verify.outcome import TRAINER_EVIDENCE

RECIPE = "train_configs/verify_2gpu.toml"
STEPS = 8

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA"),
]


def test_every_committed_version_has_the_bytes_that_training_had(
    runs: Runs, tmp_path: Path
) -> None:
    replay = Replay(tmp_path / "replay.jsonl", 4, 8, 16).write(STEPS)
    record, out = tmp_path / "commits.jsonl", tmp_path / "run"
    key = Key.generate()
    env = with_run_key(dict(os.environ) | {"OMP_NUM_THREADS": "1"}, key)
    with ServerProcess(args=["--record", str(record)], env=with_run_key({}, key)) as server:
        settings = {
            "rollout.servers": server.url,
            "job.dump_folder": out,
            "model.hf_assets_path": runs.model,
            "training.steps": STEPS,
            "weight_sync.transport": "tcp",
        }
        command = torchrun(1, RECIPE, [*keys(settings), *replay.arguments])
        at = command.index("titan_grpo.train")
        evidence = ["--evidence", str(out / "evidence"), "--"]
        command[at : at + 1] = ["titan_grpo.titan.verify_train", *evidence]
        run_logged(command, tmp_path / "train.log", env, None)
    made = {row["version"]: row for row in rows(out / "evidence" / TRAINER_EVIDENCE)}
    assert sorted(made) == list(range(STEPS + 1))
    commits = [row for row in rows(record) if row["ok"]]
    assert commits[-1]["version"] == STEPS
    for commit in commits:
        wanted = made[commit["version"]]
        assert commit["fingerprint"] == wanted["fingerprint"], commit["version"]
        assert commit["tensors"] == wanted["tensors"], commit["version"]
    print([commit["version"] for commit in commits], file=sys.stderr)


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]
