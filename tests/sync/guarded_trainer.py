"""Rank 0 of a trainer as a process: it publishes versions to one HTTP server and kills or freezes
itself at a point.

``python guarded_trainer.py '{"url": ..., "folder": ..., "point": "load", "signal": 9, "versions":
3}'``: the signal comes at that point of version 2, the ``times``-th time it is passed. One line of
JSON on stdout after each event; ends cleanly when all versions are held. With ``fork`` a child that
it forked outlives it, until stdin ends. ``lease_s``: how long a lane may be silent in a commit.
"""

import json
import os
import signal
import sys
import threading
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tests.rigs.census import children
from tests.rigs.trainer import Trainer
from tests.rigs.watched_sync import WatchedSync
from titan_grpo.config import WeightSync
from titan_grpo.engines import vllm
from titan_grpo.layout.manifest import Manifest
from titan_grpo.protocol.lane import LaneEvent, Point
from titan_grpo.protocol.pause_guard import Deadlines
from titan_grpo.sync.lanes import SyncOptions
from titan_grpo.verify.recording import content_digest, tensor_digest

SHAPES = {"up": (512, 256), "down": (256, 512)}
WAIT_S = 120.0


def weights(version: int) -> dict[str, torch.Tensor]:
    """What every element of a version is: its number."""
    return {name: torch.full(shape, float(version)) for name, shape in SHAPES.items()}


def digest(version: int) -> str:
    """What GET /served says of a server that holds ``version``."""
    tensors = {name: tensor.to(torch.bfloat16) for name, tensor in weights(version).items()}
    return content_digest({name: tensor_digest(tensor) for name, tensor in tensors.items()})


def say(**event: Any) -> None:
    print(json.dumps(event), flush=True)


class GuardedTrainer(Trainer):
    """One rank and two small matrices; its pause guard watches one server."""

    def __init__(self, options: dict[str, Any]) -> None:
        self.point, self.number = Point(options["point"]), int(options["signal"])
        self.left = int(options["times"])
        config = WeightSync(
            block_bytes=1 << 16,
            bucket_bytes=1 << 16,
            apply=options["apply"],
            commit_deadline_s=15.0,
            backoff_s=0.05,
            backoff_max_s=0.2,
        )
        tensors = [(name, "bfloat16", shape) for name, shape in SHAPES.items()]
        sync = SyncOptions(
            urls=[options["url"]],
            engine=vllm.NAME,
            keys=(options["api_key"], ""),
            guard_deadlines=Deadlines(options["lease_s"], greet_s=60.0, again_s=0.5),
        )
        manifest = Manifest.build(tensors, config.block_bytes)
        watched = partial(WatchedSync, watch=self.watch, points={self.point})
        super().__init__(manifest, config, Path(options["folder"]), sync, sync=watched)
        self.start()

    def watch(self, passing: LaneEvent) -> None:
        if passing.point is not self.point or passing.version != 2:
            return
        self.left -= 1
        if self.left == 0:
            say(signalled=passing.point.value, epoch=passing.epoch, label=passing.label)
            # To this thread: of one to the process another thread may take notice, and this one
            # answers the lane before it is stopped.
            signal.pthread_kill(threading.get_ident(), self.number)

    def make(self, version: int) -> None:
        """Publish a version, and wait until it is held."""
        assert self.publish(version, weights(version), WAIT_S), f"no slot for version {version}"
        assert self.servers.wait_held(version, WAIT_S, everyone=False), (
            f"version {version} is not held"
        )
        newest = self.worker.complete
        assert newest is not None
        say(held=version, label=str(newest.label))


def main() -> None:
    options = json.loads(sys.argv[1])
    trainer = GuardedTrainer(options)
    if options["fork"] and os.fork() == 0:
        os.read(0, 1)
        os._exit(0)
    for version in range(1, options["versions"] + 1):
        trainer.make(version)
        if version == 1:
            say(pause_guard=children(trainer.worker.pid)[0])
    trainer.close()
    say(ended=True)


if __name__ == "__main__":
    main()
