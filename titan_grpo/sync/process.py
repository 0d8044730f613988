"""Rank 0's sync process, both ends. The process has the sealer, the lanes, their HTTP and the range
source, so that none of their threads needs rank 0's interpreter. Rank 0 has the servers' ledger
lines and the state that must outlive the process.

::

    main thread --publish--> [pipe] --> sync process: sealer, image slots, lanes --> servers
        ^                      `<-- reports of the lanes: ServerSet, Recorder
        `------------- reserved slot: a pipe that both processes read

If the process dies, rank 0 starts it again and hands over the lanes with their epochs, the slot
that the main thread holds, the newest complete version, and the versions that are not complete.
Servers keep their versions meanwhile. The process has no CUDA (except with transport = "nccl") and
no torchtitan. It ends with rank 0; its pause guard resumes the servers that it leaves paused.
"""

import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

from titan_grpo.config import WeightSync
from titan_grpo.engines.server import ServerControl
from titan_grpo.engines.sglang_stock import StockRoutes
from titan_grpo.errors import ConfigError, SyncError
from titan_grpo.layout.image import fingerprint
from titan_grpo.observe import names, terminal
from titan_grpo.observe.recorder import Recorder
from titan_grpo.protocol import members
from titan_grpo.protocol.lane import LaneEvent, Point, commit_s, no_observer
from titan_grpo.protocol.messages import NIXL, Entry, Label, Standing
from titan_grpo.runkey import Key
from titan_grpo.sync.child import END_S, Child, Launched, Performer, perform
from titan_grpo.sync.images import ImagePool, ImageSlots, PoolAddress, Published, Reserved
from titan_grpo.sync.lane import ServerLane
from titan_grpo.sync.lanes import SyncLanes, SyncOptions
from titan_grpo.sync.pause_guard import transfer_in_load_s
from titan_grpo.sync.publisher import Announcer, Copy
from titan_grpo.sync.server_set import JOIN_S, ServerSet
from titan_grpo.sync.transports.nixl import nixl_problem
from titan_grpo.unix_rpc import Pipe


@dataclass(frozen=True, slots=True)
class Begin:
    """Arguments of the process."""

    pool: PoolAddress
    config: WeightSync
    options: SyncOptions
    """Without rank 0's callbacks and the run key."""
    run_key: str = field(repr=False)
    forwarded: bool
    """Whether rank 0 makes the calls of the servers' control planes."""
    drains: bool
    run_dir: Path
    reserved: tuple[int, int, int]
    """Reserved.address."""
    taken: tuple[int, ...]
    """Slots that the main thread holds, or that have a version in the making."""
    complete: Published | None
    """The newest complete version, if its slot still holds it."""


class RemoteLane:
    """Rank 0's handle of a lane in the sync process; it survives restarts of the process."""

    def __init__(self, owner: "SyncProcess", url: str, epoch: int) -> None:
        """``epoch``: the last one of the previous lane to the server."""
        self.url, self.epoch = url, epoch
        self._owner, self.ended = owner, threading.Event()
        self.stopping = False

    def start(self) -> None:
        # Atomic: a restart in between would open the lane twice, by the handover and by the post.
        with self._owner.lock:
            self._owner.lanes[self.url] = self
            self._owner.post("open_lane", self.url, self.epoch)

    def stop(self) -> None:
        with self._owner.lock:
            self.stopping = True
            self._owner.post("stop_lane", self.url)

    def abort(self) -> None:
        self._owner.post("abort_lane", self.url)

    def join(self, timeout: float) -> None:
        self.ended.wait(timeout)

    def is_alive(self) -> bool:
        return not self.ended.is_set()


class MainSlots:
    """Rank 0's view of the image slots."""

    def __init__(self, owner: "SyncProcess", reserved: Reserved) -> None:
        self._owner, self.reserved = owner, reserved
        self.taken: int | None = None
        """Slot that the main thread holds and has not published into."""
        self.kept: set[str] = set()

    def take_reserved(self) -> int | None:
        """Take the slot for the next version. None: all are in use, so the version is skipped.
        Never waits."""
        # Atomic: a restart must find the slot either in the pipe or in ``taken``.
        with self._owner.lock:
            slot = self.reserved.take()
            self.taken = self.taken if slot is None else slot
            return slot

    def wait_reserved(self, timeout_s: float) -> int | None:
        return self.reserved.wait(timeout_s, self.take_reserved)

    def put_back(self, slot: int) -> None:
        """Put back a slot that was taken and not written: the next take gets it. Never waits."""
        with self._owner.lock:
            self.taken = None
            self.reserved.put(slot)

    def keep(self, url: str) -> None:
        with self._owner.lock:
            self.kept.add(url)
            self._owner.post("slots.keep", url)

    def go_on(self, url: str) -> None:
        with self._owner.lock:
            self.kept.discard(url)
            self._owner.post("slots.go_on", url)


