"""One trainer host's part of every version: its ranks have copied, its blocks are hashed, its
ranges are served.

Rank 0's host does it in its sealer (sync.worker). Every other host has a HostPart, in the process
of its leader, its lowest rank that writes::

    ranks of the host --copied--> leader: hash, serve --hashed--> rank 0: complete, lanes
"""

import queue
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist

from titan_grpo.config import WeightSync
from titan_grpo.errors import ConfigError, PeerError, SyncError, TitanGrpoError
from titan_grpo.layout.digest import block_digests, digest_block
from titan_grpo.layout.image import SharedImage
from titan_grpo.layout.manifest import Manifest
from titan_grpo.protocol.messages import RangeSource, new_run_id
from titan_grpo.protocol.parts import Hashed, hashed_key
from titan_grpo.runkey import Key
from titan_grpo.sync.patches import Made
from titan_grpo.sync.publisher import copied_key
from titan_grpo.sync.snapshot import Copy
from titan_grpo.sync.transports.range_server import RangeServer
from titan_grpo.sync.transports.store import host_store, join_store, store_errors
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
    """How a run's blocks are hashed, and who may read them. ``key``: EpochKeys.blocks;
    ``certificate``: what this host shows to readers."""

    algorithm: str
    key: Key | None = None
    certificate: Certificate | None = None

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


@dataclass(frozen=True, slots=True)
class _Job:
    version: int
    slot: int
    copy: Copy


class HostPart:
    """The leader's side on a host that is not rank 0's: one thread, and the range server's.

    A version's ticket ends when its slot is written again. Rank 0 decides when that is: its slot
    table knows every lane that reads.
    """

    def __init__(
        self,
        pool: ImagePool,
        others: Sequence[int],
        hashing: Hashing,
        address: str,
        rank0: tuple[str, int],
        timeout_s: float,
    ) -> None:
        """``others``: the host's other ranks that write. ``address``: of this host, where servers
        read. ``rank0``: host and port of its ImagePool's ``hashed``. ``timeout_s``: of a copy."""
        self._pool, self._others, self._hashing = pool, others, hashing
        self._timeout_s = timeout_s
        self._store = join_store(*rank0, timeout_s)
        self._server = RangeServer(certificate=hashing.certificate)
        self._host, self._port = address, self._server.listen(address)
        self._tickets: dict[int, str] = {}
        self._newest: dict[int, int] = {}
        """The version that each slot gets, or has."""
        self._error: SyncError | None = None
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="host part", daemon=True)
        self._thread.start()

    def __call__(self, version: int, slot: int, copy: Copy) -> None:
        """This rank copies its share of ``version`` into ``slot``. Never waits."""
        self._newest[slot] = version
        self._jobs.put(_Job(version, slot, copy))

    def take_error(self) -> SyncError | None:
        """The first error since the last call."""
        error, self._error = self._error, None
        return error

    def close(self, timeout_s: float) -> None:
        """End the thread and serve no more."""
        self._jobs.put(None)
        self._thread.join(timeout_s)
        self._server.close()

    def _run(self) -> None:
        # no deadline: close() puts None into the queue; the thread is a daemon
        while (job := self._jobs.get()) is not None:
            try:
                message = self._sealed(job)
            # RuntimeError: from CUDA's copy or a store that closes
            except (TitanGrpoError, RuntimeError) as error:
                self._failed(job, error)
                source = RangeSource(self._host, self._port, "", part=self._pool.part)
                message = Hashed(job.version, self._pool.part, source, "", error=str(error))
            try:
                with store_errors(f"announcing version {job.version}"):
                    text = message.proven(self._hashing.key).to_json()
                    self._store.set(hashed_key(job.version, self._pool.part), text)
            # It must not end the thread: rank 0 would wait for every later version.
            except (PeerError, RuntimeError) as error:
                self._failed(job, error)

    def _failed(self, job: _Job, error: Exception) -> None:
        said = f"part {self._pool.part} of version {job.version}: {error}"
        self._error = self._error or SyncError(said)

    def _sealed(self, job: _Job) -> Hashed:
        pool, slot = self._pool, job.slot
        if ticket := self._tickets.pop(slot, ""):
            self._server.revoke(ticket)
        job.copy.wait(self._timeout_s)
        for rank in self._others:
            pool.store.delete_key(wait_copied(pool, job.version, rank, self._timeout_s))
        image = pool.images[slot]
        digests = self._hashing.digests(image.buffer, pool.manifest, pool.part)
        if self._newest[slot] != job.version:
            # rank 0 has given this version up
            raise SyncError("its slot was given to a newer version before it was hashed")
        self._tickets[slot] = self._server.grant(
            image.buffer,
            image.address.fd,
            self._hashing.range_key,
            pool.manifest.parts[pool.part],
        )
        source = RangeSource(
            self._host,
            self._port,
            self._tickets[slot],
            image.address.to_json(),
            pool.part,
            self._server.pin,
        )
        return Hashed(job.version, pool.part, source, b"".join(digests).hex())
