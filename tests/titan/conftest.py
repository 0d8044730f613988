"""Runs torchtitan's own trainer (stock_run.py) under torchrun, on gloo."""

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.rollout.conftest import completion_server, model_dir  # noqa: F401 - fixtures
from tests.sync.conftest import rig  # noqa: F401 - a fixture
from titan_grpo.titan import jobconfig
from titan_grpo.titan.flavors import FLAVORS
from titan_grpo.titan.tiny import Kind, write_tiny_model

MINIMAL = """
[model]
name = "qwen3"
flavor = "grpo_tiny"
[rollout]
servers = ["http://127.0.0.1:8000"]
max_completion_tokens = 16
batch_timeout_s = 300.0
[training]
seq_len = 64
"""

Parse = Callable[..., Any]
"""Its result has a class that torchtitan makes at run time."""


@pytest.fixture
def parse(tmp_path: Path) -> Parse:
    """``parse(extra TOML, *arguments, world_size=None)`` on top of a minimal file."""

    def run(extra: str = "", *arguments: str, world_size: int | None = None) -> Any:
        path = tmp_path / "job.toml"
        path.write_text(MINIMAL + extra)
        return jobconfig.parse(["--job.config_file", str(path), *arguments], world_size)

    return run


RUN_DEADLINE_S = 280


SETTINGS = {
    "training.steps": 3,
    "training.seq_len": 64,
    "training.mixed_precision_param": "float32",
    "metrics.log_freq": 1,
    "optimizer.lr": 3e-3,
    "lr_scheduler.warmup_steps": 1,
    "activation_checkpoint.mode": "none",
    "checkpoint.interval": 1000,
    "debug.seed": 1,
}


@dataclass(frozen=True)
class StockRun:
    """What a run left: ``losses`` and ``norms`` (gradient) per step, empty if it failed; ``log`` is
    all it said."""

    returncode: int
    losses: tuple[float, ...]
    norms: tuple[float, ...]
    log: str


def torchrun(ranks: int, arguments: list[str], extra_env: dict[str, str]) -> tuple[int, str]:
    """Exit status and output; the whole process group is gone afterwards, also past the
    deadline."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", str(ranks)]
    script = str(Path(__file__).with_name("stock_run.py"))
    env = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""} | extra_env
    process = subprocess.Popen(
        [*launcher, "--rdzv_backend", "c10d", "--rdzv_endpoint", "localhost:0", script, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=env,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=RUN_DEADLINE_S)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return process.returncode, output


@pytest.fixture
def stock(tmp_path: Path) -> Callable[..., StockRun]:
    """``stock(kind, ranks, *arguments, skip="")`` trains a tiny model from HF weights for three
    steps."""

    def run(kind: Kind, ranks: int, *arguments: str, skip: str = "") -> StockRun:
        model = write_tiny_model(kind, tmp_path / "model", seed=1)
        name, flavor = FLAVORS[kind]
        settings: dict[str, Any] = SETTINGS | {
            "model.name": name,
            "model.flavor": flavor,
            "model.hf_assets_path": model,
            "job.dump_folder": tempfile.mkdtemp(dir=tmp_path),
            "training.local_batch_size": 8 // ranks,
        }
        options = [f"--{key}={value}" for key, value in settings.items()]
        options += ["--checkpoint.enable", "--checkpoint.initial_load_in_hf", *arguments]
        code, log = torchrun(ranks, options, {"TITAN_GRPO_TEST_SKIP": skip})
        found = [json.loads(line) for line in log.splitlines() if line.startswith('{"losses"')]
        result = found[0] if found else {"losses": [], "norms": []}
        return StockRun(code, tuple(result["losses"]), tuple(result["norms"]), log)

    return run
