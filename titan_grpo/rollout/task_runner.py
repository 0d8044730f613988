"""Calling a user's task: so many at once, each with a deadline, and what it raises told apart from
all other errors."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from titan_grpo.errors import DataError, TitanGrpoError
from titan_grpo.rollout.partial import Partial
from titan_grpo.rollout.tasks.base import Codec, MultiTurnTask, Task, Turn
from titan_grpo.samples import Completion, Prompt

T = TypeVar("T")


class TaskFailed(TitanGrpoError):
    """The task raised ``error``, did not answer within its deadline, or answered something
    unusable."""

    def __init__(self, what: str, error: BaseException) -> None:
        super().__init__(f"the task's {what} failed: {type(error).__name__}: {error}")
        self.error = error


class Asker:
    """The task, as the sampler sees it. ``concurrency`` bounds its asynchronous calls in flight;
    ``timeout_s`` each of them.

    All methods raise TaskFailed for whatever the task raises, and nothing else. A deadline can only
    end a call that awaits.
    """

    def __init__(
        self, task: Task | MultiTurnTask, codec: Codec, concurrency: int, timeout_s: float
    ) -> None:
        self._task, self._codec, self._timeout_s = task, codec, timeout_s
        self._places = asyncio.Semaphore(concurrency)

    @property
    def multi_turn(self) -> bool:
        """Whether the task decides how a completion goes on."""
        return isinstance(self._task, MultiTurnTask)

    def prompt(self, index: int) -> Prompt:
        """The task's prompt."""
        try:
            return self._task.prompt(index, self._codec)
        except Exception as error:  # the boundary to a user's code: counted or raised
            raise TaskFailed(f"prompt {index}", error) from error

    async def turn(self, prompt: Prompt, part: Partial) -> tuple[int, ...] | None:
        """Tokens with which an episode goes on after the policy's turn, at least one; None where it
        ends."""
        task = self._task
        if not isinstance(task, MultiTurnTask):
            return None

        async def ask() -> tuple[int, ...] | None:
            answer = await task.turn(prompt, self._turns(part.stretches()), self._codec)
            if answer is not None and (
                not answer or not all(isinstance(t, int) and t >= 0 for t in answer)
            ):
                raise DataError(
                    f"turn must return None or at least one token id, got {str(answer)[:100]!r}"
                )
            return None if answer is None else tuple(answer)

        return await self._call("turn", ask)

    async def reward(self, prompt: Prompt, completion: Completion) -> float:
        """The reward of a finished completion, of whichever kind the task is."""
        task = self._task

        async def ask() -> float:
            if isinstance(task, MultiTurnTask):
                part = Partial(
                    completion.token_ids, completion.logprobs, sampled=completion.sampled
                )
                return float(await task.episode_reward(prompt, self._turns(part.stretches())))
            return float(
                await task.reward(
                    prompt, self._codec.decode(completion.token_ids), completion.token_ids
                )
            )

        return await self._call("reward", ask)

    def _turns(self, stretches: Sequence[tuple[bool, tuple[int, ...]]]) -> tuple[Turn, ...]:
        return tuple(
            Turn(token_ids, sampled, self._codec.decode(token_ids))
            for sampled, token_ids in stretches
        )

    async def _call(self, what: str, ask: Callable[[], Awaitable[T]]) -> T:
        async with self._places:
            try:
                async with asyncio.timeout(self._timeout_s) as deadline:
                    return await ask()
            # CancelledError too: a user's code may let out a cancellation of its own.
            except (Exception, asyncio.CancelledError) as error:  # the boundary to a user's code
                running = asyncio.current_task()
                if running is None or running.cancelling():
                    # Whatever a task makes of our cancelling is none of its errors.
                    raise asyncio.CancelledError from error
                if deadline.expired():
                    error.add_note(
                        f"rollout.task_timeout_s = {self._timeout_s:g} ran out in the task's {what}"
                    )
                raise TaskFailed(what, error) from error
