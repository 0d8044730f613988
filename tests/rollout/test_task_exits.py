"""What a task raises that is no Exception, and returns that is no list."""

import asyncio
from types import SimpleNamespace

import pytest

from tests.rollout.sampling import Letters
from titan_grpo.config.task import TaskKeys
from titan_grpo.rollout.task_runner import TaskFailed, TaskRunner
from titan_grpo.samples import Completion, Prompt

DONE = Completion((5, 6), (-0.5, -1.0), "stop", 0, 0, "")


class Panic(BaseException):
    """As a library in Rust raises it."""


@pytest.mark.parametrize("error", [SystemExit, StopIteration, Panic])
@pytest.mark.parametrize("plain", [True, False], ids=["plain", "coroutine"])
def test_what_is_no_exception_is_the_tasks_error_too(
    error: type[BaseException], plain: bool
) -> None:
    def function(*_: object) -> float:
        raise error

    async def coroutine(*_: object) -> float:
        raise error

    task = SimpleNamespace(reward=function if plain else coroutine)
    runner = TaskRunner(task, Letters(), TaskKeys())
    with pytest.raises(TaskFailed, match=error.__name__):
        asyncio.run(runner.reward(Prompt(0, (1,)), DONE))


def test_an_exit_while_a_prompt_is_made_is_the_tasks_error() -> None:
    def leave(*_: object) -> Prompt:
        raise SystemExit(3)

    runner = TaskRunner(SimpleNamespace(prompt=leave), Letters(), TaskKeys())
    with pytest.raises(TaskFailed, match="prompt 0 failed: SystemExit: 3"):
        runner.prompt(0)


@pytest.mark.parametrize("answer", ["12", {0: 1.0, 1: 0.0}, {1.0, 2.0}, [1.0], 1.0])
def test_an_answer_that_is_no_list_of_a_groups_rewards_is_the_tasks_error(answer: object) -> None:
    task = SimpleNamespace(prompt=list, group_reward=lambda *_: answer)
    with pytest.raises(TaskFailed):
        asyncio.run(TaskRunner(task, Letters(), TaskKeys()).rewards(Prompt(0, (1,)), [DONE, DONE]))
