"""Rank 0's half of the sync as the trainer builds it, for one process that holds all weights and no
model."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from titan_grpo.config import WeightSync
from titan_grpo.engines import vllm
from titan_grpo.engines.server import ServerAccess, make_control
from titan_grpo.errors import TitanGrpoError
from titan_grpo.layout.infer import matrix_shape
from titan_grpo.layout.manifest import Manifest
from titan_grpo.layout.plan import CopyOp
from titan_grpo.observe import names
from titan_grpo.observe.recorder import Recorder
from titan_grpo.protocol.lane_events import Observer
from titan_grpo.sync.worker import ImagePool, SyncOptions, SyncWorker

DTYPE = "bfloat16"


@dataclass(frozen=True, slots=True)
class Settings:
    """One fault run. ``model``: folder with model.safetensors; ``salt`` tells runs' weights apart;
    ``parent``: our pid."""

    model: str
    urls: list[str]
    run_dir: str
    parent: int
    salt: int
    deadline_s: float = 3.0
    connect_s: float = 30.0
    shutdown_s: float = 6.0
    step_s: float = 0.03
    steps_per_version: int = 8
    bind_host: str = "127.0.0.1"
    transport: str = "gloo"
    device: str = "cpu"
    block_bytes: int = 64 << 10
    bucket_bytes: int = 128 << 10
    engine: str = vllm.NAME


def config_of(s: Settings) -> WeightSync:
    """The trainer's section for these settings."""
    return WeightSync(
        block_bytes=s.block_bytes,
        bucket_bytes=s.bucket_bytes,
        bind_host=s.bind_host,
        transport=s.transport,
        connect_deadline_s=s.connect_s,
        lane_deadline_s=s.deadline_s,
        commit_deadline_s=s.deadline_s,
        shutdown_deadline_s=s.shutdown_s,
        backoff_s=0.1,
        backoff_max_s=0.5,
    )


def copy_plan(manifest: Manifest) -> dict[str, list[CopyOp]]:
    """Every tensor goes where it is, whole: this process holds all of them under their own
    names."""
    plan = {}
    for spec in manifest.tensors:
        rows, cols = matrix_shape(spec.shape)
        stride = cols * getattr(torch, spec.dtype).itemsize
        plan[spec.name] = [
            CopyOp(spec.name, slice(0, rows, 1), spec.offset, stride, rows, cols, spec.dtype)
        ]
    return plan


class ToldRecorder(Recorder):
    """A recorder that also tells how long each transfer to each server took."""

    def __init__(self, folder: str, told: Callable[[str, float], None]) -> None:
        self._told = told
        super().__init__(folder)

    def record_span(
        self, name: str, start_s: float, stop_s: float, track: str | None = None, **args: Any
    ) -> None:
        """See Recorder."""
        super().record_span(name, start_s, stop_s, track, **args)
        if name == names.SEND_S and track is not None:
            self._told(track, stop_s - start_s)


@dataclass(frozen=True, slots=True)
class Ears:
    """What the sync calls: the ledger's changes, the lanes' points, (server, seconds) of each
    transfer."""

    on_server: Callable[[str, int | None, bool, str], None]
    watch: Observer
    sent: Callable[[str, float], None]

    def set_server(
        self,
        url: str,
        version: int | None,
        accepting: bool,
        label: str,
        engine: str,
        committing: int | None = None,
    ) -> None:
        """See server_set.Observer."""
        self.on_server(url, version, accepting, label)

    def remove_server(self, url: str) -> None:
        """No server leaves a fault run."""

    def fail(self, error: TitanGrpoError) -> None:
        """No other run takes over."""


class Rig:
    """Images, servers, lanes. ``base``: float32 tensors by name."""

    def __init__(self, settings: Settings, base: Mapping[str, torch.Tensor], ears: Ears) -> None:
        config = config_of(settings)
        self.manifest = Manifest.build(
            [(n, DTYPE, tuple(t.shape)) for n, t in base.items()], config.block_bytes
        )
        self.buckets = -(-self.manifest.total_bytes // config.bucket_bytes)
        self._pool = ImagePool.create(self.manifest, config.slots)
        self.images, self.run_id = self._pool.images, self._pool.run_id
        self.recorder = ToldRecorder(settings.run_dir, ears.sent)
        self.worker = SyncWorker(
            self._pool,
            config,
            self.recorder,
            SyncOptions(
                urls=settings.urls,
                make_control=lambda url: make_control(
                    settings.engine, ServerAccess(url, settings.deadline_s)
                ),
                observer=ears,
                device=torch.device(settings.device),
                watch=ears.watch,
            ),
        )

    def start(self) -> None:
        """One lane per server."""
        self.worker.start()

    def close(self) -> float:
        """End everything; bounded. Seconds until the lanes had ended."""
        begin = time.monotonic()
        self.worker.close()
        lanes_s = time.monotonic() - begin
        self.recorder.close()
        self._pool.close()
        return lanes_s
