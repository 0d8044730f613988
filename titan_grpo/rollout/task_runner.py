"""The interface of a task (docs/tasks.md), and its runner: calls with a deadline, a bounded number
at once, plain functions in threads, coroutines in the loop. The task's own errors are kept apart
from all others, and their tracebacks have none of our frames."""

import asyncio
import inspect
import re
import traceback
from array import array
from collections.abc import (
    Awaitable,
    Callable,
    Collection,
    Coroutine,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import partial
from itertools import dropwhile, groupby
from pathlib import Path
from typing import Any, Protocol, TypeVar, runtime_checkable

from titan_grpo.config.task import TaskKeys
from titan_grpo.errors import ConfigError, DataError, TitanGrpoError
from titan_grpo.rollout.threads import MOST_THREADS, Threads
from titan_grpo.samples import Completion, Group, Prompt, sound_reward

T = TypeVar("T")

HERE, LIBRARY = Path(__file__).resolve().parent, Path(asyncio.__file__).resolve().parents[1]

BETWEEN = tuple(
    str(path)
    for path in (
        HERE / "task_runner.py",
        HERE / "threads.py",
        HERE / "tasks" / "functions.py",
        LIBRARY / "asyncio",
        LIBRARY / "concurrent" / "futures",
    )
)
"""Path prefixes of the stack frames between the loop and a user's code."""


class Codec(Protocol):
    """The model's tokenizer, as tasks see it."""

    def encode(self, text: str) -> tuple[int, ...]:
        """Return the token ids of a text, without special tokens."""
        ...

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of token ids, without special tokens."""
        ...

    def spell(self, token_ids: Sequence[int]) -> str:
        """Return the text of token ids, special tokens included."""
        ...

    def chat(
        self, messages: str | Sequence[Mapping[str, Any]], tools: Sequence[Any] | None = None
    ) -> tuple[int, ...]:
        """Return the token ids of a prompt in the model's chat template: a list of messages,
        or the text of one user message."""
        ...


@dataclass(frozen=True, slots=True)
class TaskOptions:
    """Arguments of every task: ``rollout.seed`` and ``rollout.task_path``."""

    seed: int = 0
    path: str = ""


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn of an episode after its prompt: the policy's (``sampled``), or the task's answer."""

    token_ids: tuple[int, ...]
    sampled: bool
    text: str


class Prompts(Protocol):
    """An endless, seeded sequence of prompts. Constructed as ``TheClass(TaskOptions)`` in the
    rollout process."""

    def prompt(self, index: int, codec: Codec) -> Prompt:
        """Return prompt ``index`` (0, 1, ...): the same index and seed give the same prompt in
        every run."""
        ...


class Task(Prompts, Protocol):
    """Prompts and a reward for each completion."""

    def reward(
        self, prompt: Prompt, text: str, token_ids: Sequence[int]
    ) -> float | Awaitable[float]:
        """Return the finite reward of one completion. Plain functions run in threads, several at
        once; ``async def`` runs in the loop, which it must not block."""
        ...


@runtime_checkable
class GroupTask(Prompts, Protocol):
    """Prompts and the rewards of all of a group's completions at once: for a judge that compares
    them, or a batched reward model. A class with ``group_reward`` is a GroupTask."""

    def group_reward(
        self, prompt: Prompt, texts: Sequence[str], token_ids: Sequence[Sequence[int]]
    ) -> Sequence[float] | Awaitable[Sequence[float]]:
        """Return the finite rewards of all completions of the prompt, in their order. A plain
        function or a coroutine, as ``Task.reward``."""
        ...


@runtime_checkable
class MultiTurnTask(Prompts, Protocol):
    """Prompts, a loop of turns and a reward for whole episodes. A class with ``turn`` is a
    MultiTurnTask. Both methods may be plain functions or coroutines, as ``Task.reward``."""

    def turn(
        self, prompt: Prompt, turns: Sequence[Turn], codec: Codec
    ) -> Sequence[int] | Awaitable[Sequence[int] | None] | None:
        """Return the task's answer to the policy's turn, the last of ``turns``: at least one token
        id, or None to end the episode.

        A cancelled call (the server failed, the weights are too old) may be made again.
        """
        ...

    def episode_reward(self, prompt: Prompt, turns: Sequence[Turn]) -> float | Awaitable[float]:
        """Return the finite reward of the whole episode."""
        ...


AnyTask = Task | GroupTask | MultiTurnTask | Prompts

Filter = Callable[[Group], bool | Awaitable[bool]]
"""User's predicate "train on this finished, rewarded group": a task's ``should_accept``, or
``rollout.accept``. A plain function or a coroutine, as ``Task.reward``."""


def stops_of(task: Any) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Return a task's stop texts and stop token ids in addition to the run's: its attributes
    ``stop`` and ``stop_token_ids``, if present and not None. Raises ConfigError for other types."""
    found = (getattr(task, name, None) for name in ("stop", "stop_token_ids"))
    stop, ids = (() if each is None else each for each in found)
    texts = tuple(stop) if isinstance(stop, Collection) and not isinstance(stop, str) else None
    if texts is None or not all(isinstance(text, str) and text for text in texts):
        raise ConfigError(
            f"a task's stop must be a sequence of texts that are not empty, got {stop!r:.200}"
        )
    tokens = tuple(ids) if isinstance(ids, Collection) else None
    if tokens is None or not all(isinstance(token, int) and token >= 0 for token in tokens):
        raise ConfigError(
            f"a task's stop_token_ids must be a sequence of token ids, got {ids!r:.200}"
        )
    return texts, tokens


class TaskFailed(TitanGrpoError):
    """The task raised ``error``, missed its deadline, or returned something unusable."""

    def __init__(self, what: str, error: BaseException) -> None:
        notes = "; ".join(getattr(error, "__notes__", ()))
        said = f": {error}" if str(error) else ""
        text = f"the task's {what} failed: {type(error).__name__}{said}"
        super().__init__(f"{text} ({notes})" if notes else text)
        self.error = error

    @property
    def report(self) -> str:
        """Message, the error's traceback from the user's code on, and our own notes."""
        notes = getattr(self, "__notes__", ())
        return "\n".join([str(self), their_traceback(self.error).rstrip(), *notes])


class TaskRunner:
    """Runner of a task's methods. ``task_concurrency`` bounds the calls in flight,
    ``task_timeout_s`` each of them; for ``agent`` its caller sees to both. Plain functions run in
    threads, coroutines in the loop; ``prompt`` and ``ahead`` run in the caller's thread, without a
    deadline.

    Methods raise TaskFailed for any error of the task. A cancellation does not end a plain
    function: its thread runs on, and its result is dropped. A later call may have to wait for that
    thread, up to ``task_timeout_s``; its own deadline starts when its function begins.
    """

    def __init__(
        self, task: AnyTask, codec: Codec, keys: TaskKeys, accept: Filter | None = None
    ) -> None:
        """``accept``: filter of finished groups; None keeps all."""
        self._task, self._codec, self._keys, self._accept = task, codec, keys, accept
        self.spell = codec.spell
        self._ahead: dict[int, tuple[Prompt, array[int]] | TaskFailed] = {}
        self._places = asyncio.Semaphore(keys.task_concurrency)
        self._threads = Threads(MOST_THREADS if keys.agent else keys.task_concurrency)

    @property
    def multi_turn(self) -> bool:
        """Whether the task answers the policy's turns."""
        return isinstance(self._task, MultiTurnTask)

    @property
    def stops(self) -> tuple[tuple[str, ...], tuple[int, ...]]:
        return stops_of(self._task)

    def prompt(self, index: int) -> Prompt:
        """Return the task's prompt: the one that ``ahead`` kept, or a new one."""
        kept = self._ahead.pop(index, None)
        if isinstance(kept, TaskFailed):
            raise kept
        if kept is None:
            return self._made(index)
        prompt, token_ids = kept
        return replace(prompt, token_ids=tuple(token_ids))

    def ahead(self, index: int) -> tuple[Prompt, float] | None:
        """Make a prompt and keep it until ``prompt`` takes it. Return it with the task's estimate
        of the longest completion of its group, in tokens (0.0 without one). None if the task
        fails: then ``prompt`` raises the error."""
        try:
            made = self._made(index)
            expected = self._expected_tokens(made)
        except TaskFailed as failed:
            self._ahead[index] = failed
            return None
        # As a tuple, the tokens of hundreds of long prompts that wait would take 36 bytes each, in
        # all gigabytes.
        self._ahead[index] = replace(made, token_ids=()), array("q", made.token_ids)
        return made, expected

    def _made(self, index: int) -> Prompt:
        try:
            made = self._task.prompt(index, self._codec)
            if not isinstance(made, Prompt):
                raise DataError(f"prompt must return a Prompt, got {made!r:.100}")
            # A task may give a list, or numbers of numpy. What is no number fails here, as the
            # task's error, and not where it is used.
            return replace(made, token_ids=tuple(array("q", made.token_ids)))
        except (Exception, SystemExit) as error:  # the boundary to a user's code: counted or raised
            raise TaskFailed(f"prompt {index}", error) from error

    def _expected_tokens(self, prompt: Prompt) -> float:
        if not hasattr(self._task, "expected_tokens"):
            return 0.0
        try:
            return max(0.0, float(self._task.expected_tokens(prompt)))
        except (Exception, SystemExit) as error:  # the boundary to a user's code: counted or raised
            raise TaskFailed(f"expected_tokens of prompt {prompt.index}", error) from error

    async def turn(self, prompt: Prompt, part: Completion) -> tuple[int, ...] | None:
        """Return the task's answer to the policy's turn, at least one token; None ends the
        episode."""
        if not isinstance(self._task, MultiTurnTask):
            return None
        turns = self._turns(part)
        return await self._call("turn", _tokens, self._task.turn, prompt, turns, self._codec)

    async def rewards(self, prompt: Prompt, completions: Sequence[Completion]) -> list[float]:
        """Return the rewards of a group's finished completions, in their order."""
        if not isinstance(self._task, GroupTask):
            return await at_once([self.reward(prompt, each) for each in completions])
        texts = [self._codec.decode(each.token_ids) for each in completions]
        token_ids = [each.token_ids for each in completions]
        read = partial(_rewards, len(completions))
        return await self._call("reward", read, self._task.group_reward, prompt, texts, token_ids)

    async def reward(self, prompt: Prompt, completion: Completion) -> float:
        """Return the reward of a finished completion, for tasks that reward them one by one."""
        if isinstance(self._task, MultiTurnTask):
            turns = self._turns(completion)
            return await self._call("reward", as_reward, self._task.episode_reward, prompt, turns)
        assert hasattr(self._task, "reward"), "the completions of this task are rewarded together"
        text, token_ids = self._codec.decode(completion.token_ids), completion.token_ids
        return await self._call("reward", as_reward, self._task.reward, prompt, text, token_ids)

    async def agent(self, function: Callable[..., Any], *arguments: Any) -> float | None:
        """Run an agent, without a place and a deadline; return its reward, or None if it returns
        none."""
        return await self._run("agent", _reward, None, function, *arguments)

    async def accepts(self, group: Group) -> bool:
        """Return whether the user's filter keeps a finished, rewarded group."""
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
            return await self._run(what, read, self._keys.task_timeout_s, function, *arguments)

    async def _run(
        self,
        what: str,
        read: Callable[[Any], T],
        timeout_s: float | None,
        function: Callable[..., Any],
        *arguments: Any,
    ) -> T:
        section, clock = self._keys.section, _Clock(timeout_s)
        set_before = _CLOCK.set(clock)
        try:
            async with clock.deadline:
                return read(await call(self._threads, function, *arguments))
        # Not Exception: a user's code may raise a CancelledError of its own, or what a library in
        # Rust raises for a panic.
        except BaseException as error:  # the boundary to a user's code
            running = asyncio.current_task()
            if running is None or running.cancelling():
                # Our cancellation, even if the task raised another error on it.
                raise asyncio.CancelledError from error
            if clock.deadline.expired():
                when = f"in the task's {what}"
                if clock.queued:
                    when = (
                        f"before the task's {what} began: earlier calls, which were cancelled,"
                        " still hold the threads. Let the task's functions end within it, or"
                        f" raise {section}.task_concurrency"
                    )
                error.add_note(f"{section}.task_timeout_s = {timeout_s:g} ran out {when}")
                for note in clock.unfinished:
                    error.add_note(note)
            raise TaskFailed(what, error) from error
        finally:
            _CLOCK.reset(set_before)


class _Clock:
    """Deadline of one call of a task. It starts again when a plain function of the call begins:
    threads may be held by functions of calls that were cancelled. None: no deadline."""

    def __init__(self, seconds: float | None) -> None:
        self._seconds, self.deadline = seconds, asyncio.timeout(seconds)
        self.queued = 0
        """Functions of the call that wait for a thread."""
        self.unfinished: list[str] = []
        """What the call's functions that were cancelled note about themselves."""

    def begin(self) -> None:
        """Start the deadline again, in the loop."""
        self.queued -= 1
        if self._seconds is not None:
            with suppress(RuntimeError):  # the call is over
                self.deadline.reschedule(asyncio.get_running_loop().time() + self._seconds)


_CLOCK: ContextVar[_Clock | None] = ContextVar("clock")
"""Clock of the task's call in whose context ``call`` runs: a task may have threads of its own."""


def as_reward(value: Any) -> float:
    """Return one reward as a float. Raises as ``float``, and TypeError for a text, whose digits
    could be those of an answer."""
    if isinstance(value, str | bytes):
        raise TypeError(f"a reward must be a number, got the text {value!r:.100}")
    return float(value)


def _reward(answer: Any) -> float | None:
    if answer is None:
        return None
    reward = as_reward(answer)
    if not sound_reward(reward):
        raise DataError(f"an agent must return a finite number, got {answer!r:.100}")
    return reward


def in_order(answer: Any) -> Any:
    """Return the elements of an answer: none of a text or a dict, whose digits or keys could be
    taken for rewards, and of a set, which has no order."""
    return [] if isinstance(answer, str | dict | set) else answer


def _rewards(count: int, answer: Any) -> list[float]:
    rewards = [as_reward(each) for each in in_order(answer)]
    if len(rewards) != count:
        raise DataError(f"group_reward must return a list of {count} numbers, got {answer!r:.200}")
    return rewards


def _verdict(answer: Any) -> bool:
    # Compare by ==, not by identity: numpy's True is another object.
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


def unfinished(note: str) -> None:
    """Keep a note on a cancelled part of the task's call, for the error of its deadline."""
    if clock := _CLOCK.get(None):
        clock.unfinished.append(note)


async def call(
    threads: Threads, function: Callable[..., Any], *arguments: Any, **named: Any
) -> Any:
    """Return the function's answer, awaited if it is awaitable."""
    asked = partial(function, *arguments, **named)
    if inspect.iscoroutinefunction(function):
        return await _apart(asked)

    def plain() -> Any:
        try:
            answer = asked()
            # Of ``yield`` or ``map`` the work is still to do: here, not in the loop.
            return list(answer) if isinstance(answer, Iterator) else answer
        except (StopIteration, SystemExit, KeyboardInterrupt) as error:
            # An asyncio future cannot hold StopIteration: its waiter would wait forever. The other
            # two would end the process.
            raise _left(error) from error

    clock = _CLOCK.get(None) or _Clock(None)
    clock.queued += 1
    # no deadline: the caller has one
    answer = await threads.run(plain, clock.begin, clock.deadline.expired)
    # A wrapper of a coroutine function looks like a plain function.
    return await _apart(lambda: answer) if inspect.isawaitable(answer) else answer


async def _apart(asked: Callable[[], Awaitable[Any]]) -> Any:
    """Make a user's awaitable and await it in a task of its own. In ours, a TaskGroup of theirs
    would leave our task marked as cancelled after a member's error (Python 3.11), and ``_call``
    would take their error for our cancellation."""

    async def contained() -> Any:
        try:
            # Asked only here: of a task that is cancelled before it starts, a coroutine would be
            # left that is never awaited. No deadline: the caller has one.
            return await asked()
        except SystemExit as error:
            # It would leave the task and end the loop. KeyboardInterrupt may be a real one here.
            raise _left(error) from error

    # no deadline: the caller has one
    return await asyncio.ensure_future(contained())


def _left(error: BaseException) -> RuntimeError:
    return RuntimeError(f"{type(error).__name__} left the function")


async def at_once(calls: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Return the results in order. The first error cancels the other calls, and is raised once they
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
    """Return the traceback of an error from the user's first frame on, without notes."""
    found = traceback.TracebackException.from_exception(error)
    _strip(found)
    # Drop the header of a traceback without frames.
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
