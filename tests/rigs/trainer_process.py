"""A light, real trainer as a process, driven over a pipe by its owner
(trainer_handle.TrainerProcess), who calls the methods of ``Run``.

Real are the images, the snapshotter, and the sync process with slots, sealer, lanes and their
deadlines; the training step is a fixed amount of arithmetic, and every version's weights follow
from its number (content.weights). It decides nothing: what happens at which point comes in, what
happened goes out."""

import json
import os
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from tests.rigs.trainer import SpoiledImages, Trainer, manifest_of, weights
from tests.rigs.watched_sync import WatchedSync
from titan_grpo.config import WeightSync
from titan_grpo.engines import vllm
from titan_grpo.errors import TransferFailed
from titan_grpo.observe import names
from titan_grpo.observe.recorder import Recorder
from titan_grpo.protocol.lane import LaneEvent, Point
from titan_grpo.protocol.messages import ServerState
from titan_grpo.protocol.pause_guard import Deadlines
from titan_grpo.subprocesses import end_with_parent
from titan_grpo.sync.lanes import SyncOptions
from titan_grpo.sync.server_set import NoObserver
from titan_grpo.unix_rpc import Pipe

SIDE = 384
"""Rows and columns of the step's matrices."""

BATCH = 10
"""Steps per message."""

SEND_S = 60.0
"""Deadline of the last messages, in seconds."""


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
    api_key: str = ""
    guarded: bool = True
    look_s: float = 5.0
    """See LaneContext: some cases wait for an idle lane's look."""
    lease_s: float = 0.0
    """How long a lane may be silent in a commit; 0: what follows from the deadlines."""

    @property
    def guard_deadlines(self) -> Deadlines | None:
        return Deadlines(self.lease_s, greet_s=60.0, again_s=0.5) if self.lease_s else None

    @property
    def config(self) -> WeightSync:
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

Say = Callable[..., None]
"""Tells the owner of an event: its kind, and its values by name."""


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

    def __init__(self, say: Say, cut: Callable[[int], None]) -> None:
        """``cut`` ends the connections to a process."""
        self._say, self._cut = say, cut
        self._changed = threading.Condition()
        self._wanted: Wanted | None = None
        self._passed = 0
        self._answer: tuple[str, int] | None = None

    def want(self, wanted: Wanted | None) -> None:
        """Watch for it; None: for nothing. Any thread."""
        with self._changed:
            self._wanted, self._passed, self._answer = wanted, 0, None

    def go(self, how: str, pid: int) -> None:
        """Let the held lane go on. Any thread."""
        with self._changed:
            self._answer = how, pid
            self._changed.notify_all()

    def __call__(self, passing: LaneEvent) -> None:
        """See protocol.lane.Observer; here it blocks, which only a fault run may."""
        if not self._due(passing):
            return
        self._say(
            "held_at",
            point=passing.point.value,
            url=passing.url,
            epoch=passing.epoch,
            version=passing.version,
            run_id=passing.run_id,
        )
        with self._changed:
            self._changed.wait_for(lambda: self._answer is not None, HOLD_S)
            (how, pid), self._answer = self._answer or ("continue", 0), None
        if how == "fail":
            raise TransferFailed("planted: the transfer ends here")
        if how == "cut":
            self._cut(pid)

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


class SendRecorder(Recorder):
    """A recorder that also tells how long each transfer to each server took."""

    def __init__(self, folder: str, say: Say) -> None:
        self._say = say
        super().__init__(folder)

    def add_span(
        self, name: str, start_s: float, stop_s: float, track: str | None = None, **args: Any
    ) -> None:
        super().add_span(name, start_s, stop_s, track, **args)
        if name == names.SEND_S and track is not None:
            self._say("send", url=track, seconds=stop_s - start_s)