class SyncProcess(Child):
    """Rank 0's handle of the weight sync, also in measuring scripts and tests."""

    MODULE = "titan_grpo.sync.process"
    NAME = "sync process"

    def __init__(
        self,
        pool: ImagePool,
        config: WeightSync,
        recorder: Recorder,
        options: SyncOptions,
        launched: Launched | None = None,
    ) -> None:
        """``launched``: the process, if it is already started. Raises ConfigError if NIXL is
        configured and cannot be used here."""
        super().__init__(config)
        self.pool, self.manifest = pool, pool.manifest
        self.recorder, self._o = recorder, options
        link = options.link(config)
        if link.transport == NIXL and (problem := nixl_problem()):
            raise ConfigError(problem)  # here: in the process it would cause endless restarts
        self.hashing = link.hashing(pool.run_id)
        load_s = transfer_in_load_s(config, pool.manifest.total_bytes)
        self.servers = ServerSet(
            members.start(frozenset(options.urls), frozenset(options.listed)),
            lambda url, epoch: RemoteLane(self, url, epoch),
            recorder,
            observer=options.observer,
            leave_s=commit_s(config.commit_deadline_s, load_s) + JOIN_S,
            max_lag=config.max_lag,
        )
        self.slots = MainSlots(self, Reserved())
        self.lanes: dict[str, RemoteLane] = {}
        self._jobs: dict[int, tuple[int, float]] = {}
        """Version that is not complete -> slot, and time of its publication."""
        self.complete: Published | None = None
        """The newest complete version."""
        self._finished = False
        self._controls: dict[str, Any] = {}
        self._announcer = Announcer(
            0,
            pool.store.port,
            config.connect_deadline_s,
            config.transfer_s(pool.manifest.parts[pool.part].nbytes),
            lambda seconds: recorder.observe(names.COPY_S, seconds),
        )
        self._address = pool.address
        self._run(launched or self.launch(config))

    def start(self) -> None:
        """Have the process seal versions, and open one lane per server."""
        with self.lock:
            self._begin()
            self._begun = True
        self.servers.start()

    def wait_begun(self, timeout_s: float) -> None:
        """Wait until the process has begun: it reserves a slot then. Call it before the first
        version. Raises SyncError past ``timeout_s`` seconds."""
        with terminal.waiting("the sync process", timeout_s):
            slot = self.slots.wait_reserved(timeout_s)
        if slot is None:
            raise SyncError(
                "the sync process must begin before weight_sync.startup_deadline_s, it did not in"
                f" {timeout_s:.0f} s: no version can be sent; see its messages above, and on a slow"
                " machine raise the deadline"
            )
        self.slots.put_back(slot)

    def publish(self, version: int, slot: int, copy: Copy) -> None:
        """Publish ``version``, whose ``copy`` rank 0 has started into ``slot``. Main thread; never
        waits."""
        if error := self._announcer.take_error():
            self.servers.latch(error)
        # Atomic: a restart must find the slot in ``taken`` or in the jobs, and post the job once.
        with self.lock:
            self.slots.taken = None
            self._jobs[version] = job = (slot, self.recorder.now())
            self.post("lanes.publish", version, *job)
        self._announcer(version, slot, copy)

    def fingerprint(self, image: memoryview) -> str:
        """Return the fingerprint of a version with these bytes, under this run's key."""
        return fingerprint(self.manifest.digest, self.hashing.blocks(image, self.manifest))

    def flush(self, version: int, timeout_s: float) -> list[str]:
        """Finish the slots (no version follows), then ServerSet.flush."""
        with self.lock:
            self._finished = True
            self.post("lanes.finish")
        return self.servers.flush(version, timeout_s)

    def close(self, within_s: float = JOIN_S) -> None:
        """Stop all lanes and the process. See ServerSet."""
        if not (deadline := self.servers.close(within_s)):
            return
        self._end(max(END_S, deadline - time.monotonic()))
        for lane in list(self.lanes.values()):
            self.lane_ended(lane.url)
        self._announcer.close(END_S)
        self.slots.reserved.close()

    # The process.

    def _begin(self) -> None:
        # Empty the pipe: the new process reserves by a table of its own, and a slot that is in the
        # pipe twice would be written by two versions at once.
        while self.slots.reserved.take() is not None:
            pass
        slots = {slot for slot, _ in self._jobs.values()}
        slots |= {self.slots.taken} if self.slots.taken is not None else set()
        if self.complete is not None and self.complete.slot in slots:
            self.complete = None
        o = self._o
        options = replace(
            o,
            make_control=None,
            observer=None,
            run_key=None,
            drain=None,
            lane_observer=no_observer,
        )
        begin = Begin(
            pool=self._address,
            config=self._config,
            options=options,
            run_key=o.run_key.hex() if o.run_key is not None else "",
            forwarded=o.make_control is not None,
            drains=o.drain is not None,
            run_dir=self.recorder.run_dir,
            reserved=self.slots.reserved.address,
            taken=tuple(slots),
            complete=self.complete,
        )
        self._pipe.post("begin", begin)
        for version, job in self._jobs.items():
            self._pipe.post("lanes.publish", version, *job)
        for url in self.slots.kept:
            self._pipe.post("slots.keep", url)
        for lane in self.lanes.values():
            self._pipe.post("open_lane", lane.url, lane.epoch)
            if lane.stopping:
                self._pipe.post("stop_lane", lane.url)
        if self._finished:
            self._pipe.post("lanes.finish")

    def _ended(self, text: str) -> None:
        text += "; the servers keep their versions until then"
        self.recorder.error(text)
        terminal.print_status(text)

    # Called by the process, one after the other (it also calls ``servers`` and ``recorder``).

    def connecting(self, url: str, epoch: int) -> None:
        """Note that a lane opens its ``epoch``-th connection."""
        if lane := self.lanes.get(url):
            lane.epoch = epoch

    def note(self, url: str, entry: Entry, engine: str, label: Label | None) -> None:
        self.servers.note(url, entry, engine, label)
        if self._o.keeps and entry.standing is Standing.HOLDS and url not in self.slots.kept:
            self.post("slots.go_on", url)

    def latch(self, cause: str, url: str, version: int | None, block: int | None) -> None:
        self.servers.latch(SyncError(cause, url=url, version=version, block=block))

    def lane_ended(self, url: str) -> None:
        """Drop a lane that has ended; its ``join`` returns."""
        with self.lock:
            lane = self.lanes.pop(url, None)
        if lane is not None:
            lane.ended.set()

    def sealed(self, version: int, published: Published | None) -> None:
        with self.lock:
            self._jobs.pop(version, None)
            self.complete = published or self.complete

    def span(self, name: str, start_s: float, stop_s: float, track: str, args: Any) -> None:
        self.recorder.add_span(name, start_s, stop_s, track, **args)

    def request(self, number: int, what: str, url: str, *arguments: Any) -> None:
        """Answer a lane's ``ask``."""
        pipe = self._pipe
        if what == "note":
            # On this thread, in order with the lane's other reports.
            pipe.answer(number, lambda: self.note(url, *arguments))
            return
        # On a thread: it may wait for a commit's deadline, or for a call that is posted after it.
        work: Callable[..., Any] = self._drain if what == "drain" else self._call
        threading.Thread(
            target=pipe.answer,
            args=(number, lambda: work(url, *arguments)),
            name=f"{what} {url}",
            daemon=True,
        ).start()

    def _drain(self, url: str) -> None:
        assert self._o.drain is not None
        self._o.drain(url)

    def _call(self, url: str, routes: bool, method: str, arguments: tuple[Any, ...]) -> Any:
        """Call a method of a server's control, or of its StockRoutes. Return the engine's name and
        the result."""
        assert self._o.make_control is not None
        if url not in self._controls:
            self._controls[url] = [self._o.make_control(url), None]
        pair = self._controls[url]
        control: ServerControl = pair[0]
        value = getattr(pair[1] if routes else control, method)(*arguments)
        if method == "stock":
            pair[1], value = value, value is not None
        if method == "close" and not routes:
            self._controls.pop(url, None)
        return control.engine, value


