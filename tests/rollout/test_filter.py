"""A user's filter: which finished groups a step is made of, and which it does without."""

import asyncio
import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.rigs.trainer_handle import wait_until
from tests.rollout.conftest import (
    Behaviour,
    CompletionServer,
    MakeServer,
    StartClient,
    answer,
    good,
)
from tests.rollout.sampling import Letters
from titan_grpo.config.task import TaskKeys
from titan_grpo.errors import ConfigError
from titan_grpo.rollout.client import RolloutClient, RolloutsLate
from titan_grpo.rollout.messages import RolloutSpec
from titan_grpo.rollout.task_runner import Filter, TaskFailed, TaskRunner
from titan_grpo.rollout.tasks.functions import filter_of
from titan_grpo.samples import Completion, Group, Prompt

GROUP = 2

Started = Callable[..., tuple[RolloutClient, CompletionServer]]

TASK = """
from titan_grpo.samples import Prompt


class Counted:
    def __init__(self, options):
        pass

    def prompt(self, index, codec):
        return Prompt(index, (3, 4 + index))

    def reward(self, prompt, text, token_ids):
        return float(prompt.index)
"""
EVEN = """
def even(group):
    return group.completions[0].reward % 2 == 0
"""
NONE = """
def none(group):
    return False
"""
OWN = """
    async def should_accept(self, group):
        return group.prompt.index % 2 == 0
"""


@pytest.fixture
def started(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    model_dir: str,
    completion_server: MakeServer,
    start_client: StartClient,
) -> Started:
    """A factory: the source of a module with the task Counted -> a client and its server."""

    def make(
        source: str, behaviour: Behaviour | None = None, **changes: Any
    ) -> tuple[RolloutClient, CompletionServer]:
        (tmp_path / "own_filter.py").write_text(source)
        monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
        spec = RolloutSpec(
            model_dir=model_dir,
            task="own_filter:Counted",
            max_staleness=0,
            group_size=GROUP,
            prompts_per_step=3,
            max_completion_tokens=4,
        )
        server = completion_server()
        server.behaviour = behaviour or server.good
        return start_client(spec, server, **changes), server

    return make


@pytest.mark.parametrize(
    ("source", "accept", "consume"),
    [(TASK + EVEN, "own_filter:even", "started"), (TASK + OWN, "", "ready")],
    ids=["named", "task's own"],
)
def test_a_step_is_made_of_the_groups_that_the_filter_keeps_and_none_is_made_again(
    started: Started, source: str, accept: str, consume: str
) -> None:
    client, server = started(source, accept=accept, consume=consume)
    kept = [g.prompt.index for g in client.next_batch(0, 3, 60)]
    assert (sorted(kept) if consume == "ready" else kept) == [0, 2, 4]
    counters = client.counters()
    # The next prompt takes the place of a dropped group, which is not made again.
    dropped = counters["dropped.not_accepted"]
    assert dropped in (2, 3)
    assert len(server.bodies) == (3 + dropped) * GROUP
    assert counters["thrown_tokens"] == 4 * GROUP * dropped
    # Its servers have generated the dropped ones too.
    assert counters["tokens"] == counters[f"tokens.{server.url}"] == 4 * GROUP * (3 + dropped)
    assert "skipped" not in counters
    assert counters["made.4"] == GROUP * (3 + dropped)
    # Rewards of the dropped ones, once, for the mean of all.
    assert {1.0, 3.0} <= set(client.take_left_out()) <= {1.0, 3.0, 5.0}
    assert client.take_left_out() == []
    state = client.state()
    assert state["cursor"] == {"low": 5, "above": []}
    resumed, _ = started(source, accept=accept, state=state)
    assert [g.prompt.index for g in resumed.next_batch(0, 3, 60)] == [6, 8, 10]
    assert resumed.counters()["consumed_groups"] == 6


def test_a_verdict_past_the_steps_prompts_does_not_outlive_a_run_that_is_started_again(
    started: Started,
) -> None:
    client, _ = started(TASK + EVEN, accept="own_filter:even", max_staleness=1)
    assert wait_until(lambda: client.counters().get("dropped.not_accepted", 0) >= 5, 60)
    assert [g.prompt.index for g in client.next_batch(0, 3, 60)] == [0, 2, 4]
    # 6 and 8, which were kept, are made and judged again. So must 5, 7 and 9, or a prompt whose
    # groups are seldom kept would be trained on less often the more often a run is started.
    state = client.state()
    assert state["cursor"] == {"low": 5, "above": []}
    again, _ = started(TASK, state=state)
    assert [g.prompt.index for g in again.next_batch(0, 3, 60)] == [5, 6, 7]


def test_a_filter_that_keeps_nothing_ends_the_wait_with_its_name_and_count(
    started: Started,
) -> None:
    client, _ = started(TASK + NONE, accept="own_filter:none")
    with pytest.raises(RolloutsLate, match=r"; \d+ groups were left out by rollout\.accept"):
        client.next_batch(0, 3, 5.0)
    assert client.counters()["dropped.not_accepted"] >= 1


def test_a_group_with_a_completion_below_the_least_length_is_dropped_and_not_made_again(
    started: Started,
) -> None:
    short: list[int] = []

    def one_short(body: dict[str, Any]) -> tuple[int, Any]:
        # One member of the group of prompt 1, and only the first time.
        if body["prompt"][1] == 5 and not short:
            short.append(body["seed"])
        return answer([7, 2], [-1.0] * 2, "stop") if body["seed"] in short else good(body)

    client, server = started(TASK, one_short, min_completion_tokens=3)
    assert [g.prompt.index for g in client.next_batch(0, 3, 60)] == [0, 2, 3]
    assert client.counters()["dropped.too_short"] == 1
    assert sum(body["prompt"][1] == 5 for body in server.bodies) == GROUP


@pytest.mark.parametrize("answer", [None, "yes", 0.5])
def test_an_answer_that_is_no_verdict_is_the_filters_mistake(answer: Any) -> None:
    with pytest.raises(TaskFailed, match="must return True or False"):
        asyncio.run(runner(lambda group: answer).accepts(group()))


def test_a_filter_that_is_named_takes_the_place_of_the_tasks_own() -> None:
    task = SimpleNamespace(should_accept=len)
    accepts: list[object] = [len, math.isnan]
    assert filter_of(RolloutSpec(model_dir=""), task) is accepts[0]
    assert filter_of(RolloutSpec(model_dir="", accept="math:isnan"), task) is accepts[1]
    assert filter_of(RolloutSpec(model_dir=""), SimpleNamespace()) is None
    with pytest.raises(ConfigError, match=r"rollout\.accept 'no_such:f' cannot be imported"):
        filter_of(RolloutSpec(model_dir="", accept="no_such:f"), task)


def runner(accept: Filter | None) -> TaskRunner:
    return TaskRunner(SimpleNamespace(), Letters(), TaskKeys(), accept)


def group() -> Group:
    return Group(Prompt(0, (1,)), (Completion((5,), (-0.5,), "stop", 0, 0, ""),))
