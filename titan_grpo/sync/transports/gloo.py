"""Broadcast over TCP with gloo, straight out of and into the image: no copy on either side."""

import threading
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist

from titan_grpo.errors import TransferFailed
from titan_grpo.sync.transports.base import Completion, Transport, TransportOptions

REAP_SLACK_S = 5.0
"""How much longer than its own deadline a reaper waits for an abandoned operation, in seconds."""


class GlooTransport(Transport):
    """A ProcessGroupGloo of its own, outside torch.distributed's registry, bound to one
    interface."""

    def __init__(self, store: dist.Store, rank: int, size: int, options: TransportOptions) -> None:
        """Connect all ranks through ``store``; TransferFailed if one is missing past
        ``options.timeout_s``."""
        self._lock = threading.Lock()
        self._aborted = False
        self._pending: Completion | None = None
        self._work: dist.Work | None = None
        self._deadline_s = options.timeout_s
        try:
            gloo = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
            gloo._timeout = timedelta(seconds=options.timeout_s)
            gloo._threads = 1  # one operation at a time; more threads would only wait
            gloo._devices = [
                dist.ProcessGroupGloo.create_device(hostname=options.bind_host, lazy_init=False)
            ]
            self._group: dist.ProcessGroupGloo | None = dist.ProcessGroupGloo(
                store, rank, size, gloo
            )
        except RuntimeError as error:
            raise TransferFailed(
                f"gloo on {options.bind_host} did not connect {size} ranks within"
                f" {options.timeout_s} s: {_line(error)}"
            ) from error

    def broadcast(self, view: torch.Tensor, timeout_s: float) -> None:
        """See Transport. A peer that expects another length is not noticed here: its process aborts
        (gloo's rule)."""
        completion = self._begin()
        try:
            options = dist.BroadcastOptions()
            options.rootRank = 0
            options.timeout = timedelta(seconds=timeout_s)
            work = self._open_group().broadcast([view], options)  # type: ignore[attr-defined]
            self._work = work
            # The future wakes us; Work.wait() could not be left by an abort (gloo's own abort does
            # not end it).
            work.get_future().add_done_callback(lambda _: completion.done())
            if not completion.wait(timeout_s) or completion.aborted:
                self._fail_late(completion, timeout_s)
            # no deadline: the work has completed: its future was waited for with a deadline
            work.wait()
        except RuntimeError as error:
            raise TransferFailed(
                f"gloo broadcast of {view.numel()} bytes failed: {_line(error)}"
            ) from error
        self._work = None
        self._pending = None

    def abort(self) -> None:
        """See Transport. The abandoned operation ends by its own deadline, or when ``close`` was
        called and the peer goes."""
        with self._lock:
            self._aborted = True
            pending = self._pending
        if pending is not None:
            pending.abort()

    def close(self) -> None:
        """See Transport. An operation still in flight is left to a daemon thread: the group's
        destructor would block on it."""
        group, work, self._group, self._work = self._group, self._work, None, None
        if work is not None and not work.is_completed():
            _reap(group, work, self._deadline_s + REAP_SLACK_S)

    def _begin(self) -> Completion:
        completion = Completion()
        with self._lock:  # an abort either sees this operation or is seen by it
            if self._aborted:
                raise TransferFailed("the transport was aborted")
            self._pending = completion
        return completion

    def _open_group(self) -> dist.ProcessGroupGloo:
        if self._group is None:
            raise TransferFailed("the transport is closed")
        return self._group

    def _fail_late(self, completion: Completion, timeout_s: float) -> None:
        if completion.aborted:
            raise TransferFailed("the transport was aborted during a broadcast")
        raise TransferFailed(
            f"a gloo broadcast must end within {timeout_s:.1f} s; the peer stalls or the network is"
            " too slow"
        )


def _line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _reap(group: dist.ProcessGroupGloo | None, work: dist.Work, timeout_s: float) -> None:
    finished = threading.Event()
    work.get_future().add_done_callback(lambda _: finished.set())
    target: Callable[[], None] = lambda: _hold(group, work, finished, timeout_s)  # noqa: E731
    threading.Thread(target=target, name="gloo-reaper", daemon=True).start()


def _hold(
    group: dist.ProcessGroupGloo | None,
    work: dist.Work,
    finished: threading.Event,
    timeout_s: float,
) -> None:
    """Keep group, work and the tensors in it alive until the operation ended; the references go
    with this frame."""
    finished.wait(timeout_s)
