"""Calling a user's code: plain functions in threads, coroutines in the loop; and the traceback of
their errors without our own frames."""

import asyncio
import inspect
import re
import traceback
from collections.abc import Callable, Coroutine, Sequence
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
        return await function(*arguments, **named)

    def plain() -> Any:
        try:
            return function(*arguments, **named)
        except (StopIteration, SystemExit, KeyboardInterrupt) as error:
            # A future cannot hold the first, whose waiter would wait forever; the others would
            # end the process.
            raise RuntimeError(f"{type(error).__name__} left the function") from error

    answer = await asyncio.get_running_loop().run_in_executor(threads, plain)
    # A wrapper of a coroutine function looks like a plain function.
    return await answer if inspect.isawaitable(answer) else answer


async def at_once(calls: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """The results, in their order. The first error cancels the other calls, and is raised once they
    have ended."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(call) for call in calls]
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from None
    # no deadline: the tasks have ended with their group
    return [task.result() for task in tasks]


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
