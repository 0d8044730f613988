"""Body of the sync process (process.py): ``SyncLanes`` seals images and has the lanes.

::

    rank 0 --publish--> [queue] --sealer--> image slots --pin--> lane --> server
        ^                                       |
        `----------- reserved slot <------------'
"""

import logging
import math
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist

from titan_grpo.config import WeightSync
from titan_grpo.engines.http import ServerAccess
from titan_grpo.engines.server import AUTO, ServerControl, make_control
from titan_grpo.errors import SyncError, TitanGrpoError
from titan_grpo.layout.image import fingerprint
from titan_grpo.observe import names
from titan_grpo.observe.recorder import Recorder
from titan_grpo.protocol.lane import LaneEvent, Observer, Point, no_observer
from titan_grpo.protocol.messages import NIXL, RANGES, TCP, Hashed, Label, RangeSource
from titan_grpo.protocol.pause_guard import Deadlines
from titan_grpo.sync.images import (
    ImagePool,
    Images,
    ImageSlots,
    Published,
    hashed_key,
    wait_copied,
)
from titan_grpo.sync.lane import LOOK_S, LaneContext, ServerLane
from titan_grpo.sync.link import LinkOptions, RunOptions
from titan_grpo.sync.patches import Deliveries, Patches, say_wanted
from titan_grpo.sync.pause_guard import PauseGuard, deadlines_of, transfer_in_load_s
from titan_grpo.sync.publisher import copied_key
from titan_grpo.sync.relay import Relay
from titan_grpo.sync.server_set import Reports, ServerObserver
from titan_grpo.sync.transports.broadcast import delete_text, get_text, store_errors
from titan_grpo.sync.transports.nixl import NixlSource
from titan_grpo.sync.transports.range_server import RangeServer
from titan_grpo.sync.transports.tls import own_certificate
from titan_grpo.sync.turns import Turns

logger = logging.getLogger(__name__)

REST_S = 1.0
"""Back-off after a thread could not be started, in seconds."""


def load_deadline_s(config: WeightSync, nbytes: int) -> float:
    """Return the deadline of a server's load call in seconds; streamed, with the transfer of
    ``nbytes``."""
    return config.commit_deadline_s + transfer_in_load_s(config, nbytes)


@dataclass(frozen=True, slots=True)
class _Job:
    version: int
    slot: int
    published_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncOptions(RunOptions):
    """Options of a sync, beside its weights and the section of the configuration."""

    urls: Sequence[str]
    make_control: Callable[[str], ServerControl] | None = None
    """Factory of controls whose calls rank 0's own process makes; None: those of ``engine``, in the
    process of the lanes."""
    engine: str = AUTO
    listed: Sequence[str] = ()
    """URLs in the servers file at the start."""
    observer: ServerObserver | None = None
    keys: tuple[str, str] = ("", "")
    """The servers' API key and admin key."""
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    """The trainer's device."""
    remote_writers: Sequence[int] = ()
    """Other ranks of rank 0's host that write to each image."""
    leaders: Sequence[int] = ()
    """Leaders of the trainer's other hosts: the rank of part 1, of part 2, ..."""
    keeps: bool = False
    """Whether ``slots.keep`` may be called for a server that has just reached a version."""
    drain: Callable[[str], None] | None = None
    """See LaneContext."""
    look_s: float = LOOK_S
    """See LaneContext."""
    lane_observer: Observer = no_observer
    guarded: bool = True
    """Whether a pause guard's process watches the lanes."""
    guard_deadlines: Deadlines | None = None
    tamper: Callable[[Images], Images] | None = None
    """For tests (picklable): replaces the images that lanes send, after the originals were hashed.
    Servers then do not read the trainer's memory in place."""

    def link(self, config: WeightSync) -> LinkOptions:
        """Return the options common to all connections."""
        transport: str = config.transport
        if transport == "auto":
            # Never nccl: it takes device memory and thread blocks from training, and needs one
            # version at both ends. Streamed needs a communicator: a server without our plugin joins
            # one, and a window takes a bucket only when the lane sends it.
            transport = TCP if config.apply == "staged" else "gloo"
        return LinkOptions(
            config,
            transport,
            config.bind_host,
            device=str(self.device) if transport == "nccl" else "cpu",
            **{each.name: getattr(self, each.name) for each in fields(RunOptions)},
        )


