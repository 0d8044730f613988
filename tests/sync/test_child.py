"""A process beside a rank: the rank hears why it ends by itself, and an order reaches a lane."""

import signal
import socket
import threading
from pathlib import Path
from typing import Any, cast

from tests.rigs.trainer_handle import wait_until
from tests.sync.conftest import Lane
from titan_grpo.config import WeightSync
from titan_grpo.subprocesses import ENDING
from titan_grpo.sync.child import Child, Performer, perform
from titan_grpo.sync.process import Main, RemoteLane
from titan_grpo.unix_rpc import Pipe

WORDS = 2000
"""More than its pipe has sent by the time that it ends."""

WAIT_S = 120.0


class Speaker(Performer):
    """The process's object."""

    def begin(self) -> None:
        for word in range(WORDS):
            self._pipe.post("hear", word)
        self.exit()


class Listener(Child):
    """The rank's end."""

    MODULE = __name__
    NAME = "speaker"

    def __init__(self) -> None:
        super().__init__(WeightSync())
        self.heard: list[int] = []
        self.over = threading.Event()
        self._begun = True
        self._run(self.launch(self._config))

    def hear(self, word: int) -> None:
        self.heard.append(word)

    def _begin(self) -> None:
        self._pipe.post("begin")

    def _ended(self, text: str) -> None:
        self._ending.set()  # no other process is started
        self.over.set()


def test_what_a_process_says_before_it_ends_arrives() -> None:
    listener = Listener()
    assert listener.over.wait(WAIT_S)
    assert listener.heard == list(range(WORDS))


class Stuck(Lane):
    """Ends when it is aborted, and not before."""

    def abort(self) -> None:
        self._held.set()


def test_an_order_to_abort_a_lane_ends_the_one_that_is_stuck_and_no_other() -> None:
    here, there = socket.socketpair()
    process, rank = Main(there), Pipe(here, None)
    lanes: Any = {url: Stuck(url, 0, threading.Event()) for url in ("a", "b")}
    process._servers = lanes
    running = threading.Thread(target=process.run, daemon=True)
    running.start()
    for lane in lanes.values():
        lane.start()
        lane.stop()
    rank.start()
    for url in ("gone", "a"):
        RemoteLane(cast(Any, rank), url, 0).abort()
    lanes["a"].join(WAIT_S)
    assert [lane.is_alive() for lane in lanes.values()] == [False, True]
    lanes["b"].abort()
    for end in (rank, process._pipe):
        end.close(WAIT_S)
    rank._connection.close()
    running.join(WAIT_S)
    assert not running.is_alive()


def test_a_signal_to_the_trainers_group_does_not_end_a_process_that_still_loads_its_modules() -> (
    None
):
    """torchrun's SIGTERM ended the sync process of a run that had just begun, and summary.json had
    an error of it."""
    # A shell that started the tests in the background made them ignore SIGINT, the last one that
    # the process ignores, and that is inherited.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    process, sock = Listener.launch(WeightSync())
    signal.signal(signal.SIGINT, before)
    status = Path(f"/proc/{process.pid}/status")

    def ignored() -> set[int]:
        (mask,) = (s for s in status.read_text().splitlines() if s.startswith("SigIgn:"))
        return {number for number in signal.Signals if int(mask.split()[1], 16) >> number - 1 & 1}

    try:
        assert wait_until(lambda: signal.SIGINT in ignored(), WAIT_S)
        assert ignored() >= set(ENDING)
    finally:
        process.kill()
        process.wait(WAIT_S)
        sock.close()


def main(sock: socket.socket, parent: int) -> None:
    """Entry point of the process."""
    perform(sock, parent, Speaker)
