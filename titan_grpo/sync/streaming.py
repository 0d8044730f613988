"""Committing a version that is not staged anywhere: the bytes go while the engine loads them."""

import threading
from collections.abc import Callable

import torch

from titan_grpo.config import WeightSync
from titan_grpo.engines.control import ServerControl
from titan_grpo.errors import PeerError, TransferFailed
from titan_grpo.protocol.messages import Applied, Staged
from titan_grpo.sync.link import LaneLink, answer_s
from titan_grpo.sync.stock import StockLink


class LoadCall(threading.Thread):
    """The server's load call and the engine's report, while the lane sends. A load that failed ends
    the sending too."""

    def __init__(
        self, link: LaneLink, control: ServerControl, staged: Staged, report_s: float
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
        """The report; PeerError if there is none: nothing is known about the engine then."""
        self.join(timeout_s)
        if self._error is not None:
            raise self._error
        if self._applied is None:
            raise TransferFailed(
                f"the load call of transfer {self._staged.number} did not end within"
                f" {timeout_s:.1f} s"
            )
        return self._applied


def load_while_sending(
    link: LaneLink | StockLink,
    control: ServerControl,
    staged: Staged,
    image: torch.Tensor,
    config: WeightSync,
    moved: Callable[[int], object],
) -> Applied:
    """Send ``image`` (uint8[total_bytes]) through the window that ``staged`` offers, into the
    paused engine.

    ``moved`` is told the number of bytes that are through, after each bucket.

    The engine's report also when the sending failed, so that the lane can tell whether the engine
    is intact. PeerError if there is no report.
    """
    if isinstance(link, StockLink):
        return link.push(control, staged, image, moved)
    call = LoadCall(link, control, staged, answer_s(config.commit_deadline_s))
    call.start()
    try:
        link.stream(image, moved)
    except TransferFailed as error:
        link.cancel()
        failure: TransferFailed | None = error
    else:
        failure = None
    # start and finish of an update, the load itself and the report: each of them has its own
    # deadline
    applied = call.result(config.lane_deadline_s + 5 * config.commit_deadline_s)
    if failure is not None and applied.ok:
        raise failure  # not possible unless the two ends disagree about the bytes
    return applied
