"""Turns of the lanes that commit."""

import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from titan_grpo.protocol.lane import AT_WORK
from titan_grpo.sync import turns
from titan_grpo.sync.turns import Turns

WAIT_S = 60.0
LONG_S = 3600.0


@pytest.fixture
def full(monkeypatch: pytest.MonkeyPatch) -> Turns:
    """As many lanes as may be are at work, for as long as the test goes on."""
    monkeypatch.setattr(turns, "TURN_S", LONG_S)
    made = Turns()
    for lane in range(AT_WORK):
        made.wait(f"at work {lane}")
    return made


def waiting(made: Turns, url: str) -> Future[None]:
    """A lane on a thread of its own; one that nothing lets go on ends with the test's process."""
    begun: Future[None] = Future()

    def run() -> None:
        made.wait(url)
        begun.set_result(None)

    threading.Thread(target=run, daemon=True).start()
    return begun


def test_a_lane_begins_when_one_that_is_at_work_ends(full: Turns) -> None:
    begun = waiting(full, "next")
    full.go_on("at work 0")  # its server is loaded: it is one of them still
    assert not begun.done()
    full.end("at work 0")
    begun.result(WAIT_S)


def test_a_lane_whose_server_is_paused_goes_on_and_those_that_wait_begin_later(
    full: Turns,
) -> None:
    full.end("at work 0")
    full.go_on("loaded")
    begun = waiting(full, "next")
    full.end("at work 1")
    begun.result(WAIT_S)


def test_servers_that_stand_still_hold_no_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "TURN_S", 0.01)
    made, began = Turns(), time.monotonic()
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(made.wait, [f"frozen {lane}" for lane in range(5 * AT_WORK)]))
    assert time.monotonic() - began >= 4 * 0.01
