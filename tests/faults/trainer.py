"""A light, real trainer for the fault matrix: ``python -m tests.faults.trainer``, driven by JSON
lines.

Real are the images, the snapshotter, the slots, the sealer, the lanes and their deadlines; the
training step is a fixed amount of arithmetic, and every version's weights follow from its number
(content.weights). It decides nothing: what happens at which point comes in over stdin, what
happened goes out over stdout."""

import json
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from tests.faults.content import weights
from tests.faults.holding import Holder, Wanted
from tests.faults.rig import Ears, Rig, Settings, copy_plan
from tests.faults.sockets import cut
from titan_grpo.observe import names
from titan_grpo.protocol.lane_events import LaneEvent, Point
from titan_grpo.subprocesses import end_with_parent
from titan_grpo.sync.publisher import Publisher

SIDE = 384
"""Rows and columns of the step's matrices."""

BATCH = 10
"""Steps per line of output."""


class Out:
    """Lines of JSON, written by a thread of its own: a full pipe must not stop a step or a lane."""

    def __init__(self) -> None:
        self._lines: queue.SimpleQueue[Mapping[str, Any] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="out", daemon=True)
        self._thread.start()

    def __call__(self, event: Mapping[str, Any]) -> None:
        """Queue one event, with the time."""
        self._lines.put({"t": time.monotonic()} | dict(event))

    def close(self) -> None:
        """Write what is queued."""
        self._lines.put(None)
        self._thread.join(5.0)

    def _run(self) -> None:
        while (event := self._lines.get()) is not None:
            sys.stdout.write(json.dumps(event) + "\n")
            sys.stdout.flush()


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