class SyncLanes:
    """Seals images (waits for all ranks' bytes, hashes the blocks) and has the lanes, which report
    to ``servers``."""

    def __init__(
        self,
        pool: ImagePool,
        config: WeightSync,
        recorder: Recorder,
        options: SyncOptions,
        servers: Reports,
        slots: ImageSlots | None = None,
    ) -> None:
        """Start the pause guard's process; all else begins with ``start``."""
        self.pool, self.run_id, self.manifest = pool, pool.run_id, pool.manifest
        self._config, self._recorder, self._o = config, recorder, options
        self._reports = servers
        self._writers = 0, *options.remote_writers
        self._source = RangeServer(certificate=own_certificate(config))
        link = options.link(config)
        relays = config.relay and link.transport == TCP
        spared = partial(recorder.count, names.SPARED_BYTES)
        self._deliveries = Deliveries(config, pool.manifest, spared, relays)
        self._wanted: bool | None = None
        """Last value of "patches are wanted" sent to the other hosts; None: by another process."""
        relayed = partial(recorder.count, names.RELAYED_BYTES)
        self.relay = Relay(relays, relayed, config.zones, 1 + len(options.leaders))
        link = replace(link, source=self._source, deliveries=self._deliveries, relay=self.relay)
        if link.transport == NIXL:
            link = replace(link, nixl=NixlSource())
        self._link = link
        self.hashing = link.hashing(pool.run_id)
        # No address: each lane fills in its own.
        place = RangeSource("", 0, "", pin=self._source.pin)
        self._patches = Patches(pool, self._source, place, self.hashing.range_key)
        self._notices: list[tuple[int, dist.TCPStore, str]] = []
        """(version, store, key) of all notices of versions since the last complete one."""
        self._complete = -1
        log, forwarded = recorder.run_dir / "pause_guard.log", options.make_control is not None
        deadlines = options.guard_deadlines or deadlines_of(
            config, pool.manifest.total_bytes, len(pool.manifest.encoded), forwarded
        )
        self.guard = PauseGuard(link, log, deadlines) if options.guarded else None
        self.slots = slots or ImageSlots(config.slots)
        self._threads, self._turns = LaneThreads(), Turns()
        tensors = pool.tensors()
        self._context = LaneContext(
            run_id=pool.run_id,
            manifest=pool.manifest,
            images=tensors if options.tamper is None else options.tamper(tensors),
            shared=tuple(image if options.tamper is None else None for image in pool.images),
            link=link,
            slots=self.slots,
            wake=self._threads.wake,
            recorder=recorder,
            observer=self._observe,
            look_s=options.look_s,
            renew=self.guard.renew if self.guard is not None else lambda _: None,
            drain=options.drain,
        )
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._sealer = threading.Thread(target=self._seal_loop, name="sealer", daemon=True)

    def start(self) -> None:
        self._sealer.start()

    def open_lane(self, url: str, epoch: int) -> ServerLane:
        """Create a lane, not started yet. ``epoch``: the last one of the previous lane."""
        if self.guard is not None:
            self.guard.know(url, *self._o.keys)
        return ServerLane(self._context, self._reports, self._control(url), epoch)

    def _control(self, url: str) -> ServerControl:
        if self._o.make_control is not None:
            return self._o.make_control(url)
        load_s = load_deadline_s(self._config, self.manifest.total_bytes)
        access = ServerAccess(url, self._config.commit_deadline_s, load_s, *self._o.keys)
        if self.guard is not None:
            access = replace(access, calling=partial(self.guard.renew, url))
        return make_control(self._o.engine, access)

    def _observe(self, event: LaneEvent) -> None:
        match event.point:
            case Point.PAUSE:  # first: this wait must not use up the lease of the pause guard
                self._turns.wait(event.url)
            case Point.LABEL:
                self._turns.go_on(event.url)
            case Point.LOAD | Point.HELD:
                self._turns.end(event.url)
        if self.guard is not None:
            self.guard.observe(event)
        self._o.lane_observer(event)

    def publish(self, version: int, slot: int, published_s: float) -> None:
        """Queue ``version`` for the sealer: the host's ranks have started to copy it into ``slot``.
        Never waits. ``published_s``: see Published."""
        self._jobs.put(_Job(version, slot, published_s))

    def finish(self) -> None:
        """End the sealer after the versions published so far. Does not wait."""
        self._jobs.put(None)

    def end(self, deadline: float) -> None:
        """Stop the sealer by ``deadline`` (monotonic clock), then all else. Call it after the lanes
        have ended."""
        self._jobs.put(None)
        if self._sealer.is_alive():
            self._sealer.join(max(0.0, deadline - time.monotonic()))
        self._threads.close()
        self._source.close()
        self.slots.close()
        if self.guard is not None:
            self.guard.close()

    def _seal_loop(self) -> None:
        try:
            # no deadline: finish() and end() put None into the queue; the thread is a daemon
            while (job := self._jobs.get()) is not None:
                writers = frozenset({*self._writers, *self._o.leaders})
                self.slots.writing(job.version, job.slot, writers)
                try:
                    self._seal(job)
                # RuntimeError: the system has no further thread now.
                except (TitanGrpoError, RuntimeError) as error:
                    self.slots.discard(job.version)
                    self._reports.sealed(job.version, None)
                    self._reports.latch(
                        SyncError(f"could not be published: {error}", version=job.version)
                    )
            self.slots.finish()
        except Exception as error:  # top of a thread: report that no further version is published
            logger.exception("the sealer ended")
            self._reports.latch(
                SyncError(f"the sealer ended with {error!r}: no further version is published")
            )

    def _seal(self, job: _Job) -> None:
        timeout_s = self._config.transfer_s(self.manifest.parts[self.pool.part].nbytes)
        self._forget_notices()
        self._patches.writing(job.slot)
        wanted = self._patches_wanted()
        # Before any wait, which may fail: all of them come, if late.
        for rank in self._writers:
            self._notices.append((job.version, self.pool.store, copied_key(job.version, rank)))
        if self.pool.hashed is not None:
            for part in range(1, len(self._o.leaders) + 1):
                self._notices.append((job.version, self.pool.hashed, hashed_key(job.version, part)))
        for rank in self._writers:
            wait_copied(self.pool, job.version, rank, timeout_s)
            self.slots.copied(job.version, rank)
        with self._recorder.span(names.DIGEST_S, "sealer", version=job.version):
            image = self.pool.images[job.slot].buffer
            digests = [*self.hashing.blocks(image, self.manifest, self.pool.part)]
        patches = self._patches.make(job.version, job.slot, wanted)
        if patches:
            self._deliveries.made(patches[-1].nbytes / self.manifest.parts[0].nbytes)
        others = self._others(job.version)
        for hashed, theirs in others:
            digests += theirs
            patches += hashed.patches
        label = Label(self.run_id, job.version, fingerprint(self.manifest.digest, digests))
        elsewhere = tuple(hashed.source for hashed, _ in others)
        raw = b"".join(digests)
        published = Published(label, job.slot, raw, job.published_s, elsewhere, patches)
        self.slots.complete(published)
        self._complete = job.version
        self._reports.sealed(job.version, published)

    def _forget_notices(self) -> None:
        """Delete the notices of versions before the last complete one. All that will ever come are
        there: a rank, and a host, gives its own in the order of the versions."""
        # Not earlier: a process that replaces this one reads them again.
        over = [notice for notice in self._notices if notice[0] < self._complete]
        self._notices = [notice for notice in self._notices if notice[0] >= self._complete]
        for _, store, key in over:
            with store_errors("deleting what other ranks have said"):
                delete_text(store, key)

    def _patches_wanted(self) -> bool:
        wanted = self._link.transport in RANGES and self._deliveries.patches_wanted()
        if wanted != self._wanted and self.pool.hashed is not None:
            say_wanted(self.pool.hashed, wanted)
        self._wanted = wanted
        return wanted

    def _others(self, version: int) -> list[tuple[Hashed, list[bytes]]]:
        """Wait until every other host has hashed its part; return each Hashed with its digests.
        Raises TransferFailed if one is late (all hosts copy and hash at the same time), SyncError
        if one failed."""
        store, config = self.pool.hashed, self._config
        if store is None:
            return []
        deadline = time.monotonic() + config.lane_deadline_s
        out = []
        for part, rank in enumerate(self._o.leaders, 1):
            key = hashed_key(version, part)
            left_s = max(0.0, deadline - time.monotonic())
            left_s += config.moving_s(self.manifest.parts[part].nbytes)
            with store_errors(
                f"waiting for part {part} of version {version} from rank {rank}, the leader of"
                f" another host, {left_s:.0f} s"
            ):
                store.wait([key], timedelta(seconds=left_s))
                hashed = Hashed.from_json(get_text(store, key))
            hashed.require_proof(self.hashing.key)
            if why := hashed.problem(version, part):
                raise SyncError(f"part {part} of rank {rank}'s host failed: {why}")
            count = len(self.manifest.blocks(part))
            try:
                digests = self.hashing.split(bytes.fromhex(hashed.digests), count)
            except ValueError as error:
                raise SyncError(
                    f"part {part} of rank {rank}'s host has no digests: {error}"
                ) from error
            out.append((hashed, digests))
            self.slots.copied(version, rank)
        return out


