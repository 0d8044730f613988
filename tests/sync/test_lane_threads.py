"""Threads of lanes: one while a lane works, none while it is idle."""

import queue
import threading
import time
from collections.abc import Iterator

import pytest

from titan_grpo.sync.lane import ServerLane
from titan_grpo.sync.lanes import LaneThreads

WAIT_S = 90.0
LATER_S = 3600.0


class Lane(ServerLane):
    """A lane whose work is what the test puts into its queue: seconds until it goes on, or None."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.outcomes: queue.Queue[float | None] = queue.Queue()
        self.calls: queue.Queue[threading.Thread] = queue.Queue()

    def work(self) -> float | None:
        self.calls.put(threading.current_thread())
        again_s = self.outcomes.get(timeout=WAIT_S)
        return None if again_s is None else time.monotonic() + again_s

    def called(self) -> threading.Thread:
        return self.calls.get(timeout=WAIT_S)


@pytest.fixture
def threads() -> Iterator[LaneThreads]:
    made = LaneThreads()
    yield made
    made.close()


def test_a_lane_that_is_woken_works_on_a_thread_that_ends_with_the_work(
    threads: LaneThreads,
) -> None:
    lane = Lane("http://a")
    for _ in range(2):
        threads.wake(lane)
        thread = lane.called()
        assert thread.name == "lane http://a"
        lane.outcomes.put(LATER_S)
        thread.join(WAIT_S)
        assert not thread.is_alive()


def test_a_lane_goes_on_when_its_time_has_come(threads: LaneThreads) -> None:
    lane = Lane("a")
    lane.outcomes.put(0.0)
    threads.wake(lane)
    lane.called()
    lane.called()
    lane.outcomes.put(None)


def test_a_wake_that_comes_while_a_lane_works_has_it_work_again_and_not_twice_at_once(
    threads: LaneThreads,
) -> None:
    lane = Lane("a")
    threads.wake(lane)
    first = lane.called()
    threads.wake(lane)
    threads.wake(lane)
    assert lane.calls.empty()
    lane.outcomes.put(LATER_S)
    first.join(WAIT_S)
    lane.called()
    lane.outcomes.put(None)


def test_a_lane_whose_server_stands_still_holds_up_no_other(threads: LaneThreads) -> None:
    stuck, other = Lane("stuck"), Lane("other")
    threads.wake(stuck)
    stuck.called()
    threads.wake(other)
    other.called()
    other.outcomes.put(None)
    stuck.outcomes.put(None)


def test_a_lane_that_has_ended_is_forgotten_though_it_was_woken_meanwhile(
    threads: LaneThreads,
) -> None:
    lane, other = Lane("a"), Lane("b")
    threads.wake(lane)
    thread = lane.called()
    threads.wake(lane)
    lane.outcomes.put(None)
    thread.join(WAIT_S)
    threads.wake(other)
    other.called()
    other.outcomes.put(None)
    assert lane.calls.empty()
