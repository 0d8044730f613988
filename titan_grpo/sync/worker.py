"""Rank 0's half of the sync: seals images (all ranks' bytes are there, blocks hashed) and runs one
lane per server.

Servers may be added and removed at any time, by one thread that is not the trainer's main thread.

::

    main thread --publish--> [queue] --sealer--> slots --pin--> lane --> server
        ^                                          |
        `------------- reserved slot <-------------'
"""

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta

import torch.distributed as dist

from titan_grpo.engines.control import ServerControl
from titan_grpo.errors import ProtocolError, SyncError, TitanGrpoError
from titan_grpo.layout.digest import block_digests, fingerprint
from titan_grpo.layout.image import SharedImage
from titan_grpo.observe import names
from titan_grpo.protocol.ledger import Entry
from titan_grpo.protocol.messages import Label
from titan_grpo.sync.lane import LaneContext, LaneThread
from titan_grpo.sync.publisher import copied_key
from titan_grpo.sync.slots import Published
from titan_grpo.sync.snapshot import Copy
from titan_grpo.sync.transports.store import store_errors

logger = logging.getLogger(__name__)

JOIN_S = 10.0
"""How long the end waits for all threads that have been told to stop, in seconds, where no flush
set a deadline."""

LEAST_S = 1.0
"""What the threads get at least, if the flush used its deadline up, in seconds."""

BindHost = Callable[[str], str]
"""Server URL -> address of this host that the sockets of its lane bind to."""


@dataclass(frozen=True, slots=True)
class _Job:
    version: int
    slot: int
    copy: Copy | None
    published_s: float


