"""Rank 0's half of the weight sync in a process that holds all weights, without torchtitan: what
fault matrix, soak and conformance suite send versions with. Its sync process is a trainer's. And
what every version of a fault run's weights is, which both ends know without asking."""

import threading
from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import torch

from titan_grpo.config import WeightSync
from titan_grpo.layout.infer import matrix_shape
from titan_grpo.layout.manifest import Manifest
from titan_grpo.layout.plan import CopyOp
from titan_grpo.observe.recorder import Recorder
from titan_grpo.sync.images import ImagePool
from titan_grpo.sync.lanes import SyncOptions
from titan_grpo.sync.process import SyncProcess
from titan_grpo.sync.publisher import Copy, Publisher, Snapshotter
from titan_grpo.verify.recording import content_digest, tensor_digest

GOLDEN = 0.6180339887498949
"""Multiples of it, modulo 1, never come close to each other: neighbouring versions differ in every
tensor."""

SPREAD = 0.25
SALT_STRIDE = 100_003
"""Versions between two runs' contents: equal versions of two runs are different weights."""


class Trainer:
    """Images, lanes, and the publisher of a step boundary.

    ::

        with Trainer(manifest, config, recorder, options) as trainer:
            trainer.start()
            trainer.publish(1, tensors)
    """

    def __init__(
        self,
        manifest: Manifest,
        config: WeightSync,
        recorder: Recorder | Path,
        options: SyncOptions,
        run_id: str = "",
        sync: Callable[..., SyncProcess] = SyncProcess,
    ) -> None:
        """``recorder``, or the folder of one, is closed with the trainer. ``sync``: SyncProcess, or
        a WatchedSync."""
        self.manifest = manifest
        self.recorder = recorder if isinstance(recorder, Recorder) else Recorder(recorder)
        self.pool = ImagePool.create(manifest, config.slots, run_id)
        self.run_id = self.pool.run_id
        self.worker = sync(self.pool, config, self.recorder, options)
        self._device, self._bucket = options.device, config.bucket_bytes
        self.servers = self.worker.servers

    def start(self) -> None:
        self.worker.start()

    @cached_property
    def publisher(self) -> Publisher:
        """Copies tensors of the manifest's names and shapes into images."""
        plan, images = copy_plan(self.manifest), self.pool.tensors()
        copies = Snapshotter(plan, images, self._device, self._bucket)
        return Publisher(copies, self.worker.publish)

    def publish(
        self, version: int, tensors: Mapping[str, torch.Tensor], wait_s: float | None = None
    ) -> bool:
        """The step boundary: whether ``version`` was published. Without ``wait_s`` it is not where
        no slot is reserved now."""
        slots = self.worker.slots
        slot = slots.take_reserved() if wait_s is None else slots.wait_reserved(wait_s)
        if slot is not None:
            self.publisher.publish(version, slot, tensors)
            self.publisher.fence()
        return slot is not None

    def publish_image(self, version: int, image: torch.Tensor, wait_s: float) -> None:
        """As ``publish``, of bytes that are an image already."""
        slot = self.worker.slots.wait_reserved(wait_s)
        assert slot is not None, f"no slot was free within {wait_s:g} s"
        self.pool.tensors()[slot].copy_(image)
        self.worker.publish(version, slot, Copy(0.0))

    def close(self) -> None:
        """End lanes, sealer and files, and free the images."""
        self.worker.close()
        if "publisher" in self.__dict__:
            self.publisher.close()
        self.recorder.close()
        self.pool.close()

    def __enter__(self) -> "Trainer":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def manifest_of(
    tensors: Mapping[str, torch.Tensor], block_bytes: int, dtype: str = "bfloat16"
) -> Manifest:
    """Of these tensors, which are sent as ``dtype``."""
    return Manifest.build([(n, dtype, tuple(t.shape)) for n, t in tensors.items()], block_bytes)


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


def _factor(version: int, index: int, salt: int) -> float:
    """What tensor ``index`` is multiplied by at ``version`` of run ``salt``: between 1 and 1 +
    SPREAD."""
    return 1.0 + SPREAD * (((version + SALT_STRIDE * salt + 1) * (index + 1) * GOLDEN) % 1.0)


def weights(base: Mapping[str, torch.Tensor], version: int, salt: int) -> dict[str, torch.Tensor]:
    """The version's float32 masters. ``base``: float32 tensors by name, in the manifest's order."""
    return {
        name: tensor * _factor(version, index, salt)
        for index, (name, tensor) in enumerate(base.items())
    }


def digests(base: Mapping[str, torch.Tensor], version: int, salt: int) -> dict[str, str]:
    """Digest of every tensor as a server must get it, in bfloat16."""
    return {
        name: tensor_digest(tensor.to(torch.bfloat16))
        for name, tensor in weights(base, version, salt).items()
    }


MATRICES = {"down": torch.ones(256, 512), "up": torch.ones(512, 256)}
"""A model for servers without an engine, in the order of its file; its versions are run 0's."""


def matrices(version: int) -> dict[str, torch.Tensor]:
    """Its masters."""
    return weights(MATRICES, version, 0)


def content(version: int) -> str:
    """What a server that holds them says (server_process.py)."""
    return content_digest(digests(MATRICES, version, 0))


class SpoiledImages(tuple[torch.Tensor, ...]):
    """The images as the lanes read them (``SyncOptions.tamper``): what one lane reads next is a
    copy with a wrong byte, if ``spoiled`` asks for it."""

    spoiled: ClassVar[dict[str, int]] = {}
    """Name of a lane's thread -> offset, in this process."""

    def __getitem__(self, index: Any) -> Any:
        image = super().__getitem__(index)
        offset = self.spoiled.pop(threading.current_thread().name, None)
        if offset is None:
            return image
        wrong = image.clone()
        wrong[offset] ^= 1
        return wrong
