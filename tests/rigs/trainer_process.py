"""A light, real trainer as a process, driven by JSON lines over a socket
(trainer_handle.TrainerProcess).

Real are the images, the snapshotter, and the sync process with slots, sealer, lanes and their
deadlines; the training step is a fixed amount of arithmetic, and every version's weights follow
from its number (content.weights). It decides nothing: what happens at which point comes in, what
happened goes out."""

import os
import queue
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from tests.rigs.trainer import SpoiledImages, Trainer, manifest_of, weights
from tests.rigs.watched_sync import WatchedSync
from titan_grpo.config import WeightSync
from titan_grpo.engines import vllm
from titan_grpo.errors import PeerError, TitanGrpoError, TransferFailed
from titan_grpo.observe import names
from titan_grpo.observe.recorder import Recorder
from titan_grpo.protocol.lane import LaneEvent, Point
from titan_grpo.protocol.messages import ServerState
from titan_grpo.subprocesses import end_with_parent
from titan_grpo.sync.lanes import SyncOptions
from titan_grpo.unix_rpc import Channel

SIDE = 384
"""Rows and columns of the step's matrices."""

BATCH = 10
"""Steps per message."""

SEND_S = 60.0
"""Deadline of one message, in seconds."""

QUIET_S = 3600.0
"""Longest time without a command, in seconds; the socket's end ends the wait before."""


@dataclass(frozen=True, slots=True)
class Settings:
    """One run. ``model``: folder with model.safetensors; ``salt`` tells runs' weights apart;
    ``rest_s``: between two steps, in which the core is free; ``calm``: after so many published
    versions it publishes nothing until it is told to."""

    model: str
    urls: list[str]
    run_dir: str
    salt: int
    deadline_s: float = 3.0
    connect_s: float = 60.0
    shutdown_s: float = 6.0
    backoff_s: float = 0.1
    step_s: float = 0.03
    rest_s: float = 0.0
    steps_per_version: int = 8
    calm: list[int] = field(default_factory=list)
    bind_host: str = "127.0.0.1"
    apply: str = "staged"
    transport: str = "auto"
    device: str = "cpu"
    block_bytes: int = 64 << 10
    bucket_bytes: int = 128 << 10
    engine: str = vllm.NAME
    guarded: bool = True
    look_s: float = 5.0
    """See LaneContext: some cases wait for an idle lane's look."""

    @property
    def config(self) -> WeightSync:
        """The trainer's section."""
        return WeightSync(
            block_bytes=self.block_bytes,
            bucket_bytes=self.bucket_bytes,
            bind_host=self.bind_host,
            apply=self.apply,  # type: ignore[arg-type]
            transport=self.transport,  # type: ignore[arg-type]
            connect_deadline_s=self.connect_s,
            lane_deadline_s=self.deadline_s,
            commit_deadline_s=self.deadline_s,
            shutdown_deadline_s=self.shutdown_s,
            backoff_s=self.backoff_s,
            backoff_max_s=0.5,
        )


HOLD_S = 120.0
"""Longest time that a lane is held, in seconds: whoever asked for it may have gone."""