class SyncWorker:
    """Owned by rank 0. ``publish`` and ``take_slot`` are for the main thread and never wait."""

    def __init__(
        self,
        context: LaneContext,
        images: Sequence[SharedImage],
        store: dist.Store,
        remote_writers: Sequence[int],
        bind_host: BindHost | None = None,
    ) -> None:
        """``store`` carries the other writers' notices (``remote_writers``, global ranks) that
        their bytes are there. Without a ``bind_host`` all lanes bind to the one in
        ``context.link``."""
        self._c = context
        self._bind_host = bind_host
        self._images = images
        self._block_key = context.link.block_key(context.run_id)
        self._store = store
        self._remote = tuple(remote_writers)
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._sealer = threading.Thread(target=self._seal_loop, name="sealer", daemon=True)
        self._membership = threading.Lock()
        self._lanes: dict[str, LaneThread] = {}
        self._epochs: dict[str, int] = {}
        self._left_s = JOIN_S

    def start(self, controls: Sequence[ServerControl]) -> None:
        """Start the sealer and one lane per server. The fleet knows these servers from the
        beginning."""
        self._sealer.start()
        for control in controls:
            self._open_lane(control)

    def _open_lane(self, control: ServerControl) -> None:
        context = self._c
        if self._bind_host is not None:
            context = replace(
                context, link=replace(context.link, bind_host=self._bind_host(control.url))
            )
        context.recorder.known_server(control.url)
        with self._membership:
            # A receiver refuses an epoch that it has seen: the lanes of a server that comes back
            # count on.
            lane = self._lanes[control.url] = LaneThread(
                context, control, self._epochs.get(control.url, 0)
            )
        lane.start()

    # The members thread: servers that come and go.

    def add(self, control: ServerControl) -> None:
        """A server joins: it is given no rollout before it was read back with a version. Does not
        wait for it.

        Raises ProtocolError if it has a lane.
        """
        with self._membership:
            if control.url in self._lanes:
                raise ProtocolError(
                    f"{control.url} was added while its last lane goes on:"
                    f" {self._lanes[control.url]!r}"
                )
        self._c.fleet.add(control.url)
        self._open_lane(control)

    def remove(self, url: str) -> None:
        """A server leaves: its lane is stopped and waited for, then the fleet forgets the server.

        A transfer is aborted, a commit that has begun is finished: its server would stay paused.
        Bounded by a commit's own deadlines. Raises ProtocolError without a lane, SyncError if the
        lane does not end; the server then takes no more.
        """
        with self._membership:
            lane = self._lanes.get(url)
        if lane is None:
            raise ProtocolError(f"{url} was removed and has no lane")
        config = self._c.config
        transfer_s = config.lane_deadline_s if config.apply == "streamed" else 0.0
        # pause, load, label, resume, read-back
        alive = _end_lanes(
            [lane], time.monotonic() + 5 * config.commit_deadline_s + transfer_s + JOIN_S, JOIN_S
        )
        self._c.fleet.remove(url)
        if alive:
            raise SyncError(
                "its lane did not end: the server can not be added again in this run", url=url
            )
        self._c.slots.forget(url)
        with self._membership:
            self._epochs[url] = lane.epoch
            self._lanes.pop(url, None)

    # Main thread, never waiting.

    def take_slot(self) -> int | None:
        """The slot for the next version; None: all are in use, skip it."""
        return self._c.slots.take_reserved()

    def put_back(self, slot: int) -> None:
        """A slot that was taken for a version that was not made."""
        self._c.slots.put_back(slot)

    def publish(self, version: int, slot: int, copy: Copy | None) -> None:
        """Rank 0 has started its part of the copy of ``version`` into ``slot`` (None: rank 0 writes
        no part)."""
        self._jobs.put(_Job(version, slot, copy, self._c.recorder.now()))

    def take_error(self) -> SyncError | None:
        """The first background error since the last call."""
        return self._c.fleet.take_error()

    def latch(self, error: SyncError) -> None:
        """An error of somebody else's, for the next step boundary. Any thread."""
        self._c.fleet.latch(error)

    # Any thread: what is known of the servers.

    def entries(self) -> dict[str, Entry]:
        """The ledger's lines, those of servers that left among them."""
        return self._c.fleet.entries()

    def last_error(self, url: str) -> SyncError | None:
        """See Fleet.last_error."""
        return self._c.fleet.last_error(url)

    # Start, sync mode and shutdown: waiting is their purpose.

    def wait_slot(self, timeout_s: float) -> int | None:
        """A slot within ``timeout_s``, or None."""
        return self._c.slots.wait_reserved(timeout_s)

    def wait_held(self, version: int, timeout_s: float, everyone: bool) -> list[str]:
        """See Fleet.wait_held."""
        return self._c.fleet.wait_held(version, timeout_s, everyone)

    def newest(self) -> Published | None:
        """The newest complete version."""
        return self._c.slots.newest()

    def flush(self, version: int, timeout_s: float) -> list[str]:
        """Seal the image slots and wait until the servers that answer hold ``version``; returns who does.

        ``timeout_s`` bounds this and the ``close`` that follows together: a quarter of it
        (``JOIN_S`` at most) is kept for the ends of the lanes.
        """
        start = time.monotonic()
        deadline = start + timeout_s - min(JOIN_S, timeout_s / 4)
        self._jobs.put(None)
        self._sealer.join(max(0.0, deadline - time.monotonic()))
        self._c.slots.seal()
        holding = self._c.fleet.wait_held(
            version, max(0.0, deadline - time.monotonic()), everyone=True
        )
        self._left_s = max(LEAST_S, timeout_s - (time.monotonic() - start))
        return holding

    def close(self) -> None:
        """Stop all lanes and the sealer, all within one deadline: what ``flush`` left of its own,
        else ``JOIN_S``.

        Idempotent. A lane in a commit may finish it in that time; one that does not leaves its
        server to the pause guard.
        """
        self._jobs.put(None)
        with self._membership:
            lanes = list(self._lanes.values())
        deadline = time.monotonic() + self._left_s
        _end_lanes(lanes, deadline, min(LEAST_S, self._left_s / 4))
        if self._sealer.is_alive():
            self._sealer.join(max(0.0, deadline - time.monotonic()))

    def _seal_loop(self) -> None:
        try:
            # no deadline: close() of its owner puts None into the queue; the thread is a daemon
            while (job := self._jobs.get()) is not None:
                self._c.slots.writing(job.version, job.slot, self._writers(job))
                try:
                    self._seal(job)
                except TitanGrpoError as error:
                    self._c.slots.discard(job.version)
                    self._c.fleet.latch(
                        SyncError(f"could not be published: {error}", version=job.version)
                    )
        except Exception as error:  # top of a thread: a silent death would end all syncs unseen
            logger.exception("the sealer ended")
            self._c.fleet.latch(
                SyncError(f"the sealer ended with {error!r}: no further version is published")
            )

    def _writers(self, job: _Job) -> frozenset[int]:
        return frozenset(self._remote) | ({0} if job.copy is not None else frozenset())

    def _seal(self, job: _Job) -> None:
        config, recorder, link = self._c.config, self._c.recorder, self._c.link
        if job.copy is not None:
            recorder.observe(names.COPY_S, job.copy.wait(config.lane_deadline_s))
            self._c.slots.copied(job.version, 0)
        for rank in self._remote:
            key = copied_key(job.version, rank)
            with store_errors(f"waiting for the part of rank {rank} of version {job.version}"):
                self._store.wait([key], timedelta(seconds=config.lane_deadline_s))
                self._store.delete_key(key)
            self._c.slots.copied(job.version, rank)
        with recorder.span(names.DIGEST_S, "sealer", version=job.version):
            digests = block_digests(
                self._images[job.slot].buffer, self._c.manifest, link.algorithm, self._block_key
            )
        label = Label(self._c.run_id, job.version, fingerprint(self._c.manifest.digest, digests))
        self._c.slots.complete(Published(label, job.slot, digests, job.published_s))


def _end_lanes(lanes: Sequence[LaneThread], deadline: float, abort_s: float) -> list[LaneThread]:
    """Stop all, wait for all at once, abort ``abort_s`` before the deadline what is left; returns
    those that go on.

    ``deadline`` is on the monotonic clock.
    """
    for lane in lanes:
        lane.stop()
    slow = _join(lanes, deadline - abort_s)
    for lane in slow:
        logger.warning("%r was told to stop and did not: what it waits for is aborted", lane)
        lane.abort()
    slow = _join(slow, deadline)
    for lane in slow:
        logger.warning("%r did not end by its deadline", lane)
    return slow


def _join(lanes: Iterable[LaneThread], deadline: float) -> list[LaneThread]:
    """Wait for threads until one common deadline; returns those that go on."""
    slow = []
    for lane in lanes:
        lane.join(max(0.0, deadline - time.monotonic()))
        if lane.is_alive():
            slow.append(lane)
    return slow
