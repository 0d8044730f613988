"""The sync process: one per run, on rank 0's host. It seals versions and has the lanes, so that no
thread of theirs wants rank 0's interpreter; what they report goes to process.SyncProcess there.

It has no CUDA (but with transport = "nccl") and no torchtitan. It ends with rank 0, and what it
leaves paused is its pause guard's.
"""

import argparse
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch

from titan_grpo.engines.control import ServerControl, StockRoutes
from titan_grpo.errors import SyncError
from titan_grpo.layout.image import SharedImage
from titan_grpo.layout.manifest import Manifest
from titan_grpo.observe.recorder import Recorder
from titan_grpo.protocol import ledger
from titan_grpo.protocol.lane_events import LaneEvent, Point
from titan_grpo.protocol.ledger import Entry
from titan_grpo.protocol.messages import Label
from titan_grpo.runkey import Key
from titan_grpo.subprocesses import exit_with_parent
from titan_grpo.sync.lane import ServerLane
from titan_grpo.sync.lanes import SyncLanes
from titan_grpo.sync.part import LOOPBACK, ImagePool
from titan_grpo.sync.pipe import Pipe
from titan_grpo.sync.process import Begin
from titan_grpo.sync.server_set import JOIN_S
from titan_grpo.sync.slots import ImageSlots, Published, Reserved
from titan_grpo.sync.transports.store import join_store


class PipeRecorder(Recorder):
    """A Recorder of the lanes whose entries rank 0's has."""

    def __init__(self, pipe: Pipe, run_dir: Path) -> None:
        """Opens no file."""
        self._pipe, self.run_dir, self._clock = pipe, run_dir, time.perf_counter

    def add(self, kind: str, *values: Any) -> None:
        """See Recorder."""
        self._pipe.post("entry", kind, *values)

    def add_span(
        self, name: str, start_s: float, stop_s: float, track: str | None = None, **args: Any
    ) -> None:
        """See Recorder. One clock for all processes of a host."""
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


class Reporting:
    """Reports of the lanes, for rank 0. Each server's line is known here too: by the events of its
    lane alone."""

    def __init__(self, pipe: Pipe, keep: Callable[[str], object] | None) -> None:
        """``keep`` is called before rank 0 knows that a server holds a version: it says when the
        server may go on. None: it always may."""
        self._pipe, self._keep = pipe, keep
        self.lanes: dict[str, ServerLane] = {}
        self._entries: dict[str, Entry] = {}
        self._refusals: dict[str, str] = {}

    def opened(self, lane: ServerLane) -> None:
        """A lane of whose server nothing is known."""
        self.lanes[lane.url], self._entries[lane.url] = lane, Entry()
        self._refusals.pop(lane.url, None)

    def apply(self, url: str, event: ledger.Event, label: Label | None = None) -> None:
        """See Reports. Before a commit it waits until rank 0 knows: from then on the server's
        version is not certain, and rollouts must not ask it."""
        entry, _ = ledger.step(self._entries[url], event)
        self._entries[url] = entry
        if entry.held is not None:
            self._refusals.pop(url, None)
        said = (url, event, label, self.lanes[url].engine)
        if isinstance(event, ledger.Committing):
            self._pipe.ask("apply", *said)
            return
        if isinstance(event, ledger.Holds) and self._keep is not None:
            self._keep(url)
        self._pipe.post("apply", *said)

    def entry(self, url: str) -> Entry:
        """See Reports."""
        return self._entries[url]

    def refused(self, url: str, reason: str, final: bool) -> bool:
        """See Reports."""
        known = self._refusals.get(url) == reason
        self._refusals[url] = reason
        self._pipe.post("refused", url, reason, final)
        return known

    def taken(self, url: str, run: str) -> None:
        """See Reports."""
        self._pipe.post("taken", url, run)

    def latch(self, error: SyncError) -> None:
        """See Reports."""
        self._pipe.post("latch", error.cause, error.url, error.version, error.block)

    def sealed(self, version: int, published: Published | None) -> None:
        """See Reports."""
        # Patches are large, and of no use to another process.
        whole = None if published is None else replace(published, patches=())
        self._pipe.post("sealed", version, whole)

    def lane_ended(self, url: str) -> None:
        """See Reports."""
        self._pipe.post("lane_ended", url)


