"""Calling a user's code: plain functions in threads, coroutines in the loop; and the traceback of
their errors without our own frames."""

import asyncio
import inspect
import re
import traceback
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import dropwhile
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")

HERE, LIBRARY = Path(__file__).resolve().parent, Path(asyncio.__file__).resolve().parents[1]

BETWEEN = tuple(
    str(path)
    for path in (
        HERE / "calls.py",
        HERE / "task_runner.py",
        HERE / "tasks" / "functions.py",
        LIBRARY / "asyncio",
        LIBRARY / "concurrent" / "futures",
    )
)
"""What is between the loop and a user's code."""


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