# In the process.


class PipeRecorder(Recorder):
    """The lanes' Recorder: forwards its entries to rank 0's."""

    def __init__(self, pipe: Pipe, run_dir: Path) -> None:
        """Opens no file."""
        self._pipe, self.run_dir, self._clock = pipe, run_dir, time.perf_counter

    def add(self, kind: str, *values: Any) -> None:
        self._pipe.post("recorder.add", kind, *values)

    def add_span(
        self, name: str, start_s: float, stop_s: float, track: str | None = None, **args: Any
    ) -> None:
        track = track or threading.current_thread().name
        self._pipe.post("span", name, start_s, stop_s, track, args)


class PipeControl:
    """A ServerControl, or its StockRoutes, that has rank 0 make its calls."""

    def __init__(self, pipe: Pipe, url: str, routes: bool = False) -> None:
        self._pipe, self.url, self._routes = pipe, url, routes
        self.engine = ""

    def __getattr__(self, method: str) -> Callable[..., Any]:
        """Return a method of the interface."""
        if method.startswith("_"):
            raise AttributeError(method)

        def call(*arguments: Any) -> Any:
            asked = ("call", self.url, self._routes, method, arguments)
            self.engine, value = self._pipe.ask(*asked)
            if method == "stock":
                there = PipeControl(self._pipe, self.url, routes=True)
                return cast(StockRoutes, there) if value else None
            return value

        return call