class Performer:
    """Performs what the rank posts that started the process, one call after the other."""

    def __init__(self, sock: socket.socket) -> None:
        self._pipe = Pipe(sock, self)

    def run(self) -> None:
        """Until the rank ends."""
        self._pipe.start()
        self._pipe.receive()

    def exit(self) -> None:
        """End the process."""
        self._pipe.close()
        logging.shutdown()
        os._exit(0)


class Main(Performer):
    """Performs what rank 0 posts."""

    def answered(self, number: int, value: Any, error: Any) -> None:
        """See Pipe."""
        self._pipe.answered(number, value, error)

    def begin(self, b: Begin) -> None:
        """The first of all calls."""
        pipe, manifest = self._pipe, Manifest.from_json(b.manifest)
        extents = manifest.parts[b.part].extents
        images = tuple(SharedImage.attach(image, extents, serve=True) for image in b.images)
        wait_s = b.config.connect_deadline_s
        pool = ImagePool(
            b.run_id,
            manifest,
            b.part,
            images,
            join_store(LOOPBACK, b.store_port, wait_s),
            None if b.hashed is None else join_store(*b.hashed, wait_s),
        )
        reserved = Reserved(*b.reserved)
        self._slots = ImageSlots(b.config.slots, reserved, b.taken, b.complete)
        self._reports = Reporting(pipe, self._slots.keep if b.options.keeps else None)
        options = replace(
            b.options,
            run_key=Key.parse(b.run_key, "rank 0's run key") if b.run_key else None,
            make_control=self._control if b.forwarded else None,
            drain=(lambda url: pipe.ask("drain", url)) if b.drains else None,
            lane_observer=self._passing,
        )
        self._lanes = SyncLanes(
            pool,
            b.config,
            PipeRecorder(pipe, b.run_dir),
            options,
            self._reports,
            self._slots,
        )
        self._lanes.start()

    def _control(self, url: str) -> ServerControl:
        # Its methods are looked up by name in the interface.
        return cast(ServerControl, PipeControl(self._pipe, url))

    def _passing(self, event: LaneEvent) -> None:
        if event.point is Point.GREET:
            self._pipe.post("connecting", event.url, self._reports.lanes[event.url].epoch)

    def open_lane(self, url: str, epoch: int) -> None:
        """A server has come."""
        lane = self._lanes.open_lane(url, epoch)
        self._reports.opened(lane)
        lane.start()

    def stop_lane(self, url: str) -> None:
        """A server leaves. The lane's end is posted to rank 0."""
        self._reports.lanes[url].stop()

    def abort_lane(self, url: str) -> None:
        """See ServerLane.abort."""
        self._reports.lanes[url].abort()

    def publish(self, version: int, slot: int, published_s: float) -> None:
        """See SyncLanes."""
        self._lanes.publish(version, slot, published_s)

    def keep(self, url: str) -> None:
        """See ImageSlots."""
        self._slots.keep(url)

    def go_on(self, url: str) -> None:
        """See ImageSlots."""
        self._slots.go_on(url)

    def seal(self) -> None:
        """See SyncLanes."""
        self._lanes.seal()

    def end(self) -> None:
        """The last of all calls, after the lanes have ended, or were given up."""
        self._lanes.end(time.monotonic() + JOIN_S)
        self.exit()


def main(argv: list[str], make: type[Performer] = Main) -> None:
    """Entry point of a sync process."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--fd", type=int, required=True)
    parser.add_argument("--parent", type=int, required=True)
    options = parser.parse_args(argv)
    exit_with_parent(options.parent)
    # A signal to the trainer's group ends the trainer, and the end of that ends this process: until
    # then its lanes finish their commits.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    logging.basicConfig(level=logging.WARNING, format="titan_grpo sync %(process)d: %(message)s")
    torch.set_num_threads(1)
    make(socket.socket(fileno=options.fd)).run()
    # The rank is gone. Lanes may wait for their servers.
    os._exit(1)


if __name__ == "__main__":
    main(sys.argv[1:])