class LedgerObserver(NoObserver):
    """The ledger's changes as events; no server leaves, and no other run takes over."""

    def __init__(self, say: Say) -> None:
        self._say = say

    def set_server(self, state: ServerState) -> None:
        self._say("server", url=state.url, held=state.version)


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
    """The main thread trains; a thread performs the owner's calls."""

    def __init__(self, settings: Settings, sock: socket.socket) -> None:
        self._s, self._pipe = settings, Pipe(sock, self)
        self._device = torch.device(settings.device)
        loaded = load_file(Path(settings.model) / "model.safetensors", device=settings.device)
        self._base = {name: t.float() for name, t in loaded.items()}
        self._masters = {name: t.clone() for name, t in self._base.items()}
        self._holder = Holder(self._say, lambda pid: self._sync.post("cut", pid))
        config = settings.config
        manifest = manifest_of(self._base, config.block_bytes, config.wire_dtype)
        self._trainer = Trainer(
            manifest,
            config,
            SendRecorder(settings.run_dir, self._say),
            SyncOptions(
                urls=settings.urls,
                engine=settings.engine,
                keys=(settings.api_key, ""),
                observer=LedgerObserver(self._say),
                device=self._device,
                guarded=settings.guarded,
                guard_deadlines=settings.guard_deadlines,
                look_s=settings.look_s,
                tamper=SpoiledImages,
            ),
            sync=partial(WatchedSync, watch=self._holder, points=(), say=self._say),
        )
        self._sync: WatchedSync = self._trainer.worker  # type: ignore[assignment]
        self._publishing, self._published = True, 0
        # Held over a publish: once publishing is off, no version is on its way that "newest" lacks.
        self._turn = threading.Lock()
        self._stopping = threading.Event()
        self._newest = -1
        self._errors: list[str] = []

    def _say(self, kind: str, **values: Any) -> None:
        """Any thread; never waits."""
        self._pipe.post("said", {"event": kind, "t": time.monotonic()} | values)

    def run(self) -> None:
        """Train until told to stop, then flush and close, and say how long that took."""
        trainer, settings = self._trainer, self._s
        clock = ThreadClock()
        step = Step(settings.step_s, self._device)
        self._pipe.start()
        trainer.start()
        self._say(
            "started",
            sync_pid=self._sync.pid,
            run_id=trainer.run_id,
            image_bytes=trainer.manifest.total_bytes,
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
                self._say("steps", rows=rows)
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
            self._say("published", version=version, count=self._published)
        if error is not None:
            self._errors.append(str(error))
            self._say("error", message=str(error))
        return blocked

    def _finish(self) -> None:
        begin = time.monotonic()
        held = self._trainer.worker.flush(self._newest, self._s.shutdown_s)
        flushed = time.monotonic()
        self._trainer.close()
        lanes_s = time.monotonic() - flushed
        self._say("ended", held=held, newest=self._newest, flush_s=flushed - begin, lanes_s=lanes_s)
        self._pipe.close(SEND_S)

    def _listen(self) -> None:
        self._pipe.receive()
        if not self._stopping.is_set():
            os._exit(3)  # whoever drives this run is gone

    # What the owner calls.

    def hold(self, url: str, point: Point, occurrence: int) -> None:
        self._holder.want(Wanted(url, point, occurrence))
        self._sync.watch_at(url, {point, Point.BEGIN})

    def go(self, how: str = "continue", pid: int = 0) -> None:
        """Let the held lane go on: "continue", "fail" its transfer, or "cut" what connects it with
        process ``pid``."""
        self._holder.go(how, pid)

    def forget(self) -> None:
        """Hold nothing that is not held yet."""
        self._holder.want(None)

    def spoil(self, url: str, last: bool) -> None:
        """Have the next transfer to a server carry a wrong byte, in the last or first tensor."""
        self._sync.post("spoil", url, self._trainer.manifest.tensors[-1 if last else 0].offset)

    def publish(self, on: bool) -> None:
        """Whether it publishes versions."""
        with self._turn:
            self._publishing = on

    def report(self, number: int) -> None:
        """Say what the ledger is now."""
        ledger = self._trainer.servers
        servers = {
            url: {
                "standing": e.standing.value,
                "held": e.held,
                "incoming": e.incoming,
                "error": str(ledger.last_error(url) or ""),
            }
            for url, e in ledger.entries().items()
        }
        mismatches = self._trainer.recorder.history().totals.get(names.DIGEST_MISMATCHES, 0)
        self._say(
            "report",
            number=number,
            servers=servers,
            newest=self._newest,
            digest_mismatches=mismatches,
            errors=self._errors[-3:],
        )

    def stop(self) -> None:
        self._stopping.set()


def main(sock: socket.socket, _: int, settings: str) -> None:
    """``settings``: as JSON."""
    end_with_parent()  # a process that is stopped does not read the end of its socket
    torch.set_num_threads(1)
    Run(Settings(**json.loads(settings)), sock).run()
    os._exit(0)
