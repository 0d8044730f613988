"""Another host of the trainer as a process of its own: its part of every version, hashed and served
by the real HostPart. ``python -m tests.rigs.host_process SETTINGS`` reads a version and a slot from
each line and publishes it, every element of its rows being the version's number.

What it lacks of a real host are the other ranks, and training."""

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from titan_grpo.layout.infer import infer_layout
from titan_grpo.layout.manifest import Manifest
from titan_grpo.layout.plan import CopyOp, copy_ops
from titan_grpo.runkey import Key
from titan_grpo.sync.part import Hashing, HostPart, ImagePool
from titan_grpo.sync.publisher import Publisher
from titan_grpo.sync.snapshot import Snapshotter
from titan_grpo.sync.transports.tls import Certificate

ROOT = Path(__file__).resolve().parents[2]
END_S = 60.0

Shapes = dict[str, tuple[int, int]]


def host_ops(shapes: Shapes, manifest: Manifest, part: int, hosts: int) -> dict[str, list[CopyOp]]:
    """Copies of host ``part``, which has as many rows of every matrix as the others."""
    layout = infer_layout(dict, shapes)
    return {
        fqn: copy_ops(layout, manifest, fqn, (part * rows // hosts, 0), (rows // hosts, cols))
        for fqn, (rows, cols) in shapes.items()
    }


def host_shards(shapes: Shapes, hosts: int, version: int) -> dict[str, torch.Tensor]:
    """What a host trains, and the same on each: ``version`` everywhere."""
    return {
        fqn: torch.full((rows // hosts, cols), float(version))
        for fqn, (rows, cols) in shapes.items()
    }


class HostProcess:
    """The owner's side. ``bytes_held``: memory behind one of its images."""

    def __init__(self, settings: dict[str, Any]) -> None:
        """``settings``: see ``main``. Returns when it can publish."""
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.rigs.host_process", json.dumps(settings)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
            text=True,
        )
        assert self._process.stdout is not None
        # no deadline: the line comes, or the process has ended
        self._pid, self.bytes_held = map(int, self._process.stdout.readline().split())

    def publish(self, version: int, slot: int) -> None:
        """Have it copy ``version`` into ``slot``. Never waits for it."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{version} {slot}\n")
        self._process.stdin.flush()

    def freeze(self) -> None:
        """It does nothing until ``thaw``; its sockets stay open."""
        os.kill(self._pid, signal.SIGSTOP)

    def thaw(self) -> None:
        """The opposite of ``freeze``."""
        os.kill(self._pid, signal.SIGCONT)

    def kill(self) -> None:
        """End it without a word. Idempotent."""
        with suppress(ProcessLookupError):
            os.kill(self._pid, signal.SIGKILL)
        self._process.communicate(timeout=END_S)


def main(settings: dict[str, Any]) -> None:
    """``settings``: shapes, manifest, part, hosts, slots, store_port, address, algorithm, key,
    timeout_s, bucket_bytes, tls (paths of a certificate and its key, empty: none)."""
    torch.set_num_threads(1)
    manifest = Manifest.from_json(settings["manifest"])
    shapes, part, hosts = settings["shapes"], settings["part"], settings["hosts"]
    pool = ImagePool.create(manifest, settings["slots"], part=part)
    # The images' addresses name the process that made them. With that one gone nobody opens them
    # here, as nobody could on another machine: servers must read over TCP.
    if os.fork():
        os._exit(0)
    key = Key.parse(settings["key"], "the key for blocks") if settings["key"] else None
    rank0 = "127.0.0.1", int(settings["store_port"])
    certificate = Certificate.load(*settings["tls"], ("certificate", "key"))
    hashing = Hashing(settings["algorithm"], key, certificate)
    here = HostPart(pool, (), hashing, settings["address"], rank0, settings["timeout_s"])
    ops = host_ops(shapes, manifest, part, hosts)
    copier = Snapshotter(ops, pool.tensors(), torch.device("cpu"), settings["bucket_bytes"])
    publisher = Publisher(copier, here)
    print(os.getpid(), os.fstat(pool.images[0].address.fd).st_blocks * 512, flush=True)
    for line in sys.stdin:
        version, slot = map(int, line.split())
        publisher.publish(version, slot, host_shards(shapes, hosts, version))
        publisher.fence()
    os._exit(0)  # the store's thread stayed behind at the fork: torch would wait for it


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