class LaneThreads:
    """Threads for lanes with work. ``work`` of one lane is called by one thread at a time.

    One thread waits for all idle lanes of a process: until a wake (new image, end of a connection,
    stop) or a lane's due time. Each working lane has a thread of its own, so a server that stands
    still blocks no other lane.
    """

    def __init__(self) -> None:
        """Start nothing: the waiting thread starts with the first ``wake``."""
        self._changed = threading.Condition()
        self._due: dict[ServerLane, float] = {}
        """Due time of each lane; a lane that is working works once more afterwards."""
        self._working: set[ServerLane] = set()
        self._thread: threading.Thread | None = None
        self._closing = False

    def wake(self, lane: ServerLane) -> None:
        """Have the lane work now, or once more after its present work. Any thread; never waits."""
        # Lock order: callers hold the slots' lock, so nothing under this one may take that.
        with self._changed:
            self._due[lane] = -math.inf
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="lanes", daemon=True)
                # start() raises RuntimeError without a free thread: assign after it, so that the
                # next wake tries again.
                thread.start()
                self._thread = thread
            self._changed.notify()

    def close(self) -> None:
        """Call no lane again. Idempotent; does not wait for working lanes."""
        with self._changed:
            self._closing = True
            self._changed.notify()

    def _run(self) -> None:
        """Thread that waits for the idle lanes."""
        while True:
            with self._changed:
                while not (ready := self._take()) and not self._closing:
                    idle = [due for lane, due in self._due.items() if lane not in self._working]
                    # no deadline without idle lanes: wake(), _worked() and close() notify
                    self._changed.wait(max(0.0, min(idle) - time.monotonic()) if idle else None)
                if self._closing:
                    return
            for lane in ready:
                name = f"lane {lane.url}"
                # daemon: a lane may still wait for its server when the process ends
                thread = threading.Thread(target=self._work, args=(lane,), name=name, daemon=True)
                try:
                    thread.start()
                except RuntimeError as error:  # no free thread: retry later
                    logger.warning("%s waits for a thread: %s", name, error)
                    self._worked(lane, time.monotonic() + REST_S)

    def _take(self) -> list[ServerLane]:
        """Under the lock: take the lanes that are due; they count as working from now on."""
        now = time.monotonic()
        ready = [
            lane for lane, due in self._due.items() if due <= now and lane not in self._working
        ]
        for lane in ready:
            del self._due[lane]
        self._working.update(ready)
        return ready

    def _work(self, lane: ServerLane) -> None:
        """Thread of one lane, until it is idle."""
        self._worked(lane, lane.work())

    def _worked(self, lane: ServerLane, again: float | None) -> None:
        with self._changed:
            self._working.discard(lane)
            if again is None:
                self._due.pop(lane, None)
            else:
                self._due[lane] = min(again, self._due.get(lane, math.inf))
            self._changed.notify()
