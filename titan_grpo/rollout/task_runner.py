"""The interface of a task (docs/tasks.md), and what runs it.

A bounded number of calls at once, each with a deadline, plain functions in threads and coroutines
in the loop; the task's own errors are separated from all others, and their tracebacks have none of
our frames."""

import asyncio
import inspect
import re
import traceback
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import dropwhile, groupby
from pathlib import Path
from typing import Any, Protocol, TypeVar, runtime_checkable

from titan_grpo.config.task import ROLLOUT
from titan_grpo.errors import ConfigError, DataError, TitanGrpoError
from titan_grpo.samples import Completion, Group, Prompt, sound_reward

T = TypeVar("T")

HERE, LIBRARY = Path(__file__).resolve().parent, Path(asyncio.__file__).resolve().parents[1]

BETWEEN = tuple(
    str(path)
    for path in (
        HERE / "task_runner.py",
        HERE / "tasks" / "functions.py",
        LIBRARY / "asyncio",
        LIBRARY / "concurrent" / "futures",
    )
)
"""What is between the loop and a user's code."""


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


AnyTask = Task | GroupTask | MultiTurnTask | Prompts

Filter = Callable[[Group], bool | Awaitable[bool]]
"""Whether a finished, rewarded group may be trained on: a task's ``should_accept``, or
``rollout.accept``. A plain function or a coroutine, as ``Task.reward``."""


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
        section: str = ROLLOUT,
    ) -> None:
        """``accept``: drops or keeps finished groups; None: all are kept. ``section``: of the
        task's keys, for messages."""
        self._task, self._codec, self._timeout_s = task, codec, timeout_s
        self._accept, self._section = accept, section
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

    async def turn(self, prompt: Prompt, part: Completion) -> tuple[int, ...] | None:
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
            turns = self._turns(completion)
            return await self._call("reward", float, self._task.episode_reward, prompt, turns)
        assert hasattr(self._task, "reward"), "the completions of this task are rewarded together"
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

    def _turns(self, completion: Completion) -> tuple[Turn, ...]:
        flags = completion.sampled or (True,) * len(completion.token_ids)
        pairs = groupby(zip(flags, completion.token_ids, strict=True), key=lambda pair: pair[0])
        runs = [(sampled, tuple(token for _, token in run)) for sampled, run in pairs]
        return tuple(Turn(ids, sampled, self._codec.decode(ids)) for sampled, ids in runs)

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
                        f"{self._section}.task_timeout_s = {self._timeout_s:g} ran out in the"
                        f" task's {what}"
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


async def call(
    threads: ThreadPoolExecutor, function: Callable[..., Any], *arguments: Any, **named: Any
) -> Any:
    """The function's answer, awaited where it is awaitable."""
    if inspect.iscoroutinefunction(function):
        return await _apart(function(*arguments, **named))

    def plain() -> Any:
        try:
            return function(*arguments, **named)
        except (StopIteration, SystemExit, KeyboardInterrupt) as error:
            # A future cannot hold the first, whose waiter would wait forever; the others would
            # end the process.
            raise RuntimeError(f"{type(error).__name__} left the function") from error

    answer = await asyncio.get_running_loop().run_in_executor(threads, plain)
    # A wrapper of a coroutine function looks like a plain function.
    return await _apart(answer) if inspect.isawaitable(answer) else answer


async def _apart(answer: Awaitable[Any]) -> Any:
    """A user's awaitable, in a task of its own. In ours their TaskGroup, after a member's error,
    would leave our task marked as cancelled (Python 3.11), and their error would pass for our
    cancellation."""
    # no deadline: the caller's ends it
    return await asyncio.ensure_future(answer)


async def at_once(calls: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """The results, in their order. The first error cancels the other calls, and is raised once they
    have ended."""
    # Not a TaskGroup: Python 3.11's leaves its caller marked as cancelled after a member's error.
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        # no deadline: gather raises the first error, or the caller's cancellation
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        # no deadline: all have ended, or were cancelled
        await asyncio.gather(*tasks, return_exceptions=True)


def their_traceback(error: BaseException) -> str:
    """The traceback of an error from the first line of the user's code on, without notes."""
    found = traceback.TracebackException.from_exception(error)
    _strip(found)
    # Where no frame is left there is nothing for the header to head.
    return re.sub(r"Traceback \(most recent call last\):\n(?! )", "", "".join(found.format()))


def _strip(found: traceback.TracebackException) -> None:
    frames = dropwhile(lambda frame: frame.filename.startswith(BETWEEN), found.stack)
    found.__notes__ = []
    found.stack = traceback.StackSummary.from_list(list(frames))
    for link in ("__cause__", "__context__"):
        earlier = getattr(found, link)
        if earlier is not None:
            _strip(earlier)
            if not earlier.stack:
                setattr(found, link, None)
