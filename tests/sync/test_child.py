"""A process beside a rank that ends by itself: the rank hears why."""

import socket
import threading

from titan_grpo.config import WeightSync
from titan_grpo.sync.child import Child, Performer, perform

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


def main(sock: socket.socket, parent: int) -> None:
    """Entry point of the process."""
    perform(sock, parent, Speaker)
