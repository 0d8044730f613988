"""A source of ranges that serves the next range only when a test lets it."""

import selectors

from titan_grpo.sync.transports.range_server import RangeServer, _Peer


class PacedSource(RangeServer):
    """Serves one range, and a further one for each ``go``. For a reader with one connection. The
    thread goes on meanwhile: it carries the lane's messages too."""

    def __init__(self) -> None:
        super().__init__()
        self._allowed = 1
        self._held: tuple[_Peer, bytes] | None = None

    def go(self) -> None:
        """Let one more range through."""
        with self._lock:
            self._allowed += 1
            self._wake()

    def _range(self, peer: _Peer, message: bytes) -> bool:
        with self._lock:
            if self._allowed == 0:
                self._held = peer, message
                return True  # nothing to send yet
            self._allowed -= 1
        return super()._range(peer, message)

    def _tidy(self, selector: selectors.BaseSelector) -> None:
        super()._tidy(selector)
        with self._lock:
            held, self._held = (self._held, None) if self._allowed else (None, self._held)
        if held is not None:
            self._range(*held)
            self._serve(selector, held[0])
