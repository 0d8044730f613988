"""Threads for the plain functions of a task, which may never return."""

import asyncio
import ctypes
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

MOST_THREADS = 10_000
"""Bound on the threads of a task, each made when it is needed, and on those that its agents hold.
It must be far above ``task_concurrency``: an agent whose group waits for a server keeps its thread.
With as few threads as places, those agents could hold all threads while the groups that hold the
servers need them."""


LINES = 1000
"""Lines of Python after which a thread's exception has been raised for certain: the first one that
jumps back raises it."""


def give_loop_threads() -> None:
    """Give the running loop MOST_THREADS for asyncio.to_thread, each made when it is needed. With
    the few of its own, the look-up of a server's name, which asyncio makes in one of them, would
    wait for what a task has put there: no connection is made meanwhile."""
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(MOST_THREADS))


class Overdue(BaseException):
    """Raised in the thread of a plain function that is past its call's deadline."""


class Threads:
    """Threads for plain functions, of which ``most`` run at once. One that is past its call's
    deadline does not count: it is ended at its next line of Python; if it waits in C code, it keeps
    its thread until that returns."""

    def __init__(self, most: int) -> None:
        # Not asyncio.to_thread: its executor has few threads on a small machine.
        self._pool = ThreadPoolExecutor(MOST_THREADS, thread_name_prefix="task")
        self._free = asyncio.Semaphore(most)

    async def run(
        self, function: Callable[[], Any], begin: Callable[[], None], expired: Callable[[], bool]
    ) -> Any:
        """Return the function's answer. ``begin`` is called when it begins; ``expired``: whether
        its call is past the deadline, asked when it is cancelled. Raises what the function does,
        and RuntimeError if the host has no thread left."""
        # no deadline: the caller has one
        await self._free.acquire()
        begin()
        run, loop = _Run(function), asyncio.get_running_loop()

        def free() -> None:
            if run.counted:
                run.counted = False
                self._free.release()

        def ended(_: object) -> None:
            with suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(free)

        try:
            work = self._pool.submit(run)
            work.add_done_callback(ended)
            # no deadline: the caller has one
            return await asyncio.wrap_future(work)
        except asyncio.CancelledError:
            if expired():
                run.end()
                free()
            raise
        except RuntimeError:  # the host has no thread left; or the function raised it
            free()
            raise


class _Run:
    """Run of a plain function in a thread."""

    def __init__(self, function: Callable[[], Any]) -> None:
        self._function, self._thread, self._lock = function, 0, threading.Lock()
        self._over, self.counted = False, True

    def __call__(self) -> Any:
        with self._lock:
            self._thread = threading.get_ident()
        try:
            return self._function()
        finally:
            with self._lock:
                self._thread = 0
            if self._over:
                # If it has not been raised yet, raise it here, and not in the thread's next
                # function. Not PyThreadState_SetAsyncExc without an exception: Python 3.11 would
                # look for one for ever, and hang in a traced call.
                with suppress(Overdue):
                    for _ in range(LINES):
                        pass

    def end(self) -> None:
        """End the function at its next line of Python, if it still runs: one that computes for ever
        would slow down all others. From another thread, once."""
        with self._lock:
            if self._thread:
                self._over = True
                ctypes.pythonapi.PyThreadState_SetAsyncExc(
                    ctypes.c_ulong(self._thread), ctypes.py_object(Overdue)
                )
