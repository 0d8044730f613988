"""What a task is, and finding one by name."""

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from titan_grpo.errors import ConfigError
from titan_grpo.samples import Prompt

BUILT_IN = {
    "digits": "titan_grpo.rollout.tasks.digits:Digits",
    "gsm8k": "titan_grpo.rollout.tasks.gsm8k:Gsm8k",
}


class Codec(Protocol):
    """The model's tokenizer, as tasks see it."""

    def encode(self, text: str) -> tuple[int, ...]:
        """Token ids of a text, without special tokens."""
        ...

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of token ids, without special tokens."""
        ...


@dataclass(frozen=True, slots=True)
class TaskOptions:
    """What every task is built with: ``rollout.seed`` and ``rollout.task_path``."""

    seed: int = 0
    path: str = ""


class Task(Protocol):
    """An endless, seeded sequence of prompts and a reward. Built as ``TheClass(TaskOptions)``, lives in the rollout process."""

    def prompt(self, index: int, codec: Codec) -> Prompt:
        """Prompt ``index`` (0, 1, ...): the same index and seed give the same prompt in every run."""
        ...

    async def reward(self, prompt: Prompt, text: str, token_ids: Sequence[int]) -> float:
        """Reward of one completion, finite. Long computations go to a thread (asyncio.to_thread), never into the loop."""
        ...


def load_task(name: str, options: TaskOptions) -> Task:
    """A built-in task, or the class at "package.module:Class". Raises ConfigError if it is not there or refuses its options."""
    path = BUILT_IN.get(name, name)
    module_name, _, class_name = path.partition(":")
    if not class_name:
        raise ConfigError(f'rollout.task must be one of {sorted(BUILT_IN)} or "package.module:Class", got {name!r}')
    try:
        factory = getattr(importlib.import_module(module_name), class_name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"rollout.task {name!r} can not be imported: {error}") from error
    task: Task = factory(options)
    return task
