"""A lane's link to a server without our plugin: streamed apply over the engine's own update route.

Unlike LaneLink it cannot check digests at the server, fence a replaced trainer, or keep the old
version whole. So it labels the server "unusable" before the first weight is touched, and the lane
sets the real label after the last one: a server labelled "unusable" needs a whole version.
"""

import threading
import time
from contextlib import suppress

import torch
import torch.distributed as dist

from titan_grpo.engines.server import ServerControl
from titan_grpo.engines.sglang_stock import Announced, Group, StockRoutes
from titan_grpo.errors import PeerError, ServerUnfit, TransferFailed
from titan_grpo.layout.manifest import Manifest, TensorSpec, buckets, names_problem
from titan_grpo.protocol.messages import UNUSABLE, Applied, Joined, Staged
from titan_grpo.sync.link import LinkOptions, Moved, answer_s
from titan_grpo.sync.transports.broadcast import (
    Transport,
    TransportOptions,
    beside,
    host_store,
    open_transport,
    outcome,
)

TRAINER_RANK = 0

OPEN_S = 20.0
"""Longest wait for a server's workers to join a group, in seconds; they do not generate then."""


class StockLink:
    """One epoch with a stock SGLang server: join, send_manifest, any number of offer + push + ping,
    close.

    Each transfer has a process group of its own. The server leaves the group after the read-back;
    that it can proves that it has not restarted meanwhile. Used by one thread, except ``cancel``
    and ``abort``.
    """

    def __init__(
        self, run_id: str, epoch: int, manifest: Manifest, options: LinkOptions, routes: StockRoutes
    ) -> None:
        self._run_id, self._epoch, self._manifest = run_id, epoch, manifest
        self._options, self._routes = options, routes
        self._transfer_s = options.config.transfer_s(manifest.total_bytes)
        self._lock = threading.Lock()
        self._aborted = False
        self._transport: Transport | None = None
        self._group = ""
        """Name of the group that the server may still be in."""
        self._intact = True
        self._workers = 0

    def join(self, control: ServerControl, timeout_s: float) -> Joined:
        """Read the workers and the label; return an answer with no version held. ``intact`` comes
        from the label. Its version is ignored, because a restarted server accepts a label without
        an update: every connection sends a whole version. Raises ServerUnfit with a run key or
        NCCL, and as ``world_size``."""
        if self._options.run_key is not None:
            raise ServerUnfit(
                f"{control.url}: this run has a run key, and a server without our plugin can"
                " neither prove it nor ask for it: install titan_grpo there, or run without a key"
            )
        if self._options.transport == "nccl":
            # torch opens its communicator with the first broadcast, which we announce only over an
            # open one.
            raise ServerUnfit(
                f"{control.url}: weight_sync.transport is nccl, which a server without our plugin"
                " does not open before its first tensor comes: install titan_grpo there, or use"
                ' transport = "auto"'
            )
        self._workers = self._routes.workers(timeout_s)
        self._intact = control.label() != UNUSABLE
        return Joined(True, "", "stock", 0, "", -1, "", self._intact)

    def send_manifest(self, _: object = None) -> Staged:
        """Compare the parameter names: SGLang ignores unknown ones and reports success."""
        theirs = self._routes.parameter_names(self._options.config.lane_deadline_s)
        problem = names_problem([spec.name for spec in self._manifest.tensors], theirs)
        return Staged(0, 0, not problem, "", error=problem)

    def offer(self, number: int, version: int, digests: bytes, fingerprint: str) -> Staged:
        """Open the group of one transfer; the server generates nothing meanwhile (a fraction of a
        second)."""
        o, timeout_s = self._options, min(OPEN_S, self._options.config.lane_deadline_s)
        host = host_store(o.bind_host)
        name = f"titan_grpo-{self._run_id}-{self._epoch}-{number}"
        size = 1 + self._workers
        group = Group(name, o.bind_host, host.port, size, o.transport)
        # On another thread: the server answers when all ranks are there, and this is the last one.
        joining = beside(lambda: self._routes.init_group(group, timeout_s), "join", self.cancel)
        # The server's torch nests the prefixes like this, and looks for rank 0 there.
        store = dist.PrefixStore("cpu/", dist.PrefixStore(f"{name}/", dist.PrefixStore(name, host)))
        options = TransportOptions(timeout_s, o.bind_host, o.config.bucket_bytes, o.device)
        try:
            transport = open_transport(o.transport, store, TRAINER_RANK, size, options)
        except TransferFailed:
            # Of two errors the server's is the cause: raise that, if it has refused.
            if joining.done():
                outcome(joining, 0.0, "the server's joining of a group")
            raise
        with self._lock:
            # an abort before this line found no transport to abort
            self._transport, self._group, aborted = transport, name, self._aborted
        if aborted:
            transport.abort()
        outcome(joining, timeout_s, "the server's joining of a group")
        return Staged(number, version, True, fingerprint)

    def push(
        self,
        control: ServerControl,
        staged: Staged,
        image: torch.Tensor,
        moved: Moved,
        commit_deadline_s: float,
    ) -> Applied:
        """Send ``image`` (uint8[total_bytes]) into the paused engine, bucket by bucket. Return how
        that ended, also on a PeerError."""
        start, done = time.monotonic(), 0
        deadline = start + self._transfer_s
        try:
            # Before the first weight: if this trainer dies, the label must not hide a half load.
            control.relabel(UNUSABLE)
            # From here on also without a tensor: as the update ends, SGLang repacks weights, and
            # some layers bear that only after a load.
            self._intact = False
            self._routes.begin(self._options.config.lane_deadline_s)
            for bucket in buckets(self._manifest, self._options.config.bucket_bytes):
                self._send(bucket, image, deadline)
                done += len(bucket)
                moved(bucket[-1].offset + bucket[-1].nbytes)
        except PeerError as error:
            self._drop()
            why = f"{error}; {done} of {len(self._manifest.tensors)} tensors were loaded"
            took = time.monotonic() - start
            return Applied(staged.number, staged.version, False, "", done, took, why, self._intact)
        moved(self._manifest.total_bytes)
        self._intact = True
        took = time.monotonic() - start
        return Applied(
            staged.number, staged.version, True, staged.fingerprint, done, took, "", True, took
        )

    def ping(self, number: int, timeout_s: float) -> None:
        """Make the server leave the transfer's group. Raises ServerRefused if it does not have the
        group: it has restarted, or has left it before."""
        self._drop()
        self._routes.destroy_group(self._group, timeout_s)
        self._group = ""

    def bye(self, timeout_s: float) -> None:
        """Do nothing: there is no receiver."""

    def cancel(self) -> None:
        """End a transfer: its connections close, so the server refuses its update. Any thread;
        idempotent."""
        with self._lock:
            transport = self._transport
        if transport is not None:
            transport.abort()

    def abort(self) -> None:
        """``cancel`` this transfer and all later ones."""
        with self._lock:
            self._aborted = True
        self.cancel()

    def close(self) -> None:
        """Close group and connections. Idempotent."""
        try:
            self._drop()
            group, self._group = self._group, ""
            if group:
                # SGLang keeps a failed transfer's group until it is destroyed: one per retry.
                with suppress(PeerError):
                    self._routes.destroy_group(
                        group, answer_s(self._options.config.commit_deadline_s)
                    )
        finally:
            self._routes.close()

    def _send(self, bucket: tuple[TensorSpec, ...], image: torch.Tensor, deadline: float) -> None:
        """Make one announced broadcast. A refused request aborts it: without readers it hangs."""
        left = deadline - time.monotonic()
        transport = self._transport
        if left <= 0 or transport is None:
            raise TransferFailed(
                f"a transfer must end within {self._transfer_s:.0f} s"
                " (weight_sync.lane_deadline_s, and the bytes at min_rate)"
            )
        shapes = [spec.shape for spec in bucket]
        announced = Announced(
            [spec.name for spec in bucket], [spec.dtype for spec in bucket], shapes
        )
        # On another thread: the server answers when it has the bytes, which this thread sends.
        update = beside(
            lambda: self._routes.update(self._group, announced, left), "load", transport.abort
        )
        failure: TransferFailed | None = None
        try:
            transport.broadcast(
                image[bucket[0].offset : bucket[-1].offset + bucket[-1].nbytes], left
            )
        except TransferFailed as error:
            failure = error
            self._drop()  # ends the server's update with a refusal, which has the cause
        outcome(update, max(1.0, deadline - time.monotonic()), "the server's update")
        if failure is not None:
            raise failure

    def _drop(self) -> None:
        with self._lock:
            transport, self._transport = self._transport, None
        if transport is not None:
            transport.close()
