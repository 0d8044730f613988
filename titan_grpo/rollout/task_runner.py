"""Runs a user's task: a bounded number of calls at once, each with a deadline, and the task's own
errors separated from all others."""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

from titan_grpo.errors import ConfigError, DataError, ProtocolError, TitanGrpoError
from titan_grpo.rollout.calls import at_once, call, their_traceback
from titan_grpo.rollout.partial import Partial
from titan_grpo.rollout.tasks.base import (
    AgentTask,
    AnyTask,
    Codec,
    Filter,
    GroupTask,
    MultiTurnTask,
    Turn,
)
from titan_grpo.samples import Completion, Group, Prompt, sound_reward

T = TypeVar("T")


class TaskFailed(TitanGrpoError):
    """The task raised ``error``, missed its deadline, or returned something unusable."""

    def __init__(self, what: str, error: BaseException) -> None:
        notes = "; ".join(getattr(error, "__notes__", ()))
        text = f"the task's {what} failed: {type(error).__name__}: {error}"
        super().__init__(f"{text} ({notes})" if notes else text)
        self.error = error

    @property
    def report(self) -> str:
        """The message, the error's traceback from the user's code on, and our own notes."""
        notes = getattr(self, "__notes__", ())
        return "\n".join([str(self), their_traceback(self.error).rstrip(), *notes])


