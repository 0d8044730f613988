"""One trainer host's part of every version: its images, how its blocks are hashed, and when its
ranks have copied.

Rank 0's host hashes it in its sealer (sync.lanes), every other host in its own sync process
(sync.host)."""

import time
from dataclasses import dataclass
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist

from titan_grpo.config import WeightSync
from titan_grpo.errors import ConfigError
from titan_grpo.layout.digest import block_digests, digest_block
from titan_grpo.layout.image import SharedImage
from titan_grpo.layout.manifest import Manifest
from titan_grpo.protocol.messages import RangeSource, new_run_id
from titan_grpo.runkey import Key
from titan_grpo.sync.patches import Made
from titan_grpo.sync.publisher import copied_key
from titan_grpo.sync.transports.store import host_store, store_errors
from titan_grpo.sync.transports.tls import Certificate

LOOPBACK = "127.0.0.1"

Images = tuple[torch.Tensor, ...]


class Parts(NamedTuple):
    """An image that several trainer hosts have: this one has part 0, ``elsewhere`` the others.
    ``patches`` lead to it, oldest first."""

    image: torch.Tensor | SharedImage
    elsewhere: tuple[RangeSource, ...] = ()
    patches: tuple[Made, ...] = ()


@dataclass(frozen=True, slots=True)
class ImagePool:
    """One host's part of a run's version images, and what their writers share. Its leader, rank 0
    on rank 0's host, creates it."""

    run_id: str
    manifest: Manifest
    part: int
    images: tuple[SharedImage, ...]
    """Of the whole image's size; they have memory for this part only."""
    store: dist.TCPStore
    """Carries the notices of this host's other ranks that their bytes are there: on loopback, since
    nothing proves them."""
    hashed: dist.TCPStore | None = None
    """On rank 0 of several hosts: carries what the others' leaders say, which a run key proves."""

    @classmethod
    def create(
        cls,
        manifest: Manifest,
        slots: int,
        run_id: str = "",
        part: int = 0,
        hashed_host: str = "",
    ) -> "ImagePool":
        """Of a new run, unless it has a ``run_id`` already. ``hashed_host``: the address of rank
        0's host where other hosts' leaders reach it; empty: there are none."""
        extents = manifest.parts[part].extents
        images = tuple(
            SharedImage.create(manifest.total_bytes, f"titan_grpo slot {i}", extents)
            for i in range(slots)
        )
        run_id = run_id or new_run_id(time.time())
        hashed = host_store(hashed_host) if hashed_host else None
        return cls(run_id, manifest, part, images, host_store(LOOPBACK), hashed)

    def tensors(self) -> Images:
        """The images as bytes: uint8[total_bytes] each."""
        return tuple(image.tensor() for image in self.images)

    def close(self) -> None:
        """Free the images. Idempotent."""
        for image in self.images:
            image.close()


@dataclass(frozen=True, slots=True)
class Hashing:
    """How a run's blocks are hashed, and who may read them. ``key``: EpochKeys.blocks."""

    algorithm: str
    key: Key | None = None

    @property
    def digest_bytes(self) -> int:
        """Length of one digest."""
        return len(digest_block((), self.algorithm))

    def digests(
        self, image: memoryview, manifest: Manifest, part: int | None = None
    ) -> tuple[bytes, ...]:
        """Of an image's blocks (uint8), or of those of one part, in order."""
        return block_digests(image, manifest, self.algorithm, self.block_key, part)

    @property
    def block_key(self) -> bytes | None:
        """As layout.digest takes it."""
        return self.key.raw if self.key is not None else None

    @property
    def range_key(self) -> Key | None:
        """EpochKeys.ranges."""
        return self.key.derive("ranges") if self.key is not None else None


def own_certificate(config: WeightSync) -> Certificate | None:
    """What this host of the trainer shows to servers. ConfigError: see Certificate.load."""
    names = "weight_sync.tls_certificate", "weight_sync.tls_key"
    return Certificate.load(config.tls_certificate, config.tls_key, names)


def check_certificate(config: WeightSync, run_key: Key | None) -> None:
    """ConfigError for a certificate that cannot be shown, or that protects nothing."""
    if own_certificate(config) is not None and run_key is None:
        raise ConfigError(
            "weight_sync.tls_certificate needs a run key (weight_sync.run_key_file), there is none:"
            " who reads the calls to a server could take its weights in its place"
        )


def wait_copied(pool: ImagePool, version: int, rank: int, timeout_s: float) -> str:
    """Wait until another ``rank`` of this host has announced its copy; the key that says so, for
    the caller to delete. TransferFailed if it does not within ``timeout_s`` seconds."""
    key = copied_key(version, rank)
    with store_errors(f"waiting for the part of rank {rank} of version {version}"):
        pool.store.wait([key], timedelta(seconds=timeout_s))
    return key
