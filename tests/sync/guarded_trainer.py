"""Rank 0 of a trainer as a process: it publishes versions to one HTTP server and kills or freezes
itself at a point.

``python caretaken_trainer.py '{"url": ..., "folder": ..., "point": "load", "signal": 9, "versions":
3}'``: the signal comes at that point of version 2, the ``times``-th time it is passed. One line of
JSON on stdout after each event; ends cleanly when all versions are held. With ``fork`` a child that
it forked outlives it, until stdin ends.
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch

from titan_grpo.config import WeightSync
from titan_grpo.engines.vllm import VllmControl
from titan_grpo.layout.infer import infer_layout
from titan_grpo.layout.plan import copy_ops
from titan_grpo.observe.recorder import Recorder
from titan_grpo.protocol.lane_events import LaneEvent, Point
from titan_grpo.protocol.pause_guard import Deadlines
from titan_grpo.sync.worker import ImagePool, SyncOptions, SyncWorker

SHAPES = {"up": (512, 256), "down": (256, 512)}
DEADLINES = Deadlines(pause_s=3.0, greet_s=30.0, again_s=0.5)
WAIT_S = 60.0


def say(**event: Any) -> None:
    print(json.dumps(event | {"at": time.time()}), flush=True)


class Trainer:
    """What titan.syncing builds, with one rank and two small matrices."""

    def __init__(self, options: dict[str, Any]) -> None:
        self.point, self.number = Point(options["point"]), int(options["signal"])
        folder = Path(options["folder"])
        sizes = {"block_bytes": 1 << 16, "bucket_bytes": 1 << 16}
        config = WeightSync(
            **sizes,
            apply=options["apply"],
            commit_deadline_s=5.0,
            backoff_s=0.05,
            backoff_max_s=0.2,
        )
        layout = infer_layout(dict, SHAPES)
        manifest = layout.manifest("bfloat16", config.block_bytes)
        self.pool = ImagePool.create(manifest, config.slots)
        self.recorder = Recorder(folder)
        self.left = int(options["times"])
        self.worker = SyncWorker(
            self.pool,
            config,
            self.recorder,
            SyncOptions(
                urls=[options["url"]],
                make_control=lambda url: VllmControl(
                    url, options["api_key"], config.commit_deadline_s
                ),
                keys=(options["api_key"], ""),
                lane_observer=self.watch,
                guard_deadlines=DEADLINES,
            ),
        )
        assert self.worker.guard is not None
        self.guard = self.worker.guard
        ops = {
            fqn: copy_ops(layout, manifest, fqn, (0,) * len(shape), shape)
            for fqn, shape in SHAPES.items()
        }
        self.publisher = self.worker.publisher(ops)
        self.worker.start()
        say(pause_guard=self.guard.pid)

    def watch(self, passing: LaneEvent) -> None:
        if passing.point is not self.point or passing.version != 2:
            return
        self.left -= 1
        if self.left == 0:
            say(signalled=passing.point.value, epoch=passing.epoch, label=passing.label)
            os.kill(os.getpid(), self.number)

    def publish(self, version: int) -> None:
        slot = self.worker.slots.wait_reserved(WAIT_S)
        assert slot is not None, f"no slot for version {version}"
        self.publisher.publish(
            version, slot, {fqn: torch.full(shape, float(version)) for fqn, shape in SHAPES.items()}
        )
        self.publisher.fence()
        assert self.worker.servers.wait_held(version, WAIT_S, everyone=False), (
            f"version {version} is not held"
        )
        say(held=version, label=str(self.worker.slots.newest().label))

    def close(self) -> None:
        self.worker.close()
        self.publisher.close()
        self.recorder.close()
        self.pool.close()
        say(ended=True, restarts=self.guard.restarts, late=self.guard.late)


def main() -> None:
    options = json.loads(sys.argv[1])
    trainer = Trainer(options)
    if options["fork"] and os.fork() == 0:
        os.read(0, 1)
        os._exit(0)
    for version in range(1, options["versions"] + 1):
        trainer.publish(version)
    trainer.close()


if __name__ == "__main__":
    main()
