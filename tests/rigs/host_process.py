"""Another host of the trainer as a process of its own: its part of every version, hashed and served
by the real HostSync. ``python -m tests.rigs.host_process SETTINGS`` reads a version and a slot from
each line and publishes it, every element of its rows being the version's number.

What it lacks of a real host are the other ranks, and training."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from tests.rigs.signals import send
from tests.rigs.sockets import cut
from titan_grpo.config import WeightSync
from titan_grpo.layout.image import Hashing
from titan_grpo.layout.infer import infer_layout
from titan_grpo.layout.manifest import Manifest
from titan_grpo.layout.plan import CopyOp, copy_ops
from titan_grpo.runkey import Key
from titan_grpo.sync.child import perform
from titan_grpo.sync.host import HostBegin, HostMain, HostSync
from titan_grpo.sync.images import ImagePool
from titan_grpo.sync.publisher import Publisher, Snapshotter

ROOT = Path(__file__).resolve().parents[2]
END_S = 150.0

Shapes = dict[str, tuple[int, int]]


def host_ops(shapes: Shapes, manifest: Manifest, part: int, hosts: int) -> dict[str, list[CopyOp]]:
    """Copies of host ``part``, which has as many rows of every matrix as the others."""
    layout = infer_layout(dict, shapes)
    return {
        fqn: copy_ops(layout, manifest, fqn, (part * rows // hosts, 0), (rows // hosts, cols))
        for fqn, (rows, cols) in shapes.items()
    }


def host_shards(
    shapes: Shapes, hosts: int, version: int, changed: int = 0
) -> dict[str, torch.Tensor]:
    """What a host trains, and the same on each: ``version`` everywhere; or in as many first
    elements more than in the last version as ``changed`` says, and 0 elsewhere."""
    shards = {fqn: torch.zeros((rows // hosts, cols)) for fqn, (rows, cols) in shapes.items()}
    for tensor in shards.values():
        tensor.view(-1)[: changed * version if changed else None] = float(version)
    return shards


class FarHost(HostSync):
    """A host whose images no other process can open, as on another machine: servers must read over
    TCP."""

    MODULE = "tests.rigs.host_process"

    def __init__(self, *assembly: Any) -> None:
        """Returns when the process can hash."""
        self._ready = threading.Event()
        super().__init__(*assembly)
        assert self._ready.wait(END_S)

    def ready(self) -> None:
        self._ready.set()


class FarMain(HostMain):
    """The process's end."""

    def begin(self, b: HostBegin) -> None:
        super().begin(b)
        for image in self._pool.images:
            image.address = replace(image.address, pid=0)
        self._pipe.post("ready")


class HostProcess:
    """The owner's side. ``bytes_held``: memory behind one of its images."""

    def __init__(self, settings: dict[str, Any]) -> None:
        """``settings``: see ``hold``. Returns when it can publish."""
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.rigs.host_process", json.dumps(settings)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            text=True,
        )
        assert self._process.stdout is not None
        # no deadline: the line comes, or the process has ended
        self._sync, self.bytes_held = map(int, self._process.stdout.readline().split())

    def publish(self, version: int, slot: int) -> None:
        """Have it copy ``version`` into ``slot``. Never waits for it."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{version} {slot}\n")
        self._process.stdin.flush()

    def freeze(self) -> None:
        """Its sync process does nothing until ``thaw``; its sockets stay open."""
        send(self._sync, signal.SIGSTOP)

    def thaw(self) -> None:
        """The opposite of ``freeze``."""
        send(self._sync, signal.SIGCONT)

    def kill_sync(self) -> None:
        """Kill its first sync process."""
        send(self._sync, signal.SIGKILL)

    def cut(self) -> None:
        """Cut the connection of its sync process to this process, rank 0's store."""
        assert cut(self._sync)

    def kill(self) -> None:
        """End it without a word. Idempotent."""
        self._process.kill()
        self.thaw()  # stopped, it would not notice the end of its parent
        self._process.communicate(timeout=END_S)


def hold(settings: dict[str, Any]) -> None:
    """``settings``: shapes, manifest, part, hosts, slots, store_port, address, algorithm, key,
    changed (see host_shards), config (of [weight_sync])."""
    torch.set_num_threads(1)
    manifest = Manifest.from_json(settings["manifest"])
    shapes, part, hosts = settings["shapes"], settings["part"], settings["hosts"]
    pool = ImagePool.create(manifest, settings["slots"], part=part)
    key = Key.parse(settings["key"], "the key for blocks") if settings["key"] else None
    rank0 = "127.0.0.1", int(settings["store_port"])
    hashing = Hashing(settings["algorithm"], key)
    config = WeightSync(**settings["config"])
    here = FarHost(pool, (part,), hashing, settings["address"], rank0, config)
    ops = host_ops(shapes, manifest, part, hosts)
    copier = Snapshotter(ops, pool.tensors(), torch.device("cpu"), config.bucket_bytes)
    publisher = Publisher(copier, here)
    print(here.pid, os.fstat(pool.images[0].address.fd).st_blocks * 512, flush=True)
    for line in sys.stdin:
        version, slot = map(int, line.split())
        publisher.publish(version, slot, host_shards(shapes, hosts, version, settings["changed"]))
        publisher.fence()


def main(sock: socket.socket, parent: int) -> None:
    """Entry point of its sync process."""
    perform(sock, parent, FarMain)


if __name__ == "__main__":
    hold(json.loads(sys.argv[1]))
