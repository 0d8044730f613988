"""Of groups without spread a real run takes the rewards only."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.e2e.conftest import Runs, Site
from tests.rigs.tasks import FLAT, is_flat
from titan_grpo.observe import names
from titan_grpo.observe.recorder import read_metrics

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900), pytest.mark.long]

PROMPTS, GROUP = 8, 8
"""The defaults of rollout.prompts_per_step and group_size."""


def recorded(path: Path) -> list[list[dict[str, Any]]]:
    """The groups of each step."""
    return [json.loads(line)["groups"] for line in path.read_text().splitlines()]


def test_dynamic_sampling_shows_both_mean_rewards_and_its_record_trains_the_same_weights_again(
    runs: Runs, site: Site, tmp_path: Path
) -> None:
    steps, record = 3, tmp_path / "record.jsonl"
    arguments = [
        f"--rollout.task={FLAT}",
        "--grpo.dynamic_sampling",
        f"--training.steps={steps}",
    ]
    sampled, again = tmp_path / "sampled", tmp_path / "again"
    summary = runs.complete(sampled, [site.url], *arguments, f"--rollout.record_path={record}")
    lengths = {kind: sum(counts.values()) for kind, counts in summary["lengths"].items()}
    assert lengths["trained"] == steps * PROMPTS * GROUP < lengths["made"]
    rows, kept = list(read_metrics(sampled / "metrics.jsonl")), recorded(record)
    no_spread = 0.0  # a total of the run
    for row, groups in zip(rows, kept, strict=True):
        rewards = [c["reward"] for group in groups for c in group["completions"]]
        assert len(groups) == PROMPTS
        assert not any(is_flat(group["prompt"]["index"]) for group in groups)
        assert row[names.REWARD_KEPT] == pytest.approx(sum(rewards) / len(rewards))
        left_out = (row[names.dropped("no_spread")] - no_spread) * GROUP
        no_spread = row[names.dropped("no_spread")]
        assert left_out > 0
        # All that was left out has the reward 0.
        assert row[names.REWARD] == pytest.approx(sum(rewards) / (len(rewards) + left_out))
    runs.complete(again, [site.url], *arguments, f"--rollout.replay_path={record}")
    for row, before in zip(read_metrics(again / "metrics.jsonl"), rows, strict=True):
        assert row[names.REWARD] == row[names.REWARD_KEPT] == before[names.REWARD_KEPT]
        assert row[names.LOSS] == before[names.LOSS]
    expected, replayed = runs.weights(sampled / "hf"), runs.weights(again / "hf")
    assert all(torch.equal(expected[name], replayed[name]) for name in expected)
