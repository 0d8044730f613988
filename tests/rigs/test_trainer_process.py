"""The clock with which a fault run takes its steps apart."""

import threading
import time
from collections.abc import Callable

from tests.rigs.trainer_handle import Step
from tests.rigs.trainer_process import ThreadClock

STEPS, WAIT_S = 60, 0.001


def slept(work: Callable[[], object]) -> list[float]:
    """What steps of that work waited for other things than a core, from the shortest on."""
    clock, found = ThreadClock(), []
    for _ in range(STEPS):
        start, before = time.perf_counter(), clock.read()
        work()
        wall, after = time.perf_counter() - start, clock.read()
        found.append(Step(start, wall, after[1] - before[1], 0.0, after[0] - before[0]).slept)
    return sorted(found)


def compute() -> None:
    for _ in range(30):
        sum(range(10_000))


def test_a_step_that_only_computes_has_waited_for_nothing() -> None:
    # A quarter may have lost its core while the clock was read.
    assert slept(compute)[STEPS * 3 // 4] < WAIT_S / 5


def test_a_step_that_waits_has_waited_that_long() -> None:
    never = threading.Event()

    def compute_and_wait() -> None:
        compute()
        never.wait(WAIT_S)

    assert WAIT_S <= slept(compute_and_wait)[STEPS // 2] < 5 * WAIT_S
