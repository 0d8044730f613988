"""Tails of lengths, in simulated time: the client, the places, the order of starts and the sampler,
without what processes and other load take."""

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from scripts.bench_tails import PER_STEP, Setting, least_s, simulated, spec_of
from scripts.timed_rollouts import Played, in_simulated_time
from titan_grpo.titan.tiny import write_tiny_model

SETTING = Setting(
    consume="started",
    lengths_known=True,
    staleness=1,
    slow=6.0,
    share=0.1,
    steps=20,
    capacity=8,
    unit_s=0.25,
    train_s=0.125,
)
MOST = 1.1
"""Times the least that any order can take that trains prompts as they come."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model("qwen3", tmp_path_factory.mktemp("model"), seed=1)


def played(setting: Setting, model: Path) -> Played:
    return in_simulated_time(simulated(setting, spec_of(setting, str(model))))


@pytest.mark.parametrize("staleness", [1, 2, 4])
@pytest.mark.parametrize("slow", [3.0, 6.0])
def test_prompts_are_trained_in_their_order_whatever_they_take_and_steps_hardly_wait_for_it(
    slow: float, staleness: int, model: Path
) -> None:
    setting = replace(SETTING, slow=slow, staleness=staleness)
    run = played(setting, model)
    assert run.trained == Counter(range(setting.steps * PER_STEP)), "each of the first ones, once"
    assert run.version_s[-1] <= MOST * least_s(setting)


def test_groups_that_overtake_each_other_leave_slow_prompts_out(model: Path) -> None:
    setting = replace(SETTING, consume="ready", staleness=2)
    run = played(setting, model)
    slow = sum(times for index, times in run.trained.items() if setting.is_slow(index))
    assert slow < setting.share * setting.steps * PER_STEP
