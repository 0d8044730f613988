"""Rank 0's half of the sync as the trainer builds it, around a few small matrices and no
torchtitan."""

from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from titan_grpo.config import WeightSync
from titan_grpo.engines.control import ServerControl
from titan_grpo.layout.digest import content_digest, tensor_digest
from titan_grpo.layout.infer import infer_layout
from titan_grpo.layout.plan import copy_ops
from titan_grpo.observe.recorder import Recorder
from titan_grpo.sync.worker import ImagePool, Images, SyncOptions, SyncWorker

SHAPES = {"up": (1024, 512), "down": (512, 1024), "head": (1024, 512), "norm": (512,)}
"""3 MiB in bfloat16."""

BLOCK_BYTES = 1 << 18


class SmallTrainer:
    """A training loop's weights, its boundary and its sync.

    ::

        trainer.start()
        trainer.step(1); trainer.boundary(1); trainer.step(2); ...
    """

    def __init__(
        self,
        urls: Sequence[str],
        folder: Path,
        config: WeightSync,
        control: Callable[[str], ServerControl],
        sent: Callable[[Images], Images] | None = None,
    ) -> None:
        """``sent``: what the lanes read in place of the images whose bytes were hashed, for
        planting wrong bytes."""
        self.config = config
        self.weights = {fqn: torch.zeros(shape) for fqn, shape in SHAPES.items()}
        self.recorder = Recorder(folder)
        layout = infer_layout(dict, SHAPES)
        manifest = layout.manifest(config.wire_dtype, config.block_bytes)
        self._pool = ImagePool.create(manifest, config.slots)
        self.worker = SyncWorker(
            self._pool,
            config,
            self.recorder,
            SyncOptions(urls=urls, make_control=control, guarded=False, tamper=sent),
        )
        self.run_id = self.worker.run_id
        self.publisher = self.worker.publisher(
            {
                fqn: copy_ops(layout, manifest, fqn, (0,) * len(shape), shape)
                for fqn, shape in SHAPES.items()
            }
        )

    def start(self) -> None:
        """Sealer and lanes."""
        self.worker.start()

    def step(self, version: int) -> None:
        """The optimizer: other values in every element, the same ones for the same version."""
        generator = torch.Generator().manual_seed(version)
        for weight in self.weights.values():
            weight.normal_(generator=generator)

    def digest(self) -> str:
        """layout.content's digest of what a server has to hold: cast by torch, without any
        image."""
        dtype = getattr(torch, self.config.wire_dtype)
        return content_digest(
            {name: tensor_digest(weight.to(dtype)) for name, weight in self.weights.items()}
        )

    def boundary(self, version: int) -> bool:
        """The step boundary, as the trainer passes it: whether ``version`` was published (a slot
        was free)."""
        slot = self.worker.slots.take_reserved()
        if slot is not None:
            self.publisher.publish(version, slot, self.weights)
            self.publisher.fence()
        return slot is not None

    def close(self) -> None:
        """End lanes, sealer and files, and let go of the images."""
        self.worker.close()
        self.publisher.close()
        self.recorder.close()
        self._pool.close()
