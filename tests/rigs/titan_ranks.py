"""Ranks that train without rollouts, on the torchtitan and the torch of an environment."""

import json
from pathlib import Path
from typing import Any

from tests.rigs.ranks import ROOT, run_ranks
from tests.rigs.sockets import free_port
from titan_grpo.titan.tiny import Kind, write_tiny_model

SCRIPT = ROOT / "tests/titan/engine_rank.py"


def train(
    folder: Path, steps: int, python: str, kind: Kind = "qwen3", ranks: int = 2, *options: str
) -> dict[str, Any]:
    """What rank 0 says (engine_rank.py) of ranks that train a tiny model in ``folder`` up to
    ``steps``, from the checkpoint there if there is one. ``options``: further keys of the job."""
    write_tiny_model(kind, folder / "model", seed=1)
    job = str(ranks), str(free_port()), kind, str(folder), str(steps)
    said: dict[str, Any] = json.loads(
        run_ranks(SCRIPT, ranks, *job, *options, python=python)[0].splitlines()[-1]
    )
    return said
