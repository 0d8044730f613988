"""Tails of lengths, in simulated time: the client, the places, the order of starts and the sampler,
without what processes and other load take."""

import asyncio
import threading
import tracemalloc
from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, cast

import pytest

from scripts.bench_tails import (
    PER_STEP,
    Setting,
    fleet,
    least_s,
    server_of,
    simulated,
    spec_of,
)
from scripts.timed_rollouts import Pace, Played, TimedServer, Work, in_simulated_time, play
from tests.rigs.present import present
from tests.rollout.sampling import Letters
from titan_grpo.config.task import TaskKeys
from titan_grpo.rollout.codec import TextCodec
from titan_grpo.rollout.dispatch import ADMIT_S
from titan_grpo.rollout.messages import RolloutSpec, RolloutStopped
from titan_grpo.rollout.schedule import QUIET_S, SPREAD, Durations, Starts
from titan_grpo.rollout.task_runner import Codec, TaskFailed, TaskRunner
from titan_grpo.rollout.tasks.functions import task_of
from titan_grpo.samples import Prompt

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
PROMPT_S = 0.005
MOST = 1.1
"""Times the least that any order can take that trains prompts as they come."""


def played(setting: Setting, model: str) -> Played:
    return in_simulated_time(simulated(setting, spec_of(setting, model)))


@pytest.mark.parametrize("staleness", [1, 2, 4])
@pytest.mark.parametrize("slow", [3.0, 6.0])
def test_prompts_are_trained_in_their_order_whatever_they_take_and_steps_hardly_wait_for_it(
    slow: float, staleness: int, model: str
) -> None:
    setting = replace(SETTING, slow=slow, staleness=staleness)
    run = played(setting, model)
    assert run.trained == Counter(range(setting.steps * PER_STEP)), "each of the first ones, once"
    assert run.version_s[-1] <= MOST * least_s(setting)


def on_fleet(servers: list[float], at_once: int, model: str, apart_s: float = 0.0) -> float:
    """Seconds of a run whose groups wait for each version, on servers that are so many times as
    slow, and make ``at_once`` groups at once."""
    each = replace(SETTING, share=0.0, staleness=0, capacity=at_once)
    return in_simulated_time(fleet(each, servers, apart_s, model)).version_s[-1]