class TaskRunner:
    """The task, as the sampler sees it. ``concurrency`` bounds its calls in flight, ``timeout_s``
    each of them. Plain functions run in threads, coroutines in the loop.

    All methods raise TaskFailed for whatever the task raises, and nothing else. A deadline cannot
    end a plain function: its thread runs on, and its result is dropped.
    """

    def __init__(
        self,
        task: AnyTask,
        codec: Codec,
        concurrency: int,
        timeout_s: float,
        accept: Filter | None = None,
    ) -> None:
        """``accept``: drops or keeps finished groups; None: all are kept."""
        self._task, self._codec, self._timeout_s = task, codec, timeout_s
        self._accept = accept
        self._places = asyncio.Semaphore(concurrency)
        # Not asyncio.to_thread, whose executor has few threads on a small machine.
        self._threads = ThreadPoolExecutor(concurrency, thread_name_prefix="task")

    @property
    def multi_turn(self) -> bool:
        """Whether the task decides how a completion goes on."""
        return isinstance(self._task, MultiTurnTask)

    @property
    def stops(self) -> tuple[tuple[str, ...], tuple[int, ...]]:
        """Texts and tokens at which the task's completions end, besides the run's: its attributes
        ``stop`` and ``stop_token_ids``, if it has them. Raises ConfigError for other types."""
        texts = tuple(getattr(self._task, "stop", ()))
        tokens = tuple(getattr(self._task, "stop_token_ids", ()))
        strings = not isinstance(getattr(self._task, "stop", ()), str)
        if not strings or not all(isinstance(text, str) and text for text in texts):
            raise ConfigError(
                f"a task's stop must be a sequence of texts that are not empty, got {texts!r}"
            )
        if not all(isinstance(token, int) and token >= 0 for token in tokens):
            raise ConfigError(f"a task's stop_token_ids must be token ids, got {tokens!r}")
        return texts, tokens

    def prompt(self, index: int) -> Prompt:
        """The task's prompt."""
        try:
            return self._task.prompt(index, self._codec)
        except Exception as error:  # the boundary to a user's code: counted or raised
            raise TaskFailed(f"prompt {index}", error) from error

    @property
    def has_expected_tokens(self) -> bool:
        """Whether the task says how long completions will be."""
        return hasattr(self._task, "expected_tokens")

    def expected_tokens(self, prompt: Prompt) -> float:
        """The task's guess at the longest completion of a prompt's group; 0.0 without one."""
        if not self.has_expected_tokens:
            return 0.0
        try:
            return max(0.0, float(self._task.expected_tokens(prompt)))  # type: ignore[union-attr]
        except Exception as error:  # the boundary to a user's code: counted or raised
            raise TaskFailed(f"expected_tokens of prompt {prompt.index}", error) from error

    async def turn(self, prompt: Prompt, part: Partial) -> tuple[int, ...] | None:
        """Tokens with which an episode goes on after the policy's turn, at least one; None where it
        ends."""
        if not isinstance(self._task, MultiTurnTask):
            return None
        turns = self._turns(part)
        return await self._call("turn", _tokens, self._task.turn, prompt, turns, self._codec)

    async def rewards(self, prompt: Prompt, completions: Sequence[Completion]) -> list[float]:
        """The rewards of a group's finished completions, in their order."""
        if not isinstance(self._task, GroupTask):
            return await at_once([self.reward(prompt, each) for each in completions])
        texts = [self._codec.decode(each.token_ids) for each in completions]
        token_ids = [each.token_ids for each in completions]
        read = partial(_rewards, len(completions))
        return await self._call("reward", read, self._task.group_reward, prompt, texts, token_ids)

    async def reward(self, prompt: Prompt, completion: Completion) -> float:
        """The reward of a finished completion, for tasks that reward them one by one."""
        if isinstance(self._task, MultiTurnTask):
            part = Partial(completion.token_ids, completion.logprobs, sampled=completion.sampled)
            turns = self._turns(part)
            return await self._call("reward", float, self._task.episode_reward, prompt, turns)
        if isinstance(self._task, GroupTask | AgentTask):
            raise ProtocolError("the completions of this task are rewarded together")
        text, token_ids = self._codec.decode(completion.token_ids), completion.token_ids
        return await self._call("reward", float, self._task.reward, prompt, text, token_ids)

    async def agent(self, function: Callable[..., Any], *arguments: Any) -> float | None:
        """The reward that an agent returns, or None."""
        return await self._call("agent", _reward, function, *arguments)

    async def accepts(self, group: Group) -> bool:
        """Whether the user's filter keeps a finished, rewarded group."""
        if self._accept is None:
            return True
        return await self._call("should_accept", _verdict, self._accept, group)

    def _turns(self, part: Partial) -> tuple[Turn, ...]:
        return tuple(
            Turn(token_ids, sampled, self._codec.decode(token_ids))
            for sampled, token_ids in part.stretches()
        )

    async def _call(
        self, what: str, read: Callable[[Any], T], function: Callable[..., Any], *arguments: Any
    ) -> T:
        async with self._places:
            try:
                async with asyncio.timeout(self._timeout_s) as deadline:
                    return read(await call(self._threads, function, *arguments))
            # CancelledError too: a user's code may let out a cancellation of its own.
            except (Exception, asyncio.CancelledError) as error:  # the boundary to a user's code
                running = asyncio.current_task()
                if running is None or running.cancelling():
                    # Cancelled by us, whatever the task made of it.
                    raise asyncio.CancelledError from error
                if deadline.expired():
                    error.add_note(
                        f"rollout.task_timeout_s = {self._timeout_s:g} ran out in the task's {what}"
                    )
                raise TaskFailed(what, error) from error


def _reward(answer: Any) -> float | None:
    if answer is None:
        return None
    reward = float(answer)
    if not sound_reward(reward):
        raise DataError(f"an agent must return a finite number, got {answer!r:.100}")
    return reward


def _rewards(count: int, answer: Any) -> list[float]:
    rewards = [float(each) for each in answer]
    if len(rewards) != count:
        raise DataError(f"group_reward must return {count} rewards, got {len(rewards)}")
    return rewards


def _verdict(answer: Any) -> bool:
    # Equal to, not the same: numpy's True is another object.
    if answer not in (True, False):
        raise DataError(f"should_accept must return True or False, got {answer!r:.100}")
    return bool(answer)


def _tokens(answer: Sequence[int] | None) -> tuple[int, ...] | None:
    if answer is not None and (
        not answer or not all(isinstance(token, int) and token >= 0 for token in answer)
    ):
        raise DataError(
            f"turn must return None or at least one token id, got {str(answer)[:100]!r}"
        )
    return None if answer is None else tuple(answer)