class Main(Performer):
    """The process's object: rank 0 calls its methods, and those of its ``lanes`` and ``slots``. It
    posts the lanes' reports to rank 0 (server_set.Reports)."""

    def begin(self, b: Begin) -> None:
        """Open the pool and start. The first call."""
        pipe = self._pipe
        pool = b.pool.open(b.config.connect_deadline_s)
        self._servers: dict[str, ServerLane] = {}
        self._keeps = b.options.keeps
        self.slots = ImageSlots(b.config.slots, Reserved(*b.reserved), b.taken, b.complete)
        options = replace(
            b.options,
            run_key=Key.parse(b.run_key, "rank 0's run key") if b.run_key else None,
            # cast: PipeControl finds its methods by name.
            make_control=(lambda url: cast(ServerControl, PipeControl(pipe, url)))
            if b.forwarded
            else None,
            drain=(lambda url: pipe.ask("drain", url)) if b.drains else None,
            lane_observer=self._observe,
        )
        recorder = PipeRecorder(pipe, b.run_dir)
        self.lanes = SyncLanes(pool, b.config, recorder, options, self, self.slots)
        self.lanes.start()

    def open_lane(self, url: str, epoch: int) -> None:
        # Registered before its start: its thread reports under its URL at once.
        lane = self._servers[url] = self.lanes.open_lane(url, epoch)
        lane.start()

    def stop_lane(self, url: str) -> None:
        """Stop a server's lane, unless it has ended, here or in the process before this one. Its
        end is posted to rank 0."""
        if lane := self._servers.get(url):
            lane.stop()

    def abort_lane(self, url: str) -> None:
        if lane := self._servers.get(url):
            lane.abort()

    def end(self) -> None:
        """End the process. The last call, after the lanes have ended or were given up."""
        self.lanes.end(time.monotonic() + JOIN_S)
        self.exit()

    # Called on the lanes' threads.

    def _observe(self, event: LaneEvent) -> None:
        if event.point is Point.GREET:
            self._pipe.post("connecting", event.url, self._servers[event.url].epoch)

    def note(self, url: str, entry: Entry, engine: str, label: Label | None = None) -> None:
        said = url, entry, engine, label
        if entry.standing is Standing.COMMITTING:
            # Wait until rank 0 has noted it: during the commit the server's version is uncertain,
            # and it must get no new request.
            self._pipe.ask("note", *said)
            return
        if self._keeps and entry.standing is Standing.HOLDS:
            # Before the report: rank 0 answers it with the go_on that ends this.
            self.slots.keep(url)
        self._pipe.post("note", *said)

    def refused(self, url: str, reason: str, final: bool) -> None:
        self._pipe.post("servers.refused", url, reason, final)

    def taken(self, url: str, run: str) -> None:
        self._pipe.post("servers.taken", url, run)

    def latch(self, error: SyncError) -> None:
        self._pipe.post("latch", error.cause, error.url, error.version, error.block)

    def sealed(self, version: int, published: Published | None) -> None:
        # Without patches: this process serves them, so they end with it.
        whole = None if published is None else replace(published, patches=())
        self._pipe.post("sealed", version, whole)

    def lane_ended(self, url: str) -> None:
        # First: rank 0 answers it with the server's next lane, if there is one.
        del self._servers[url]
        self._pipe.post("lane_ended", url)


def main(sock: socket.socket, parent: int) -> None:
    """Entry point of the process."""
    perform(sock, parent, Main)
