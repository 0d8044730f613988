"""The engine's half of a windowed transfer, on a thread beside the lane that sends."""

import threading
from typing import TYPE_CHECKING

from titan_grpo.engines.control import ServerControl
from titan_grpo.errors import PeerError, TransferFailed
from titan_grpo.protocol.messages import Applied, Staged

if TYPE_CHECKING:
    from titan_grpo.sync.link import LaneLink


class LoadCall(threading.Thread):
    """The server's load call and the engine's report, while the lane sends. A load that fails ends
    the sending too."""

    def __init__(
        self, link: "LaneLink", control: ServerControl, staged: Staged, report_s: float
    ) -> None:
        super().__init__(name=f"load {control.url}", daemon=True)
        self._link, self._control, self._staged, self._report_s = link, control, staged, report_s
        self._applied: Applied | None = None
        self._error: PeerError | None = None

    def run(self) -> None:
        """Load, read the report."""
        try:
            self._control.load(self._link.commit(self._staged).to_dict())
            self._applied = self._link.wait_applied(self._staged.number, self._report_s)
        except PeerError as error:
            self._error = error
        if self._applied is None or not self._applied.ok:
            self._link.cancel()

    def result(self, timeout_s: float) -> Applied:
        """The report; PeerError if there is none: the engine's version is unknown then."""
        self.join(timeout_s)
        if self._error is not None:
            raise self._error
        if self._applied is None:
            raise TransferFailed(
                f"the load call of transfer {self._staged.number} did not end within"
                f" {timeout_s:.1f} s"
            )
        return self._applied
