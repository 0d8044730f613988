"""What runs in the sync process (process.py): ``SyncLanes`` seals images and has the lanes.

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
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from typing import Any, Protocol
from urllib.parse import urlsplit

import torch
import torch.distributed as dist

from titan_grpo.config import WeightSync
from titan_grpo.config.rollout import is_loopback
from titan_grpo.engines.http import ServerAccess, address_towards
from titan_grpo.engines.server import AUTO, RolloutNeeds, ServerControl, make_control
from titan_grpo.errors import SyncError, TitanGrpoError
from titan_grpo.layout.image import fingerprint
from titan_grpo.observe import names
from titan_grpo.observe.recorder import Recorder
from titan_grpo.protocol import members
from titan_grpo.protocol.lane import LaneEvent, Observer, Point, commit_s, no_observer
from titan_grpo.protocol.messages import NIXL, RANGES, TCP, Hashed, Label, RangeSource
from titan_grpo.protocol.pause_guard import Deadlines
from titan_grpo.runkey import Key
from titan_grpo.sync.images import (
    ImagePool,
    Images,
    ImageSlots,
    Published,
    hashed_key,
    own_certificate,
    wait_copied,
)
from titan_grpo.sync.lane import LOOK_S, LaneContext, ServerLane
from titan_grpo.sync.link import LinkOptions
from titan_grpo.sync.patches import Deliveries, Patches, say_wanted
from titan_grpo.sync.pause_guard import PauseGuard, deadlines_of, transfer_in_load_s
from titan_grpo.sync.relay import Relay
from titan_grpo.sync.server_set import JOIN_S, OpenLane, Reports, ServerObserver, ServerSet
from titan_grpo.sync.transports.broadcast import LOOPBACK, store_errors
from titan_grpo.sync.transports.nixl import NixlSource
from titan_grpo.sync.transports.range_server import RangeServer
from titan_grpo.sync.turns import Turns

logger = logging.getLogger(__name__)

ANYWHERE = "192.0.2.1"
"""An address that no host has (RFC 5737): the way to it is the default route."""

REST_S = 1.0
"""Back-off where a thread cannot be started, in seconds."""


def resolve_bind_host(configured: str, url: str) -> str:
    """The address for the sockets of a server's lane: as configured, loopback for a local server,
    else the one towards it.

    The kernel's routing answers without sending a packet (a connected UDP socket). The address of
    the default route where the server's name cannot be resolved now: it may come up later.
    """
    if configured:
        return configured
    parts = urlsplit(url)
    host = parts.hostname or ""
    if is_loopback(host):
        return LOOPBACK
    for way in (host, ANYWHERE):
        with suppress(OSError):
            return address_towards(way, parts.port or 80)
    return LOOPBACK


def load_deadline_s(config: WeightSync) -> float:
    """Of a server's load call, which streamed waits for the transfer too, in seconds."""
    return config.commit_deadline_s + transfer_in_load_s(config)


@dataclass(frozen=True, slots=True)
class _Job:
    version: int
    slot: int
    published_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncOptions:
    """What a sync works with, beside its weights and the section of the configuration."""

    urls: Sequence[str]
    make_control: Callable[[str], ServerControl] | None = None
    """For servers whose calls rank 0's own process makes; None: ``engine``'s, in the process of the
    lanes."""
    engine: str = AUTO
    listed: Sequence[str] = ()
    """In the servers file at the start."""
    observer: ServerObserver | None = None
    keys: tuple[str, str] = ("", "")
    """The servers' API key and admin key."""
    run_key: Key | None = None
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    """Of the trainer."""
    remote_writers: Sequence[int] = ()
    """Other ranks of rank 0's host that write to each image."""
    leaders: Sequence[int] = ()
    """The leaders' ranks of the trainer's other hosts, by part from 1 on."""
    model: Mapping[str, Any] = field(default_factory=dict)
    needs: RolloutNeeds = field(default_factory=RolloutNeeds)
    """See LinkOptions, like ``model``."""
    owner: str = ""
    take_over: bool = True
    """See Hello, like ``owner``."""
    started_s: float = field(default_factory=time.monotonic)
    """When the run started, on the monotonic clock."""
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
    """For tests, a function of a module: what lanes send in place of the images whose bytes were
    hashed. Servers read no memory of the trainer then."""

    def link(self, config: WeightSync) -> LinkOptions:
        """What all connections have in common."""
        transport: str = config.transport
        if transport == "auto":
            # Nothing of a lane is on a GPU: NCCL takes memory and thread blocks of training's, and
            # both ends must have one version of it. Streamed needs a communicator: the route of a
            # server without our plugin joins one, and a window takes a bucket only where the lane
            # has sent it.
            transport = TCP if config.apply == "staged" else "gloo"
        urls = (*self.urls, *self.listed)
        remote = [url for url in urls if not is_loopback(urlsplit(url).hostname or "")]
        return LinkOptions(
            config,
            transport,
            # Of the pause guard; a lane resolves its own at each connection.
            resolve_bind_host(config.bind_host, (remote or [f"http://{LOOPBACK}"])[0]),
            device=str(self.device) if transport == "nccl" else "cpu",
            run_key=self.run_key,
            model=self.model,
            needs=self.needs,
            owner=self.owner,
            take_over=self.take_over,
            started_s=self.started_s,
        )


