"""Rank 0's half of the sync: seals images (all ranks' bytes are there, blocks hashed) and runs one lane per server.

::

    main thread --publish--> [queue] --sealer--> shelf --pin--> lane --> server
        ^                                          |
        `------------- reserved slot <-------------'
"""

import logging
import queue
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

from titan_grpo.engines.control import ServerControl
from titan_grpo.errors import SyncError, TitanGrpoError
from titan_grpo.layout.digest import block_digests, fingerprint
from titan_grpo.layout.image import SharedImage
from titan_grpo.observe import names
from titan_grpo.protocol.version import Label
from titan_grpo.sync.lane import LaneContext, LaneThread
from titan_grpo.sync.publisher import copied_key
from titan_grpo.sync.shelf import Published
from titan_grpo.sync.snapshot import Copy
from titan_grpo.sync.transports.store import store_errors

logger = logging.getLogger(__name__)

JOIN_S = 10.0
"""How long the end waits for a thread that has been told to stop, in seconds."""


@dataclass(frozen=True, slots=True)
class _Job:
    version: int
    slot: int
    copy: Copy | None
    published_s: float


class SyncWorker:
    """Owned by rank 0. ``publish`` and ``take_slot`` are for the main thread and never wait."""

    def __init__(
        self, context: LaneContext, images: Sequence[SharedImage], store: dist.Store, remote_writers: Sequence[int]
    ) -> None:
        """``store`` carries the other writers' notices (``remote_writers``, global ranks) that their bytes are there."""
        self._c = context
        self._images = images
        self._store = store
        self._remote = tuple(remote_writers)
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._sealer = threading.Thread(target=self._seal_loop, name="sealer", daemon=True)
        self._lanes: dict[str, LaneThread] = {}

    def start(self, controls: Sequence[ServerControl]) -> None:
        """Start the sealer and one lane per server."""
        self._sealer.start()
        for control in controls:
            self._c.recorder.known_server(control.url)
            lane = self._lanes[control.url] = LaneThread(self._c, control)
            lane.start()

    # Main thread, never waiting.

    def take_slot(self) -> int | None:
        """The slot for the next version; None: all are in use, skip it."""
        return self._c.shelf.take_reserved()

    def publish(self, version: int, slot: int, copy: Copy | None) -> None:
        """Rank 0 has started its part of the copy of ``version`` into ``slot`` (None: rank 0 writes no part)."""
        self._jobs.put(_Job(version, slot, copy, self._c.recorder.now()))

    def take_error(self) -> SyncError | None:
        """The first background error since the last call."""
        return self._c.fleet.take_error()

    # Start, sync mode and shutdown: waiting is their purpose.

    def wait_slot(self, timeout_s: float) -> int | None:
        """A slot within ``timeout_s``, or None."""
        return self._c.shelf.wait_reserved(timeout_s)

    def wait_held(self, version: int, timeout_s: float, everyone: bool) -> list[str]:
        """See Fleet.wait_held."""
        return self._c.fleet.wait_held(version, timeout_s, everyone)

    def newest(self) -> Published | None:
        """The newest complete version."""
        return self._c.shelf.newest()

    def flush(self, version: int, timeout_s: float) -> list[str]:
        """Seal the shelf and wait until the servers that answer hold ``version``; returns who does."""
        deadline = time.monotonic() + timeout_s
        self._jobs.put(None)
        self._sealer.join(timeout_s)
        self._c.shelf.seal()
        return self._c.fleet.wait_held(version, max(0.0, deadline - time.monotonic()), everyone=True)

    def close(self) -> None:
        """Stop all lanes and the sealer. Idempotent; bounded."""
        self._jobs.put(None)
        for lane in self._lanes.values():
            lane.stop()
        for lane in self._lanes.values():
            lane.join(JOIN_S)
            if lane.is_alive():
                logger.warning("%r did not end within %s s", lane, JOIN_S)
                lane.abort()
                lane.join(JOIN_S)  # an aborted commit resumes its server
        if self._sealer.is_alive():
            self._sealer.join(JOIN_S)

    def _seal_loop(self) -> None:
        try:
            while (job := self._jobs.get()) is not None:
                self._c.shelf.writing(job.version, job.slot)
                try:
                    self._seal(job)
                except TitanGrpoError as error:
                    self._c.shelf.discard(job.version)
                    self._c.fleet.latch(SyncError(f"version {job.version} could not be published: {error}"))
        except Exception as error:  # top of a thread: a silent death would end all syncs unseen
            logger.exception("the sealer ended")
            self._c.fleet.latch(SyncError(f"the sealer ended with {error!r}: no further version is published"))

    def _seal(self, job: _Job) -> None:
        config, recorder = self._c.config, self._c.recorder
        if job.copy is not None:
            recorder.observe(names.COPY_S, job.copy.wait(config.lane_deadline_s))
        keys = [copied_key(job.version, rank) for rank in self._remote]
        if keys:
            with store_errors(f"waiting for the other ranks' part of version {job.version}"):
                self._store.wait(keys, timedelta(seconds=config.lane_deadline_s))
                for key in keys:
                    self._store.delete_key(key)
        with recorder.span(names.DIGEST_S, "sealer", version=job.version):
            digests = block_digests(self._images[job.slot].buffer, self._c.manifest, config.digest)
        label = Label(self._c.run_id, job.version, fingerprint(self._c.manifest.digest, digests))
        self._c.shelf.complete(Published(label, job.slot, digests, job.published_s))