class FaultTrainer:
    """The main thread trains; a thread reads commands."""

    def __init__(self, settings: Settings, out: Out) -> None:
        self._s, self._out = settings, out
        self._device = torch.device(settings.device)
        loaded = load_file(Path(settings.model) / "model.safetensors", device=settings.device)
        self._base = {name: t.float() for name, t in loaded.items()}
        self._masters = {name: t.clone() for name, t in self._base.items()}
        self._holder = Holder(out, self._strike)
        self._rig = Rig(settings, self._base, Ears(self._on_server, self._holder, self._sent))
        self._slots: dict[int, int] = {}
        self._publishing = True
        # Held over a publish: once publishing is off, no version is on its way that "newest" lacks.
        self._turn = threading.Lock()
        self._stopping = threading.Event()
        self._schedstat = Path(f"/proc/self/task/{threading.get_native_id()}/schedstat")
        self._newest = -1
        self._errors: list[str] = []

    def run(self) -> None:
        """Train until told to stop, then flush and close, and say how long that took."""
        rig, settings = self._rig, self._s
        publisher = rig.worker.publisher(copy_plan(rig.manifest))
        step = Step(settings.step_s, self._device)
        rig.start()
        started = {
            "run_id": rig.run_id,
            "image_bytes": rig.manifest.total_bytes,
            "buckets": rig.buckets,
        }
        self._out({"event": "started", "pid": os.getpid(), "settings": asdict(settings)} | started)
        threading.Thread(target=self._listen, name="commands", daemon=True).start()
        version, rows = 0, []
        while not self._stopping.is_set():
            begin, before = time.perf_counter(), self._scheduled()
            step.run()
            version += 1
            self._update(version)
            with self._turn:
                blocked = self._publish(publisher, version) if self._due(version) else 0.0
            seconds, after = time.perf_counter() - begin, self._scheduled()
            rows.append(
                (time.monotonic(), seconds, after[1] - before[1], blocked, after[0] - before[0])
            )
            if len(rows) == BATCH:
                self._out({"event": "steps", "rows": rows})
                rows = []
        self._finish(publisher)

    def _due(self, version: int) -> bool:
        return self._publishing and version % self._s.steps_per_version == 0

    def _update(self, version: int) -> None:
        """The optimizer: the same amount of work in every step."""
        for name, tensor in weights(self._base, version, self._s.salt).items():
            self._masters[name].copy_(tensor)

    def _publish(self, publisher: Publisher, version: int) -> float:
        """Seconds that the main thread lost to the sync."""
        begin = time.perf_counter()
        slot = self._rig.worker.slots.take_reserved()
        if slot is not None:
            self._slots[version] = slot
            publisher.publish(version, slot, self._masters)
            publisher.fence()
        error = self._rig.worker.servers.take_error()
        blocked = time.perf_counter() - begin
        if slot is not None:
            self._newest = version
            self._out({"event": "published", "version": version})
        if error is not None:
            self._errors.append(str(error))
            self._out({"event": "error", "message": str(error)})
        return blocked

    def _finish(self, publisher: Publisher) -> None:
        begin = time.monotonic()
        held = self._rig.worker.flush(self._newest, self._s.shutdown_s)
        flush_s = time.monotonic() - begin
        publisher.close()
        spent = {"flush_s": flush_s, "lanes_s": self._rig.close()}
        self._out({"event": "ended", "held": held, "newest": self._newest} | spent)

    def _scheduled(self) -> tuple[float, float]:
        """How long this thread has run, and been ready to run without a core, so far, in
        seconds."""
        ran, waited = self._schedstat.read_text().split()[:2]
        return int(ran) / 1e9, int(waited) / 1e9

    def _on_server(self, url: str, held: int | None, accepting: bool, label: str) -> None:
        self._out(
            {"event": "server", "url": url, "held": held, "accepting": accepting, "label": label}
        )

    def _sent(self, url: str, seconds: float) -> None:
        self._out({"event": "send", "url": url, "seconds": seconds})

    def _listen(self) -> None:
        for line in sys.stdin:
            command = json.loads(line)
            match command["do"]:
                case "hold":
                    self._holder.want(
                        Wanted(command["url"], Point(command["point"]), int(command["occurrence"]))
                    )
                case "go":
                    self._holder.go(command)
                case "forget":
                    self._holder.want(None)
                case "publish":
                    with self._turn:
                        self._publishing = command["on"]
                case "report":
                    self._out({"event": "report", "number": command["number"]} | self._report())
                case "stop":
                    self._stopping.set()
        if not self._stopping.is_set():
            os._exit(3)  # whoever drives this run is gone

    def _report(self) -> dict[str, Any]:
        entries = self._rig.worker.servers.entries().items()
        servers = {
            url: {"standing": e.standing.value, "held": e.held, "incoming": e.incoming}
            for url, e in entries
        }
        totals = self._rig.recorder.totals()
        mismatches = totals.get(names.DIGEST_MISMATCHES, 0)
        return {
            "servers": servers,
            "newest": self._newest,
            "digest_mismatches": mismatches,
            "errors": self._errors[-3:],
        }

    def _strike(self, answer: Mapping[str, Any], passing: LaneEvent) -> Callable[[], None] | None:
        if answer["with"] == "cut":
            self._out({"event": "cut", "connections": cut(int(answer["pid"]))})
            return None
        # flip: in the tensor that is sent last, or first, of the version that this lane has pinned
        spec = self._rig.manifest.tensors[-1 if answer["last"] else 0]
        image = self._rig.images[self._slots[passing.version]].buffer
        image[spec.offset] ^= 0x01

        def undo() -> None:
            image[spec.offset] ^= 0x01

        return undo


def main() -> None:
    """Entry point: the first line of stdin is the settings."""
    settings = Settings(**json.loads(sys.stdin.readline()))
    end_with_parent()
    if os.getppid() != settings.parent:
        os._exit(0)  # the runner had ended before
    torch.set_num_threads(1)
    out = Out()
    FaultTrainer(settings, out).run()
    out.close()
    os._exit(0)


if __name__ == "__main__":
    main()