def server_set(
    config: WeightSync, recorder: Recorder, options: SyncOptions, open_lane: OpenLane
) -> ServerSet:
    """The servers that a run starts with."""
    return ServerSet(
        members.start(frozenset(options.urls), frozenset(options.listed)),
        open_lane,
        recorder,
        observer=options.observer,
        leave_s=commit_s(config.commit_deadline_s, transfer_in_load_s(config)) + JOIN_S,
        max_lag=config.max_lag,
    )


class SyncLanes:
    """Seals images (all ranks' bytes are there, blocks hashed) and has the lanes, which report to
    ``servers``. ``slots`` is for its users too."""

    def __init__(
        self,
        pool: ImagePool,
        config: WeightSync,
        recorder: Recorder,
        options: SyncOptions,
        servers: Reports,
        slots: ImageSlots | None = None,
    ) -> None:
        """Nothing runs before ``start``, but for the pause guard's process."""
        self.pool, self.run_id, self.manifest = pool, pool.run_id, pool.manifest
        self._config, self._recorder, self._o = config, recorder, options
        self._reports = servers
        self._writers = 0, *options.remote_writers
        self._source = RangeServer(certificate=own_certificate(config))
        link = options.link(config)
        relays = config.relay and link.transport == TCP
        spared = partial(recorder.count, names.SPARED_BYTES)
        self._deliveries = Deliveries(config, pool.manifest, spared, relays)
        self._wanted = False
        """Whether patches are, as the other hosts know it."""
        relayed = partial(recorder.count, names.RELAYED_BYTES)
        self.relay = Relay(relays, relayed, config.zones, 1 + len(options.leaders))
        link = replace(link, source=self._source, deliveries=self._deliveries, relay=self.relay)
        if link.transport == NIXL:
            link = replace(link, nixl=NixlSource())
        self._link = link
        self.hashing = link.hashing(pool.run_id)
        # without an address: each lane has its own
        place = RangeSource("", 0, "", pin=self._source.pin)
        self._patches = Patches(pool, self._source, place, self.hashing.range_key)
        self._read: list[tuple[int, dist.TCPStore, str]] = []
        """Version, store and key of what other ranks have said."""
        self._complete = -1
        self._given_up: set[str] = set()
        """Keys of hosts' parts that came too late, or may still come."""
        log, forwarded = recorder.run_dir / "pause_guard.log", options.make_control is not None
        deadlines = options.guard_deadlines or deadlines_of(config, forwarded)
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
            observer=self._pass,
            look_s=options.look_s,
            renew=self.guard.renew if self.guard is not None else lambda _: None,
            drain=options.drain,
            bind_host=lambda url: resolve_bind_host(config.bind_host, url),
        )
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._sealer = threading.Thread(target=self._seal_loop, name="sealer", daemon=True)

    def start(self) -> None:
        """Start the sealer."""
        self._sealer.start()

    def open_lane(self, url: str, epoch: int) -> ServerLane:
        """A lane that is not started yet. ``epoch``: of the last one to the server."""
        if self.guard is not None:
            self.guard.know(url, *self._o.keys)
        return ServerLane(self._context, self._reports, self._control(url), epoch)

    def _control(self, url: str) -> ServerControl:
        if self._o.make_control is not None:
            return self._o.make_control(url)
        deadlines = self._config.commit_deadline_s, load_deadline_s(self._config)
        access = ServerAccess(url, *deadlines, *self._o.keys)
        if self.guard is not None:
            access = replace(access, calling=partial(self.guard.renew, url))
        return make_control(self._o.engine, access)

    def _pass(self, passing: LaneEvent) -> None:
        match passing.point:
            case Point.PAUSE:  # before the guard's lease begins
                self._turns.wait(passing.url)
            case Point.LABEL:
                self._turns.go_on(passing.url)
            case Point.LOAD | Point.HELD:
                self._turns.end(passing.url)
        if self.guard is not None:
            self.guard.observe(passing)
        self._o.lane_observer(passing)

    def publish(self, version: int, slot: int, published_s: float) -> None:
        """The host's ranks have started to copy ``version`` into ``slot``. Never waits.
        ``published_s``: as in Published."""
        self._jobs.put(_Job(version, slot, published_s))

    def seal(self) -> None:
        """No version follows those that were published. Does not wait."""
        self._jobs.put(None)

    def end(self, deadline: float) -> None:
        """After the lanes have ended: stop the sealer, by ``deadline`` (monotonic clock), and all
        else."""
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
            # no deadline: close() of its owner puts None into the queue; the thread is a daemon
            while (job := self._jobs.get()) is not None:
                writers = frozenset({*self._writers, *self._o.leaders})
                self.slots.writing(job.version, job.slot, writers)
                try:
                    self._seal(job)
                # RuntimeError: Python has it where the system has no further thread now
                except (TitanGrpoError, RuntimeError) as error:
                    self.slots.discard(job.version)
                    self._reports.sealed(job.version, None)
                    self._reports.latch(
                        SyncError(f"could not be published: {error}", version=job.version)
                    )
            self.slots.seal()
        except Exception as error:  # top of a thread: a silent death would end all syncs unseen
            logger.exception("the sealer ended")
            self._reports.latch(
                SyncError(f"the sealer ended with {error!r}: no further version is published")
            )

    def _seal(self, job: _Job) -> None:
        timeout_s = self._config.lane_deadline_s
        self._forget_read()
        self._patches.writing(job.slot)
        wanted = self._patches_wanted()
        for rank in self._writers:
            key = wait_copied(self.pool, job.version, rank, timeout_s)
            self._read.append((job.version, self.pool.store, key))
            self.slots.copied(job.version, rank)
        with self._recorder.span(names.DIGEST_S, "sealer", version=job.version):
            image = self.pool.images[job.slot].buffer
            digests = self.hashing.blocks(image, self.manifest, self.pool.part)
        patches = self._patches.make(job.version, job.slot, wanted)
        if patches:
            self._deliveries.made(patches[-1].nbytes / self.manifest.parts[0].nbytes)
        others = self._others(job.version)
        for hashed, theirs in others:
            digests += tuple(theirs)
            patches += hashed.patches
        label = Label(self.run_id, job.version, fingerprint(self.manifest.digest, digests))
        elsewhere = tuple(hashed.source for hashed, _ in others)
        published = Published(label, job.slot, digests, job.published_s, elsewhere, patches)
        self.slots.complete(published)
        self._complete = job.version
        self._reports.sealed(job.version, published)

    def _forget_read(self) -> None:
        """Delete what was said of versions before the last complete one. Not earlier: a process
        that is started in this one's place reads it again."""
        old = [each for each in self._read if each[0] < self._complete]
        self._read = [each for each in self._read if each[0] >= self._complete]
        for _, store, key in old:
            with store_errors("deleting what other ranks have said"):
                store.delete_key(key)

    def _patches_wanted(self) -> bool:
        wanted = self._link.transport in RANGES and self._deliveries.patches_wanted()
        if wanted != self._wanted and self.pool.hashed is not None:
            say_wanted(self.pool.hashed, wanted)
        self._wanted = wanted
        return wanted

    def _others(self, version: int) -> list[tuple[Hashed, list[bytes]]]:
        """What the leader of each other host says of its part, with the digests, once all are
        hashed. TransferFailed if one is not within the deadline: the hosts copy and hash at the
        same time as this one."""
        store, config = self.pool.hashed, self._config
        if store is None:
            return []
        for key in list(self._given_up):
            if store.check([key]):
                store.delete_key(key)
                self._given_up.discard(key)
        keys = [hashed_key(version, part) for part in range(1, len(self._o.leaders) + 1)]
        self._given_up.update(keys)
        deadline = time.monotonic() + config.lane_deadline_s
        out = []
        for part, (rank, key) in enumerate(zip(self._o.leaders, keys, strict=True), 1):
            left_s = max(0.0, deadline - time.monotonic())
            left_s += self.manifest.parts[part].nbytes / config.min_rate
            with store_errors(
                f"waiting for part {part} of version {version} from rank {rank}, the leader of"
                f" another host, {left_s:.0f} s"
            ):
                store.wait([key], timedelta(seconds=left_s))
                hashed = Hashed.from_json(store.get(key))
            self._read.append((version, store, key))
            self._given_up.discard(key)
            hashed.require_proof(self.hashing.key)
            if why := hashed.problem(version, part):
                raise SyncError(f"part {part} of rank {rank}'s host failed: {why}")
            count = len(self.manifest.blocks(part))
            digests = self.hashing.split(bytes.fromhex(hashed.digests), count)
            out.append((hashed, digests))
            self.slots.copied(version, rank)
        return out


