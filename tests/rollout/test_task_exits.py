"""What a task raises that is no Exception, and returns that is no list."""

import asyncio
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.rollout.conftest import MakeServer, StartClient
from tests.rollout.sampling import Letters
from titan_grpo.config.task import TaskKeys
from titan_grpo.errors import DataError
from titan_grpo.rollout.messages import RolloutSpec
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


CHECKED = """
from dataclasses import replace
from titan_grpo.rollout.tasks.built_in import Digits
class Checked(Digits):
    def prompt(self, index, codec):
        return replace(super().prompt(index, codec), payload={"check": lambda text: True})
"""


def test_a_payload_that_pickle_cannot_write_ends_the_run_in_one_line(
    model_dir: str,
    start_client: StartClient,
    completion_server: MakeServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "checked_task.py").write_text(CHECKED)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    spec = RolloutSpec(model_dir=model_dir, task="checked_task:Checked", prompts_per_step=1)
    client = start_client(spec, completion_server())
    with pytest.raises(
        DataError, match=r"payload goes to the trainer, .* got \{'check': <function"
    ):
        client.next_batch(0, 1, 60)
