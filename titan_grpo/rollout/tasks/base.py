"""The interface of a task, and finding one by name (docs/tasks.md)."""

import importlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from titan_grpo.errors import ConfigError
from titan_grpo.samples import Group, Prompt

BUILT_IN = {
    "calculator": "titan_grpo.rollout.tasks.calculator:Calculator",
    "digits": "titan_grpo.rollout.tasks.digits:Digits",
    "gsm8k": "titan_grpo.rollout.tasks.gsm8k:gsm8k",
}


class Codec(Protocol):
    """The model's tokenizer, as tasks see it."""

    def encode(self, text: str) -> tuple[int, ...]:
        """Token ids of a text, without special tokens."""
        ...

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of token ids, without special tokens."""
        ...

    def chat(
        self, said: str | Sequence[Mapping[str, Any]], tools: Sequence[Any] | None = None
    ) -> tuple[int, ...]:
        """Token ids of a prompt: messages, or the user's one, in the model's chat template."""
        ...


@dataclass(frozen=True, slots=True)
class TaskOptions:
    """What every task is built with: ``rollout.seed`` and ``rollout.task_path``."""

    seed: int = 0
    path: str = ""


@dataclass(frozen=True, slots=True)
class Turn:
    """One stretch of an episode after its prompt: made by the policy (``sampled``), or the task's
    answer."""

    token_ids: tuple[int, ...]
    sampled: bool
    text: str


class Prompts(Protocol):
    """An endless, seeded sequence of prompts. Built as ``TheClass(TaskOptions)``, lives in the
    rollout process."""

    def prompt(self, index: int, codec: Codec) -> Prompt:
        """Prompt ``index`` (0, 1, ...): the same index and seed give the same prompt in every
        run."""
        ...


class Task(Prompts, Protocol):
    """Prompts and a reward of single completions."""

    def reward(
        self, prompt: Prompt, text: str, token_ids: Sequence[int]
    ) -> float | Awaitable[float]:
        """Reward of one completion, finite. A plain function runs in a thread, and several of them
        at once; ``async def`` runs in the loop, which it must not block."""
        ...


@runtime_checkable
class GroupTask(Prompts, Protocol):
    """Prompts and the rewards of a group's completions at once: a judge that compares them, or a
    batch for a model. A class with ``group_reward`` is one of these."""

    def group_reward(
        self, prompt: Prompt, texts: Sequence[str], token_ids: Sequence[Sequence[int]]
    ) -> Sequence[float] | Awaitable[Sequence[float]]:
        """Rewards of all completions of the prompt, in their order, finite. A plain function or a
        coroutine, as ``Task.reward``."""
        ...


@runtime_checkable
class MultiTurnTask(Prompts, Protocol):
    """Prompts, a loop of turns and a reward of whole episodes. A class with ``turn`` is one of
    these. Both methods may be plain functions or coroutines, as ``Task.reward``."""

    def turn(
        self, prompt: Prompt, turns: Sequence[Turn], codec: Codec
    ) -> Sequence[int] | Awaitable[Sequence[int] | None] | None:
        """The policy ended its turn, the last of ``turns``: at least one token of context with
        which it goes on, or None, which ends the episode.

        A call that was cancelled (its server failed, its weights are too old) may be made again.
        """
        ...

    def episode_reward(self, prompt: Prompt, turns: Sequence[Turn]) -> float | Awaitable[float]:
        """Reward of the whole episode, finite."""
        ...


@runtime_checkable
class AgentTask(Prompts, Protocol):
    """Rows for agents, whose calls make the completions (docs/agents.md)."""

    function: Callable[..., Any] | None
    """``agent(base_url, api_key, row) -> reward``; None: agents are outside."""

    def row(self, index: int) -> dict[str, Any]:
        """What the agents of a group get."""
        ...


AnyTask = Task | GroupTask | MultiTurnTask | AgentTask

Filter = Callable[[Group], bool | Awaitable[bool]]
"""Whether a finished, rewarded group may be trained on: a task's ``should_accept``, or
``rollout.accept``. A plain function or a coroutine, as ``Task.reward``."""


def load_task(name: str, options: TaskOptions) -> AnyTask:
    """A built-in task, or the class at "package.module:Class". Raises ConfigError if it is not
    there or refuses its options."""
    path = BUILT_IN.get(name, name)
    module_name, _, class_name = path.partition(":")
    if not class_name:
        raise ConfigError(
            f'rollout.task must be one of {sorted(BUILT_IN)} or "package.module:Class", got'
            f" {name!r}"
        )
    try:
        factory = getattr(importlib.import_module(module_name), class_name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"rollout.task {name!r} cannot be imported: {error}") from error
    task: AnyTask = factory(options)
    if hasattr(task, "turn") != hasattr(task, "episode_reward"):
        raise ConfigError(
            f"rollout.task {name!r} must have both of turn and episode_reward, or neither: it has"
            " one of them"
        )
    return task