class Worker(Protocol):
    """A lane, as the threads see it (ServerLane)."""

    url: str

    def work(self) -> float | None:
        """What there is to do; when to call again, None once the lane has ended."""


class LaneThreads:
    """Threads for lanes that have something to do: ``work`` of each is called by one at a time.

    One thread waits for all idle lanes of a process, until something wakes one (a new image, the
    end of its connection, a stop) or its time comes. Each lane that works has a thread of its own:
    a server that stands still holds up no other lane.
    """

    def __init__(self) -> None:
        """The waiting thread starts with the first ``wake``."""
        self._changed = threading.Condition()
        self._due: dict[Worker, float] = {}
        """When each lane is to work; a lane that works already does so again afterwards."""
        self._working: set[Worker] = set()
        self._thread: threading.Thread | None = None
        self._closing = False

    def wake(self, lane: Worker) -> None:
        """Have the lane work now, or again if it works. Any thread; never waits."""
        # Callers hold the slots' lock: nothing under this one may ask the slots.
        with self._changed:
            self._due[lane] = -math.inf
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="lanes", daemon=True)
                # where the system has no further thread for us now, the next wake tries again
                thread.start()
                self._thread = thread
            self._changed.notify()

    def close(self) -> None:
        """Call no lane any more. Idempotent; does not wait for those that work."""
        with self._changed:
            self._closing = True
            self._changed.notify()

    def _run(self) -> None:
        """Thread: the idle lanes."""
        while True:
            with self._changed:
                while not (ready := self._take()) and not self._closing:
                    idle = [due for lane, due in self._due.items() if lane not in self._working]
                    # no deadline without idle lanes: wake(), a lane that has worked, and close()
                    # notify
                    self._changed.wait(max(0.0, min(idle) - time.monotonic()) if idle else None)
                if self._closing:
                    return
            for lane in ready:
                name = f"lane {lane.url}"
                # daemon: a lane may wait for its server when the process ends
                thread = threading.Thread(target=self._work, args=(lane,), name=name, daemon=True)
                try:
                    thread.start()
                except RuntimeError as error:  # the system has no further thread for us now
                    logger.warning("%s waits for a thread: %s", name, error)
                    self._worked(lane, time.monotonic() + REST_S)

    def _take(self) -> list[Worker]:
        """Under the lock: the lanes whose time has come; they work from now on."""
        now = time.monotonic()
        ready = [
            lane for lane, due in self._due.items() if due <= now and lane not in self._working
        ]
        for lane in ready:
            del self._due[lane]
        self._working.update(ready)
        return ready

    def _work(self, lane: Worker) -> None:
        """Thread: one lane, until it is idle."""
        self._worked(lane, lane.work())

    def _worked(self, lane: Worker, again: float | None) -> None:
        with self._changed:
            self._working.discard(lane)
            if again is None:
                self._due.pop(lane, None)
            else:
                self._due[lane] = min(again, self._due.get(lane, math.inf))
            self._changed.notify()