Emit = Callable[[Mapping[str, Any]], None]
Strike = Callable[[Mapping[str, Any]], None]
"""Does what ``go`` asks for in the lane's thread."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """Hold the lane to ``url`` at its ``occurrence``-th passing of ``point`` from now on."""

    url: str
    point: Point
    occurrence: int

    @property
    def between_epochs(self) -> bool:
        """Whether the point is passed by a new epoch only, which an idle, healthy lane never
        opens."""
        return self.point in (Point.GREET, Point.CONNECTED)


class Holder:
    """Observer of a fault run's lanes. Decides nothing: it stops where it is told, says so, and
    waits."""

    def __init__(self, emit: Emit, strike: Strike) -> None:
        self._emit, self._strike = emit, strike
        self._changed = threading.Condition()
        self._wanted: Wanted | None = None
        self._passed = 0
        self._answer: Mapping[str, Any] | None = None

    def want(self, wanted: Wanted | None) -> None:
        """Watch for it; None: for nothing. Any thread."""
        with self._changed:
            self._wanted, self._passed, self._answer = wanted, 0, None

    def go(self, answer: Mapping[str, Any]) -> None:
        """Let the held lane go on as ``answer["with"]`` says. Any thread."""
        with self._changed:
            self._answer = answer
            self._changed.notify_all()

    def __call__(self, passing: LaneEvent) -> None:
        """See protocol.lane.Observer; here it blocks, which only a fault run may."""
        if not self._due(passing):
            return
        self._emit(
            {"event": "held_at", "point": passing.point.value, "url": passing.url} | _of(passing)
        )
        with self._changed:
            self._changed.wait_for(lambda: self._answer is not None, HOLD_S)
            answer, self._answer = self._answer or {"with": "continue"}, None
        if answer["with"] == "fail":
            raise TransferFailed("planted: the transfer ends here")
        if answer["with"] != "continue":
            self._strike(answer)

    def _due(self, passing: LaneEvent) -> bool:
        with self._changed:
            wanted = self._wanted
            if wanted is None or passing.url != wanted.url:
                return False
            if wanted.between_epochs and passing.point is Point.BEGIN:
                raise TransferFailed("planted: the epoch ends here, so that the next one begins")
            self._passed += passing.point is wanted.point
            if passing.point is not wanted.point or self._passed < wanted.occurrence:
                return False
            self._wanted = None
            return True


def _of(passing: LaneEvent) -> dict[str, Any]:
    return {"epoch": passing.epoch, "version": passing.version, "run_id": passing.run_id}


class Out:
    """Events, sent by a thread of its own: a full socket must not stop a step or a lane."""

    def __init__(self, channel: Channel) -> None:
        self._events: queue.SimpleQueue[Mapping[str, Any] | None] = queue.SimpleQueue()
        self._channel = channel
        self._thread = threading.Thread(target=self._run, name="out", daemon=True)
        self._thread.start()

    def __call__(self, event: Mapping[str, Any]) -> None:
        """Queue one event, with the time."""
        self._events.put({"t": time.monotonic()} | dict(event))

    def close(self) -> None:
        """Send what is queued."""
        self._events.put(None)
        self._thread.join(SEND_S)

    def _run(self) -> None:
        # no deadline: close() ends it, and the thread is a daemon
        while (event := self._events.get()) is not None:
            self._channel.send(event, SEND_S)


class SendRecorder(Recorder):
    """A recorder that also tells how long each transfer to each server took."""

    def __init__(self, folder: str, out: Out) -> None:
        self._out = out
        super().__init__(folder)

    def add_span(
        self, name: str, start_s: float, stop_s: float, track: str | None = None, **args: Any
    ) -> None:
        """See Recorder."""
        super().add_span(name, start_s, stop_s, track, **args)
        if name == names.SEND_S and track is not None:
            self._out({"event": "send", "url": track, "seconds": stop_s - start_s})


class LedgerObserver:
    """server_set.ServerObserver: the ledger's changes as events."""

    def __init__(self, out: Out) -> None:
        self._out = out

    def set_server(self, state: ServerState) -> None:
        """See ServerObserver."""
        self._out(
            {
                "event": "server",
                "url": state.url,
                "held": state.version,
                "accepting": state.accepting,
                "label": state.label,
            }
        )

    def remove_server(self, url: str) -> None:
        """No server leaves."""

    def fail(self, error: TitanGrpoError) -> None:
        """No other run takes over."""


class ThreadClock:
    """What the kernel says of the calling thread. Made and read by that thread."""

    def __init__(self) -> None:
        self._schedstat = Path(f"/proc/self/task/{threading.get_native_id()}/schedstat")

    def read(self) -> tuple[float, float]:
        """Seconds so far on a core, and ready to run without one.

        The first is not schedstat's: for a thread that keeps its core that field is as old as the
        last tick (4 ms at 250 Hz), by which 30 ms of arithmetic look like 28 ms and a wait of 2 ms.
        """
        ran = time.thread_time()
        return ran, int(self._schedstat.read_text().split()[1]) / 1e9


class Step:
    """One training step's arithmetic, always the same amount, about ``seconds`` long on an idle
    core."""

    def __init__(self, seconds: float, device: torch.device) -> None:
        self._a = torch.randn(SIDE, SIDE, device=device)
        self._rounds = 1
        single = min(self._timed() for _ in range(20))
        self._rounds = max(1, round(seconds / single))

    def run(self) -> None:
        """Compute."""
        value = self._a
        for _ in range(self._rounds):
            value = torch.mm(self._a, value).clamp_(-1.0, 1.0)
        if value.is_cuda:
            torch.cuda.synchronize(value.device)

    def _timed(self) -> float:
        start = time.perf_counter()
        self.run()
        return time.perf_counter() - start


