"""The examples, run by the command in their first comment."""

import importlib
import json
import os
import subprocess
import sys

import pytest

from tests.example_files import command_of
from titan_grpo.rollout.codec import TextCodec

# That command starts an engine and a run of its own. What it adds to the quickstart is the task,
# which tests/rollout/test_functions.py runs in a rollout process.
pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.timeout(400)]

STEPS = 16


def test_an_own_reward_on_own_rows_trains_the_quickstarts_model_in_its_chat_template(
    root, tmp_path
) -> None:
    source = root / "examples" / "own_reward" / "rewards.py"
    arguments = command_of(source)
    out, record = tmp_path / "run", tmp_path / "record.jsonl"
    arguments[arguments.index("--out") + 1] = str(out)
    arguments += ["--steps", str(STEPS), "--rollout.record_path", str(record)]
    # What scripts/quickstart.sh does once the environments are there.
    done = subprocess.run(
        [sys.executable, "-m", "titan_grpo.cli", "quickstart", *arguments],
        cwd=root,
        env=dict(os.environ),
        capture_output=True,
        text=True,
        timeout=350,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    summary = json.loads((out / "summary.json").read_text())
    assert summary["steps"] == STEPS
    assert summary["reward_last"] > summary["reward_first"] + 0.05
    # Every prompt is a row in the template, and every reward the function's.
    number = importlib.import_module("examples.own_reward.rewards").number
    rows = [json.loads(line) for line in (source.parent / "data.jsonl").read_text().splitlines()]
    codec, groups = TextCodec(str(out / "model")), groups_of(record)
    assert len(groups) == STEPS * 8
    for group in groups:
        row = rows[group["prompt"]["payload"]["row"]]
        text = f"user: {row['prompt']}\nassistant:"
        assert tuple(group["prompt"]["token_ids"]) == (1, *codec.encode(text))
        said = [codec.decode(each["token_ids"]) for each in group["completions"]]
        expected = number(said, [row["answer"]] * len(said))
        assert [each["reward"] for each in group["completions"]] == pytest.approx(expected)
    # The first epoch has every row once.
    assert len({group["prompt"]["payload"]["row"] for group in groups[: len(rows)]}) == len(rows)


def groups_of(record):
    """The groups of a record, in the order of their prompts."""
    groups = [
        group for line in record.read_text().splitlines() for group in json.loads(line)["groups"]
    ]
    return sorted(groups, key=lambda group: group["prompt"]["index"])
