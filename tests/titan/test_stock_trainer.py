"""torchtitan's own trainer on CPU ranks over gloo: it needs each of our patches. That ours trains
with all of them: test_pipeline.py."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from titan_grpo.titan.flavors import FLAVORS
from titan_grpo.titan.tiny import Kind

pytestmark = [pytest.mark.e2e, pytest.mark.long]

RUN_DEADLINE_S = 280
SETTINGS = {
    "training.steps": 1,
    "training.seq_len": 64,
    "training.mixed_precision_param": "float32",
    "activation_checkpoint.mode": "none",
}


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


@pytest.mark.parametrize(
    ("skip", "kind", "ranks", "complaint"),
    [
        ("", "qwen3", 2, ""),
        ("premul", "qwen3", 2, "Cannot use ReduceOp.PREMUL_SUM with Gloo"),
        ("tied", "qwen3", 2, "is shared with a parameter already managed by another FSDP group"),
        ("", "qwen3_moe", 1, ""),
        ("histc", "qwen3_moe", 1, '"histogram_cpu" not implemented for'),
    ],
)
def test_without_the_patch_and_only_so_torchtitan_fails_as_the_patch_says(
    tmp_path: Path, skip: str, kind: Kind, ranks: int, complaint: str
) -> None:
    name, flavor = FLAVORS[kind]
    settings = SETTINGS | {"model.name": name, "model.flavor": flavor, "job.dump_folder": tmp_path}
    options = [f"--{key}={value}" for key, value in settings.items()]
    code, log = torchrun(ranks, options, {"TITAN_GRPO_TEST_SKIP": skip})
    assert (code != 0) == bool(complaint), log[-20000:]
    assert complaint in log