@pytest.mark.parametrize("servers", [2, 4])
def test_servers_that_get_a_version_one_after_the_other_share_the_groups_that_waited_for_it(
    servers: int, model: str
) -> None:
    apart_s = 0.25 * SPREAD * SETTING.unit_s / (servers - 1)
    took = on_fleet([1.0] * servers, PER_STEP // servers, model, apart_s)
    assert took <= MOST * SETTING.steps * (SETTING.unit_s + SETTING.train_s)


def test_a_server_that_gets_no_version_costs_the_others_one_short_wait(model: str) -> None:
    took = on_fleet([1.0, 1.0], PER_STEP // 2, model, apart_s=1e5)
    alone = SETTING.steps * (2 * SETTING.unit_s + SETTING.train_s)
    assert took <= alone + SPREAD * 2 * SETTING.unit_s


@pytest.mark.parametrize("slower", [4.0, 10.0])
def test_a_server_that_generates_slowly_costs_steps_a_tenth_at_most_after_the_first(
    slower: float, model: str
) -> None:
    first = slower * SETTING.unit_s
    took = on_fleet([slower, 1.0, 1.0, 1.0], PER_STEP, model) - first
    assert took <= MOST * SETTING.steps * (SETTING.unit_s + SETTING.train_s)


def test_a_server_that_stands_still_holds_up_one_step_for_little_more_than_the_quiet_time(
    model: str,
) -> None:
    setting = replace(SETTING, share=0.0, unit_s=2.0, capacity=4)
    spec = spec_of(setting, model)
    servers = [server_of(setting), server_of(setting)]
    servers[1].stands = (2.5, 1e5)
    task, codec, pace = task_of(spec), TextCodec(model, spec), Pace(setting.steps, setting.train_s)
    run = in_simulated_time(play(spec, task, codec, servers, pace))
    each = sorted(after - before for before, after in pairwise(run.version_s))
    # All groups of a step on the other server take twice as long.
    assert each[-2] <= 2 * setting.unit_s + setting.train_s
    assert QUIET_S / 2 < each[-1] <= 1.25 * QUIET_S + each[-2]
    assert run.counters["moved"] > 0
    assert run.counters["thrown_tokens"] == 0


class Laborious:
    """Takes PROMPT_S for each prompt, and notes when it made which: the turns of the loop."""

    def __init__(self) -> None:
        self.turn, self.made = 0, list[tuple[int, int]]()

    async def count_turns(self) -> None:
        while True:
            await asyncio.sleep(0)
            self.turn += 1

    def prompt(self, index: int, codec: Codec) -> Prompt:
        threading.Event().wait(PROMPT_S)
        self.made.append((self.turn, index))
        return Prompt(index, (3, index, 0))

    async def reward(self, prompt: Prompt, text: str, token_ids: Sequence[int]) -> float:
        return 0.0


class Mistaken(Laborious):
    def expected_tokens(self, prompt: Prompt) -> float:
        raise KeyError("the estimate is gone")


async def quickly_played(task: Laborious, steps: int, per_step: int) -> Played:
    server = TimedServer(1024, 4, lambda _: Work(4, 0.001))
    spec = RolloutSpec(model_dir="", prompts_per_step=per_step, group_size=2, max_staleness=0)
    counting = asyncio.create_task(task.count_turns())
    try:
        return await play(spec, task, Letters(), [server], Pace(steps, 0.0))
    finally:
        counting.cancel()


def test_prompts_are_made_once_and_a_few_in_each_turn_of_the_loop() -> None:
    task, steps, per_step = Laborious(), 3, 32
    played = asyncio.run(quickly_played(task, steps, per_step))
    assert played.trained == Counter(range(steps * per_step))
    assert max(Counter(index for _, index in task.made).values()) == 1
    assert max(Counter(turn for turn, _ in task.made).values()) <= ADMIT_S / PROMPT_S + 1


def test_an_error_of_a_tasks_estimate_counts_as_the_tasks() -> None:
    with pytest.raises(RolloutStopped, match=r"expected_tokens of prompt \d failed: KeyError"):
        asyncio.run(quickly_played(Mistaken(), 1, 2))


def test_groups_that_overtake_each_other_leave_slow_prompts_out(model: str) -> None:
    setting = replace(SETTING, consume="ready", staleness=2)
    run = played(setting, model)
    slow = sum(times for index, times in run.trained.items() if setting.is_slow(index))
    assert slow < setting.share * setting.steps * PER_STEP


def test_prompts_that_wait_take_few_bytes_a_token_and_come_back_as_they_were() -> None:
    length, count = 8192, 64

    class Long:
        def prompt(self, index: int, codec: Codec) -> Prompt:
            return Prompt(index, tuple(range(1000, 1000 + length)), {"answer": index})

    task = cast(Any, Long())
    waiting = TaskRunner(task, Letters(), TaskKeys())
    tracemalloc.start()
    for index in range(count):
        assert waiting.ahead(index) is not None
    taken = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert taken < 12 * length * count
    assert waiting.prompt(5) == task.prompt(5, Letters())


@pytest.mark.parametrize("token_ids", [[3, 5, 4], array("i", [3, 5, 4])])
def test_a_prompt_may_have_its_tokens_in_any_sequence(token_ids: Any) -> None:
    task = SimpleNamespace(prompt=lambda index, codec: Prompt(index, token_ids))
    spec, waiting = RolloutSpec(model_dir=""), TaskRunner(cast(Any, task), Letters(), TaskKeys())
    assert Starts(spec, waiting, Durations()).admit(0)
    assert waiting.prompt(0) == waiting.prompt(0) == Prompt(0, (3, 5, 4))


def test_a_server_that_is_too_old_for_the_most_urgent_group_makes_the_next_one() -> None:
    spec = RolloutSpec(model_dir="", prompts_per_step=1, max_staleness=0)
    task = SimpleNamespace(
        prompt=lambda index, codec: Prompt(index, (index,)),
        expected_tokens=lambda prompt: 1.0 + prompt.index,
    )
    starts = Starts(spec, TaskRunner(cast(Any, task), Letters(), TaskKeys()), Durations())
    assert [starts.admit(1) for _ in range(3)] == [True, True, False]
    urgent = [present(starts.most_urgent(version)).ticket.index for version in (0, 1)]
    assert urgent == [0, 1], "the second one takes longer, and is of the next step"
    starts.start(0, 0)
    assert starts.most_urgent(0) is None


def test_a_process_in_place_of_one_that_ended_counts_on_from_the_places_that_were_used() -> None:
    """The trainer, at version 12, has prompts 2 and 5 of the next four and needs 3 and 4."""
    spec = RolloutSpec(
        model_dir="",
        prompts_per_step=4,
        max_staleness=1,
        base_version=10,
        state={"cursor": {"low": 2, "above": []}},
        places=8,
        waiting={2: 1, 5: 1},
        sessions_lost=1,
    )
    task = cast(Any, SimpleNamespace(prompt=lambda index, codec: Prompt(index, (1,))))
    starts = Starts(spec, TaskRunner(task, Letters(), TaskKeys()), Durations())
    assert not starts.admit(10), "too old for the trainer's next batch"
    admitted = []
    while starts.admit(11):
        admitted.append(starts.waiting)
    assert admitted == [1, 2]
    found = [present(starts.most_urgent(11)).ticket]
    assert starts.start(found[0].index, 11) == 12
    found.append(present(starts.most_urgent(11)).ticket)
    assert [(ticket.index, ticket.attempt) for ticket in found] == [(3, 1), (4, 1)]


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (Prompt(3, cast(Any, ("a",))), "prompt 3 failed: TypeError"),
        ((3, 5, 4), r"prompt must return a Prompt, got \(3, 5, 4\)"),
    ],
)
def test_a_prompt_that_is_none_or_has_no_numbers_is_its_tasks_mistake(
    made: object, message: str
) -> None:
    task = SimpleNamespace(prompt=lambda index, codec: made)
    waiting = TaskRunner(cast(Any, task), Letters(), TaskKeys())
    assert waiting.ahead(3) is None
    with pytest.raises(TaskFailed, match=message):
        waiting.prompt(3)
