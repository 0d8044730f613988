"""Rank 0's sync process, both ends. In the process are seals, lanes, HTTP and the source of ranges,
so that no thread of theirs wants rank 0's interpreter; at rank 0 the servers' lines, and what must
outlive the process.

::

    main thread --publish--> [pipe] --> sync process: sealer, image slots, lanes --> servers
        ^                      `<-- reports of the lanes: ServerSet, Recorder
        `------------- reserved slot: a pipe that both processes read

Killed, the process is started again, with the lanes, their epochs, the slot that the main thread
holds, the newest complete version, and the versions that were not complete yet. Servers keep what
they hold meanwhile. It has no CUDA (but with transport = "nccl") and no torchtitan. It ends with
rank 0, and what it leaves paused is its pause guard's.
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
from titan_grpo.protocol import ledger
from titan_grpo.protocol.lane import LaneEvent, Point, no_observer
from titan_grpo.protocol.messages import NIXL, Label
from titan_grpo.runkey import Key
from titan_grpo.sync.child import END_S, Child, Launched, Performer, perform
from titan_grpo.sync.images import ImagePool, ImageSlots, PoolAddress, Published, Reserved
from titan_grpo.sync.lane import ServerLane
from titan_grpo.sync.lanes import SyncLanes, SyncOptions, server_set
from titan_grpo.sync.publisher import Announcer, Copy
from titan_grpo.sync.server_set import JOIN_S, ServerSet
from titan_grpo.sync.transports.nixl import nixl_problem
from titan_grpo.unix_rpc import Pipe


@dataclass(frozen=True, slots=True)
class Begin:
    """What the process starts with."""

    pool: PoolAddress
    config: WeightSync
    options: SyncOptions
    """Without what only rank 0 has."""
    run_key: str = field(repr=False)
    forwarded: bool
    """Whether rank 0 makes the calls of the servers' control planes."""
    drains: bool
    run_dir: Path
    reserved: tuple[int, int, int]
    """Reserved.address."""
    taken: tuple[int, ...]
    """The slots that the main thread holds, or has published into without an end so far."""
    complete: Published | None
    """The newest complete version whose slot holds it still."""


class RemoteLane:
    """A lane in the sync process, as the server set has it here. Over all starts of that."""

    def __init__(self, owner: "SyncProcess", url: str, epoch: int) -> None:
        """``epoch``: of the last lane to the server."""
        self.url, self.epoch, self.engine = url, epoch, ""
        self._owner, self.ended = owner, threading.Event()
        self.stopping = False

    def start(self) -> None:
        # One piece: a process that is started in between gets the lane once, by its handover.
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
    """The image slots, as rank 0's threads use them."""

    def __init__(self, owner: "SyncProcess", reserved: Reserved) -> None:
        self._owner, self.reserved = owner, reserved
        self.taken: int | None = None
        """The slot that the main thread holds and has not published into."""
        self.kept: set[str] = set()

    def take_reserved(self) -> int | None:
        """The slot for the next version, or None: every slot is in use, so the version is skipped.
        Never waits."""
        # One piece for a restart, which must know who has each slot.
        with self._owner.lock:
            slot = self.reserved.take()
            self.taken = self.taken if slot is None else slot
            return slot

    def wait_reserved(self, timeout_s: float) -> int | None:
        return self.reserved.wait(timeout_s, self.take_reserved)

    def put_back(self, slot: int) -> None:
        """Return a slot that was taken and not written: it is the next one again. Never waits."""
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

    def newest(self) -> Published | None:
        return self._owner.complete


