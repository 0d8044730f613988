"""Our metrics in W&B, offline: torchtitan's own logger and W&B's own file of the run."""

import json
import os
from pathlib import Path

import pytest

from tests.rigs.interpreter import python

SCRIPT = """
import json, sys
from types import SimpleNamespace
from titan_grpo.titan import compat
compat.prepare()
from torchtitan.components.metrics import LoggerContainer, WandBLogger
from titan_grpo.titan.step_records import log_table, make_dispensable

processor = SimpleNamespace(logger=LoggerContainer())
processor.logger.add_logger(WandBLogger(sys.argv[1], SimpleNamespace(to_dict=dict)))
said = []
make_dispensable(processor, said.append)
for step, metrics in enumerate(json.loads(sys.argv[2]), 1):
    processor.logger.log(metrics, step)
log_table(processor, [(0.5, "3 to 4", "http://a:1", 0.0125, "2+3=", "five")], 2)
processor.logger.close()
assert not said, said
"""

STEPS = [
    {"reward/mean": 0.2578125, "server/127.0.0.1:8000/lag": 1.0, "evaluation/test/pass_at_4": 0.5},
    {"reward/mean": 0.5, "server/127.0.0.1:8000/lag": 0.0, "sync/bytes": 1048.5},
]


@pytest.mark.long
def test_every_metric_of_a_step_is_in_the_file_of_an_offline_run(tmp_path: Path) -> None:
    # In a folder of its own: no other test needs it, and users do not need it to start.
    packages, runs = tmp_path / "packages", tmp_path / "runs"
    made = python(
        "-m", "pip", "install", "--no-compile", "--target", str(packages), "wandb==0.31.*"
    )
    assert made.returncode == 0, made.stderr
    runs.mkdir()
    paths = str(packages), *filter(None, [os.environ.get("PYTHONPATH")])
    quiet = {"WANDB_MODE": "offline", "WANDB_SILENT": "true", "PYTHONPATH": os.pathsep.join(paths)}
    done = python("-c", SCRIPT, str(runs), json.dumps(STEPS), **quiet)
    assert done.returncode == 0, done.stderr
    (path,) = runs.rglob("run-*.wandb")
    # Records of this size lie in the file as they are: names and values as JSON texts.
    content = path.read_bytes()
    for metrics in STEPS:
        for name, value in metrics.items():
            assert name.encode() in content, name
            assert json.dumps(value).encode() in content
    (table,) = runs.rglob("*.table.json")
    shown = json.loads(table.read_text())
    assert shown["columns"] == ["reward", "versions", "server", "gap", "prompt", "completion"]
    assert shown["data"] == [[0.5, "3 to 4", "http://a:1", 0.0125, "2+3=", "five"]]
