"""scripts/setup.sh: only the environments that were asked for, few lines, and pip's in a log."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(200)]

WAIT_S = 150.0


@pytest.fixture
def checkout(root, tmp_path) -> Path:
    """What the set-up reads of this checkout, without an environment."""
    folder = tmp_path / "checkout"
    shutil.copytree(root / "scripts", folder / "scripts")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(root / name, folder)
    return folder


def said_by(folder: Path, *command: str, **env: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=WAIT_S,
        check=False,
    )


@pytest.mark.parametrize(
    ("arguments", "environments"),
    [
        ([], [".venv", ".venv-vllm"]),
        (["--engine", "sglang"], [".venv", ".venv-sglang"]),
        (["--model", "qwen3_moe", "--router-replay"], [".venv", ".venv-sglang"]),
        (["--engine=both"], [".venv", ".venv-vllm", ".venv-sglang"]),
        (["--torchtitan", "0.3"], [".venv-titan03", ".venv-vllm"]),
    ],
)
def test_the_quickstart_sets_up_what_its_engines_need_and_no_more(
    arguments, environments, checkout, root
) -> None:
    # All are there as links, which the set-up leaves alone: it names what it looks at.
    for name in (".venv", ".venv-vllm", ".venv-sglang", ".venv-atropos"):
        (checkout / name).symlink_to((root / name).resolve())
    (checkout / ".venv-titan03").symlink_to((root / ".venv").resolve())
    done = said_by(checkout, "scripts/quickstart.sh", *arguments, "--help", PYTHONPATH=str(root))
    assert done.returncode == 0, done.stdout
    looked_at = [line.split()[2] for line in done.stdout.splitlines() if "is a link" in line]
    assert sorted(looked_at) == sorted(environments)


def test_a_set_up_that_fails_says_why_in_a_few_lines_and_keeps_pips_in_a_log(checkout) -> None:
    done = said_by(
        checkout, "scripts/setup.sh", "--only", "trainer", TORCH="torch==0.0.1", PIP_NO_INDEX="1"
    )
    assert done.returncode == 1, done.stdout
    lines = done.stdout.splitlines()
    assert lines[-1].startswith("setup: torch==0.0.1 cannot be installed"), done.stdout
    assert len(lines) < 25
    log = (checkout / ".venv" / "setup.log").read_text()
    reasons = [line for line in log.splitlines() if line.startswith("ERROR")]
    assert reasons
    assert {f"  | {reason[:200]}" for reason in reasons[-1:]} <= set(lines), done.stdout
    assert not [line for line in lines if line.startswith("Looking in")], "pip's own lines"
    assert not (checkout / ".venv" / ".titan_grpo_stamp").exists()


def test_cuda_is_refused_in_one_line_where_there_is_no_gpu(checkout, tmp_path) -> None:
    fake = tmp_path / "bin"
    fake.mkdir()
    (fake / "nvidia-smi").write_text("#!/bin/sh\nexit 9\n")
    (fake / "nvidia-smi").chmod(0o755)
    path = f"{fake}{os.pathsep}{os.environ['PATH']}"
    done = said_by(checkout, "scripts/setup.sh", "--cuda", PATH=path)
    assert done.returncode == 1
    (line,) = done.stdout.splitlines()
    assert line.startswith("setup: --cuda is for a machine with NVIDIA GPUs")
    assert not (checkout / ".venv").exists()
