"""A source of ranges that serves the next range only when a test lets it."""

import threading

from titan_grpo.sync.transports.range_server import RangeServer, _Peer


class PacedSource(RangeServer):
    """Serves one range, and a further one for each ``go``. For a reader with one connection."""

    def __init__(self, wait_s: float) -> None:
        """``wait_s``: after so long without ``go`` it serves all the same, and the test fails."""
        super().__init__()
        self._wait_s, self._turns = wait_s, threading.Semaphore(1)

    def go(self) -> None:
        """Let one more range through."""
        self._turns.release()

    def _range(self, peer: _Peer, message: bytes) -> bool:
        self._turns.acquire(timeout=self._wait_s)
        return super()._range(peer, message)