class Run:
    """The main thread trains; a thread reads commands."""

    def __init__(self, settings: Settings, channel: Channel, out: Out) -> None:
        self._s, self._channel, self._out = settings, channel, out
        self._device = torch.device(settings.device)
        loaded = load_file(Path(settings.model) / "model.safetensors", device=settings.device)
        self._base = {name: t.float() for name, t in loaded.items()}
        self._masters = {name: t.clone() for name, t in self._base.items()}
        self._holder = Holder(out, self._cut)
        config = settings.config
        manifest = manifest_of(self._base, config.block_bytes, config.wire_dtype)
        self._trainer = Trainer(
            manifest,
            config,
            SendRecorder(settings.run_dir, out),
            SyncOptions(
                urls=settings.urls,
                engine=settings.engine,
                observer=LedgerObserver(out),
                device=self._device,
                guarded=settings.guarded,
                look_s=settings.look_s,
                tamper=SpoiledImages,
            ),
            sync=partial(WatchedSync, watch=self._holder, points=(), say=out),
        )
        self._sync: WatchedSync = self._trainer.worker  # type: ignore[assignment]
        self._publishing, self._published = True, 0
        # Held over a publish: once publishing is off, no version is on its way that "newest" lacks.
        self._turn = threading.Lock()
        self._stopping = threading.Event()
        self._newest = -1
        self._errors: list[str] = []

    def run(self) -> None:
        """Train until told to stop, then flush and close, and say how long that took."""
        trainer, settings = self._trainer, self._s
        clock = ThreadClock()
        step = Step(settings.step_s, self._device)
        trainer.start()
        self._out(
            {
                "event": "started",
                "pid": os.getpid(),
                "sync_pid": self._sync.pid,
                "run_id": trainer.run_id,
                "image_bytes": trainer.manifest.total_bytes,
                "settings": asdict(settings),
            }
        )
        threading.Thread(target=self._listen, name="commands", daemon=True).start()
        version, rows = 0, []
        while not self._stopping.is_set():
            begin, before = time.perf_counter(), clock.read()
            step.run()
            version += 1
            self._update(version)
            with self._turn:
                blocked = self._publish(version) if self._due(version) else 0.0
            seconds, after = time.perf_counter() - begin, clock.read()
            rows.append(
                (time.monotonic(), seconds, after[1] - before[1], blocked, after[0] - before[0])
            )
            if len(rows) == BATCH:
                self._out({"event": "steps", "rows": rows})
                rows = []
            self._stopping.wait(self._s.rest_s)
        self._finish()

    def _due(self, version: int) -> bool:
        return self._publishing and version % self._s.steps_per_version == 0

    def _update(self, version: int) -> None:
        """The optimizer: the same amount of work in every step."""
        for name, tensor in weights(self._base, version, self._s.salt).items():
            self._masters[name].copy_(tensor)

    def _publish(self, version: int) -> float:
        """Seconds that the main thread lost to the sync."""
        begin = time.perf_counter()
        published = self._trainer.publish(version, self._masters)
        error = self._trainer.servers.take_error()
        blocked = time.perf_counter() - begin
        if published:
            self._newest, self._published = version, self._published + 1
            self._publishing = self._published not in self._s.calm
            self._out({"event": "published", "version": version, "count": self._published})
        if error is not None:
            self._errors.append(str(error))
            self._out({"event": "error", "message": str(error)})
        return blocked

    def _finish(self) -> None:
        begin = time.monotonic()
        held = self._trainer.worker.flush(self._newest, self._s.shutdown_s)
        flushed = time.monotonic()
        self._trainer.close()
        spent = {"flush_s": flushed - begin, "lanes_s": time.monotonic() - flushed}
        self._out({"event": "ended", "held": held, "newest": self._newest} | spent)

    def _listen(self) -> None:
        try:
            while (command := self._channel.receive(QUIET_S)) is not None:
                self._obey(command)
        except PeerError:
            pass
        if not self._stopping.is_set():
            os._exit(3)  # whoever drives this run is gone

    def _obey(self, command: Mapping[str, Any]) -> None:
        match command["do"]:
            case "hold":
                wanted = Wanted(command["url"], Point(command["point"]), int(command["occurrence"]))
                self._holder.want(wanted)
                self._sync.watch_at(wanted.url, {wanted.point, Point.BEGIN})
            case "go":
                self._holder.go(command)
            case "forget":
                self._holder.want(None)
            case "spoil":
                spec = self._trainer.manifest.tensors[-1 if command["last"] else 0]
                self._sync.post("spoil", command["url"], spec.offset)
            case "publish":
                with self._turn:
                    self._publishing = command["on"]
            case "report":
                self._out({"event": "report", "number": command["number"]} | self._report())
            case "stop":
                self._stopping.set()

    def _report(self) -> dict[str, Any]:
        servers = {
            url: {"standing": e.standing.value, "held": e.held, "incoming": e.incoming}
            for url, e in self._trainer.servers.entries().items()
        }
        mismatches = self._trainer.recorder.history().totals.get(names.DIGEST_MISMATCHES, 0)
        return {
            "servers": servers,
            "newest": self._newest,
            "digest_mismatches": mismatches,
            "errors": self._errors[-3:],
        }

    def _cut(self, answer: Mapping[str, Any]) -> None:
        self._sync.post("cut", int(answer["pid"]))


def main(sock: socket.socket, _: int) -> None:
    """The first message is the settings."""
    channel = Channel(sock)
    end_with_parent()  # a process that is stopped does not read the end of its socket
    first = channel.receive(QUIET_S)
    if first is None:
        return  # the owner had ended before
    torch.set_num_threads(1)
    out = Out(channel)
    Run(Settings(**first), channel, out).run()
    out.close()
    os._exit(0)
