"""Jobs from a minimal file."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.rollout.conftest import completion_server, model_dir  # noqa: F401 - fixtures
from tests.sync.conftest import rig  # noqa: F401 - a fixture
from titan_grpo.titan import jobconfig, tiny

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


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Files of the minimal job's model."""
    return tiny.write_tiny_model("qwen3", tmp_path / "model")