class SyncProcess(Child):
    """The weight sync, as rank 0 has it: the one assembly of a trainer, its benches and its
    tests."""

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
        """``launched``: the process, if it was started before."""
        super().__init__(config)
        self.pool, self.manifest = pool, pool.manifest
        self.recorder, self._o = recorder, options
        link = options.link(config)
        if link.transport == NIXL and (problem := nixl_problem()):
            raise ConfigError(problem)  # now: there it would end a process again and again
        self.hashing = link.hashing(pool.run_id)
        self.servers: ServerSet = server_set(
            config, recorder, options, lambda _, url, epoch: RemoteLane(self, url, epoch)
        )
        self.slots = MainSlots(self, Reserved())
        self.lanes: dict[str, RemoteLane] = {}
        self._jobs: dict[int, tuple[int, float]] = {}
        """Version that is not complete -> slot, and when it was published."""
        self.complete: Published | None = None
        self._sealed = False
        self._controls: dict[str, Any] = {}
        self._announcer = Announcer(
            0,
            pool.store.port,
            config.connect_deadline_s,
            lambda seconds: recorder.observe(names.COPY_S, seconds),
        )
        self._address = pool.address
        self._run(launched or self.launch(config))

    def start(self) -> None:
        """Have it seal versions and open the lanes, one per server."""
        with self.lock:
            self._begun = True
            self._begin()
        self.servers.start()

    def publish(self, version: int, slot: int, copy: Copy) -> None:
        """Rank 0 has started its part of the copy of ``version`` into ``slot``. Main thread; never
        waits."""
        if error := self._announcer.take_error():
            self.servers.latch(error)
        with self.lock:
            self.slots.taken = None
            self._jobs[version] = job = (slot, self.recorder.now())
            self.post("lanes.publish", version, *job)
        self._announcer(version, slot, copy)

    def fingerprint(self, image: memoryview) -> str:
        """The fingerprint of a version with these bytes, under this run's key."""
        return fingerprint(self.manifest.digest, self.hashing.blocks(image, self.manifest))

    def flush(self, version: int, timeout_s: float) -> list[str]:
        """No version follows; see ServerSet."""
        with self.lock:
            self._sealed = True
            self.post("lanes.seal")
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
        # What the last process had reserved: two processes' slots in one pipe would be written
        # twice at once.
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
        if self._sealed:
            self._pipe.post("lanes.seal")

    def _ended(self, text: str) -> None:
        text += "; the servers keep their versions until then"
        self.recorder.error(text)
        terminal.print_status(text)

    # What the process posts, one after the other, beside calls of ``servers`` and ``recorder``.

    def connecting(self, url: str, epoch: int) -> None:
        """A lane opens its ``epoch``-th connection."""
        if lane := self.lanes.get(url):
            lane.epoch = epoch

    def apply(self, url: str, event: ledger.Event, label: Label | None, engine: str) -> None:
        if lane := self.lanes.get(url):
            lane.engine = engine
        self.servers.apply(url, event, label)
        if self._o.keeps and isinstance(event, ledger.Holds) and url not in self.slots.kept:
            self.post("slots.go_on", url)

    def latch(self, cause: str, url: str, version: int | None, block: int | None) -> None:
        self.servers.latch(SyncError(cause, url=url, version=version, block=block))

    def lane_ended(self, url: str) -> None:
        """A lane has ended."""
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
        """What a lane waits for."""
        pipe = self._pipe
        if what == "apply":
            # Here, in order with all else.
            pipe.answer(number, lambda: self.apply(url, *arguments))
            return
        # On a thread: it may take a commit's deadline, and what ends it may be posted meanwhile.
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
        """A method of a server's control, or of its StockRoutes; the engine, and what it
        returns."""
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
    """A Recorder of the lanes whose entries rank 0's has."""

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
    """A ServerControl, or its StockRoutes, whose calls rank 0 makes."""

    def __init__(self, pipe: Pipe, url: str, routes: bool = False) -> None:
        self._pipe, self.url, self._routes = pipe, url, routes
        self.engine = ""

    def __getattr__(self, method: str) -> Callable[..., Any]:
        """A method of the interface."""
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
    """Performs what rank 0 posts, calls of ``lanes`` and ``slots`` among it, and posts what the
    lanes report (server_set.Reports)."""

    def begin(self, b: Begin) -> None:
        """The first of all calls."""
        pipe = self._pipe
        pool = b.pool.open(b.config.connect_deadline_s)
        self._servers: dict[str, ServerLane] = {}
        self._keeps = b.options.keeps
        self.slots = ImageSlots(b.config.slots, Reserved(*b.reserved), b.taken, b.complete)
        options = replace(
            b.options,
            run_key=Key.parse(b.run_key, "rank 0's run key") if b.run_key else None,
            # Its methods are looked up by name in the interface.
            make_control=(lambda url: cast(ServerControl, PipeControl(pipe, url)))
            if b.forwarded
            else None,
            drain=(lambda url: pipe.ask("drain", url)) if b.drains else None,
            lane_observer=self._passing,
        )
        recorder = PipeRecorder(pipe, b.run_dir)
        self.lanes = SyncLanes(pool, b.config, recorder, options, self, self.slots)
        self.lanes.start()

    def open_lane(self, url: str, epoch: int) -> None:
        """A server has come."""
        lane = self._servers[url] = self.lanes.open_lane(url, epoch)
        lane.start()

    def stop_lane(self, url: str) -> None:
        """A server leaves. The lane's end is posted to rank 0."""
        self._servers[url].stop()

    def abort_lane(self, url: str) -> None:
        self._servers[url].abort()

    def end(self) -> None:
        """The last of all calls, after the lanes have ended, or were given up."""
        self.lanes.end(time.monotonic() + JOIN_S)
        self.exit()

    # Lanes' threads.

    def _passing(self, event: LaneEvent) -> None:
        if event.point is Point.GREET:
            self._pipe.post("connecting", event.url, self._servers[event.url].epoch)

    def apply(self, url: str, event: ledger.Event, label: Label | None = None) -> None:
        said = (url, event, label, self._servers[url].engine)
        if isinstance(event, ledger.Committing):
            # Until rank 0 has noted it: from then on the server's version is not certain, and
            # rollouts must not ask it.
            self._pipe.ask("apply", *said)
            return
        if self._keeps and isinstance(event, ledger.Holds):
            # Before rank 0 has noted it: that one says when the server may go on.
            self.slots.keep(url)
        self._pipe.post("apply", *said)

    def refused(self, url: str, reason: str, final: bool) -> None:
        self._pipe.post("servers.refused", url, reason, final)

    def taken(self, url: str, run: str) -> None:
        self._pipe.post("servers.taken", url, run)

    def latch(self, error: SyncError) -> None:
        self._pipe.post("latch", error.cause, error.url, error.version, error.block)

    def sealed(self, version: int, published: Published | None) -> None:
        # This process serves the patches of its part.
        whole = None if published is None else replace(published, patches=())
        self._pipe.post("sealed", version, whole)

    def lane_ended(self, url: str) -> None:
        self._pipe.post("lane_ended", url)


def main(sock: socket.socket, parent: int) -> None:
    """Entry point of the process."""
    perform(sock, parent, Main)
