"""Plain functions of a task in threads: those that are cancelled, late, or never return."""

import asyncio
import sys
import threading

import pytest

from tests.rollout.sampling import DONE, PROMPT, runner
from titan_grpo.rollout.task_runner import TaskFailed


def test_a_plain_function_that_computes_for_ever_is_ended_at_its_deadline() -> None:
    """It would take half of the interpreter's time from all others."""
    ended = threading.Event()

    def endless(*_: object) -> None:
        try:
            while True:
                pass
        finally:
            ended.set()

    with pytest.raises(TaskFailed, match="reward failed: TimeoutError"):
        asyncio.run(runner(endless, timeout_s=0.2).reward(PROMPT, DONE))
    assert ended.wait(60)
    # An interpreter that is still to look for an exception hangs in a traced call (Python 3.11).
    before = sys.gettrace()
    sys.settrace(lambda *_: None)
    try:
        assert ended.is_set()
    finally:
        sys.settrace(before)


def test_a_plain_function_that_never_returns_takes_no_later_calls_place() -> None:
    leave, waits = threading.Event(), iter((True, False))

    def reward(*_: object) -> float:
        if next(waits):
            leave.wait(60)
        return 0.5

    async def run() -> float:
        one = runner(reward, limit=1, timeout_s=1.5)
        with pytest.raises(TaskFailed, match="reward failed: TimeoutError"):
            await one.reward(PROMPT, DONE)
        return await one.reward(PROMPT, DONE)

    try:
        assert asyncio.run(run()) == 0.5
    finally:
        leave.set()


@pytest.mark.parametrize("ends", [False, True])
def test_a_call_that_waits_for_the_thread_of_a_cancelled_one_has_its_own_deadline_and_blame(
    ends: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    leave = [threading.Event(), threading.Event()]

    async def run() -> float:
        loop, count, later_s = asyncio.get_running_loop(), iter((0, 1)), 0.0
        begun = [asyncio.Event(), asyncio.Event()]

        def reward(*_: object) -> float:
            number = next(count)
            loop.call_soon_threadsafe(begun[number].set)
            leave[number].wait(60)
            return 0.5

        async def pass_s(seconds: float) -> None:
            nonlocal later_s
            later_s += seconds
            for _ in range(5):  # callbacks that are due, and those that follow them
                await asyncio.sleep(0)

        real = loop.time
        monkeypatch.setattr(loop, "time", lambda: real() + later_s)
        one = runner(reward, limit=1, timeout_s=1000.0)
        calls = [asyncio.create_task(one.reward(PROMPT, DONE))]
        await begun[0].wait()
        calls[0].cancel()
        await asyncio.wait(calls)
        calls.append(asyncio.create_task(one.reward(PROMPT, DONE)))
        await pass_s(0.0)  # it waits for the thread
        await pass_s(900.0)
        if ends:
            leave[0].set()
            await begun[1].wait()
        await pass_s(900.0)
        leave[1].set()
        return await calls[1]

    try:
        if ends:
            assert asyncio.run(run()) == 0.5
        else:
            with pytest.raises(TaskFailed, match=r"ran out before the task's reward began.*raise"):
                asyncio.run(run())
    finally:
        for event in leave:
            event.set()
