"""Rank 0's half of the sync as the trainer builds it, around a few small matrices and no
torchtitan."""

import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from titan_grpo.config import WeightSync
from titan_grpo.engines.control import ServerControl
from titan_grpo.layout.digest import content_digest, tensor_digest
from titan_grpo.layout.image import SharedImage
from titan_grpo.layout.infer import infer_layout
from titan_grpo.layout.plan import copy_ops
from titan_grpo.observe.recorder import Recorder
from titan_grpo.protocol.messages import new_run_id
from titan_grpo.sync.lane import LaneContext
from titan_grpo.sync.link import LinkOptions
from titan_grpo.sync.publisher import Publisher
from titan_grpo.sync.server_set import Fleet
from titan_grpo.sync.slots import ImageSlots
from titan_grpo.sync.snapshot import Snapshotter
from titan_grpo.sync.transports.store import host_store
from titan_grpo.sync.worker import SyncWorker

SHAPES = {"up": (1024, 512), "down": (512, 1024), "head": (1024, 512), "norm": (512,)}
"""3 MiB in bfloat16."""

BLOCK_BYTES = 1 << 18

Images = tuple[torch.Tensor, ...]


class SmallTrainer:
    """A training loop's weights, its boundary and its sync.

    ::

        trainer.start(controls)
        trainer.step(1); trainer.boundary(1); trainer.step(2); ...
    """

    def __init__(
        self,
        urls: Sequence[str],
        folder: Path,
        config: WeightSync,
        sent: Callable[[Images], Images] = lambda images: images,
    ) -> None:
        """``sent``: what the lanes read in place of the images whose bytes were hashed, for
        planting wrong bytes."""
        self.config = config
        self.weights = {fqn: torch.zeros(shape) for fqn, shape in SHAPES.items()}
        self.recorder = Recorder(folder)
        layout = infer_layout(dict, SHAPES)
        manifest = layout.manifest(config.wire_dtype, config.block_bytes)
        self._images = [
            SharedImage.create(manifest.total_bytes, "small trainer") for _ in range(config.slots)
        ]
        tensors = tuple(image.tensor() for image in self._images)
        self.fleet = Fleet(list(urls), lambda *_: None)
        context = LaneContext(
            run_id=new_run_id(time.time()),
            manifest=manifest,
            images=sent(tensors),
            config=config,
            link=LinkOptions(
                "gloo",
                "127.0.0.1",
                config.digest,
                config.bucket_bytes,
                timeout_s=config.lane_deadline_s,
            ),
            slots=ImageSlots(config.slots),
            fleet=self.fleet,
            recorder=self.recorder,
        )
        self.run_id = context.run_id
        self.worker = SyncWorker(context, self._images, host_store("127.0.0.1"), ())
        ops = {
            fqn: copy_ops(layout, manifest, fqn, (0,) * len(shape), shape)
            for fqn, shape in SHAPES.items()
        }
        self.publisher = Publisher(
            Snapshotter(ops, tensors, torch.device("cpu"), config.bucket_bytes), self.worker.publish
        )

    def start(self, controls: Sequence[ServerControl]) -> None:
        """Sealer and lanes."""
        self.worker.start(controls)

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
        slot = self.worker.take_slot()
        if slot is not None:
            self.publisher.publish(version, slot, self.weights)
            self.publisher.fence()
        return slot is not None

    def close(self) -> None:
        """End lanes, sealer and files, and let go of the images."""
        self.worker.close()
        self.publisher.close()
        self.recorder.close()
        for image in self._images:
            image.close()
