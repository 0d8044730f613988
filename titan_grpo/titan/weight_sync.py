"""One rank's weights as the sync sees them: which part of each image it writes, and publishing."""

import logging
import os
import socket
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from titan_grpo.config import WeightSync
from titan_grpo.errors import ConfigError
from titan_grpo.layout.image import ImageAddress, SharedImage, require_memory
from titan_grpo.layout.infer import Layout, infer_layout, strip_prefixes
from titan_grpo.layout.manifest import Manifest
from titan_grpo.layout.plan import CopyOp, assign_writers, chunk_of, copy_ops
from titan_grpo.observe.waiting import waiting
from titan_grpo.sync.publisher import Announce, Announcer, Publisher, local_shards
from titan_grpo.sync.snapshot import Snapshotter
from titan_grpo.sync.worker import LOOPBACK, ImagePool
from titan_grpo.titan.lora import (
    adapter_layout,
    adapter_shapes,
    adapter_shards,
    is_adapter,
    merged_shards,
)

ToHF = Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class WritePlan:
    """What each rank of the sending host copies. The same on every rank except ``ops``."""

    manifest: Manifest
    layout: Layout
    ops: dict[str, list[CopyOp]]
    """This rank's copies by parameter name; empty on ranks that write nothing."""
    writers: tuple[int, ...]
    """Global ranks that write a part of each image."""


def named_tensors(model: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Parameters and persistent buffers, wrapper prefixes stripped, in the model's order."""
    out: list[tuple[str, torch.Tensor]] = [
        (strip_prefixes(name), p) for name, p in model.named_parameters()
    ]
    for prefix, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                out.append((strip_prefixes(f"{prefix}.{name}" if prefix else name), buffer))
    return out


def exported_tensors(model: torch.nn.Module, to_hf: ToHF) -> list[tuple[str, torch.Tensor]]:
    """``named_tensors`` without LoRA adapters, and without the buffers that the state dict adapter
    does not export.

    Those are tables that the engine computes itself; titan.flavors.disable_unexported_buffers has
    switched off the one that training would change (an MoE's load balancing bias).
    """
    parameters = {strip_prefixes(name) for name, _ in model.named_parameters()}
    return [
        (fqn, t)
        for fqn, t in named_tensors(model)
        if not is_adapter(fqn) and (fqn in parameters or _exported(to_hf, fqn, t))
    ]


def _exported(to_hf: ToHF, fqn: str, buffer: torch.Tensor) -> bool:
    try:
        return bool(to_hf({fqn: torch.empty(buffer.shape, device="meta")}))
    except KeyError:
        # llama's adapter looks every name up and has none for rope tables.
        return False


def host_identity() -> str:
    """What ranks of one host share and ranks of two hosts do not, also in containers with one host
    name."""
    boot = BOOT_ID.read_text().strip() if BOOT_ID.exists() else ""
    namespace = os.readlink("/proc/self/ns/pid") if os.path.exists("/proc/self/ns/pid") else ""
    return f"{socket.gethostname()}/{boot}/{namespace}"


def plan_writes(
    model: torch.nn.Module,
    to_hf: ToHF,
    wire_dtype: str,
    block_bytes: int,
    adapters_only: bool = False,
) -> WritePlan:
    """Learn the layout and divide the work among the ranks of rank 0's host. Collective over all
    ranks, once. ``adapters_only``: versions are LoRA adapters, and not weights.

    Raises ConfigError on every rank if that host does not hold a whole copy of the weights.
    """
    weights = exported_tensors(model, to_hf)
    shapes = {fqn: tuple(tensor.shape) for fqn, tensor in weights}
    tied = {"output.weight"} if getattr(model, "enable_weight_tying", False) else set()
    layout = infer_layout(to_hf, shapes, tied)
    parameters = {strip_prefixes(name) for name, _ in model.named_parameters()}
    keep = {fqn: str(t.dtype).removeprefix("torch.") for fqn, t in weights if fqn not in parameters}
    if adapters_only:
        layout, keep = adapter_layout(layout, adapter_shapes(model)), {}
        weights = [pair for pair in named_tensors(model) if is_adapter(pair[0])]
    manifest = layout.manifest(wire_dtype, block_bytes, keep)
    chunks = {fqn: chunk_of(tensor) for fqn, tensor in weights if layout.by_fqn[fqn]}
    wanted = {fqn: layout.shapes[fqn] for fqn in chunks}
    mine = (host_identity(), manifest.digest, chunks)
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, mine)
    if len({digest for _, digest, _ in gathered}) != 1:
        raise ConfigError(
            "every rank must lay the weights out alike, the manifests differ: do all ranks run the"
            " same model?"
        )
    host = gathered[0][0]
    local = [chunks if where == host else {} for where, _, chunks in gathered]
    assigned = assign_writers(local, wanted)
    rank = dist.get_rank()
    ops = {
        fqn: copy_ops(layout, manifest, fqn, *chunks[fqn])
        for fqn in chunks
        if fqn in assigned[rank]
    }
    return WritePlan(manifest, layout, ops, tuple(r for r, fqns in enumerate(assigned) if fqns))


@dataclass(frozen=True, slots=True)
class Meeting:
    """What rank 0 sends the other ranks once."""

    images: tuple[ImageAddress, ...]
    store_port: int


class TrainerSync:
    """One rank's side of the weight sync. Built collectively; later calls involve no collective,
    but with LoRA the gathering of A in ``publish``."""

    def __init__(
        self,
        model: torch.nn.Module,
        to_hf: ToHF,
        config: WeightSync,
        device: torch.device,
        group: dist.ProcessGroup,
        adapters_only: bool = False,
    ) -> None:
        self._model, self._config, self._device = model, config, device
        self._adapters_only = adapters_only
        self.plan: WritePlan = plan_writes(
            model, to_hf, config.wire_dtype, config.block_bytes, adapters_only
        )
        self.pool: ImagePool | None = None
        """On rank 0 only, which serves the images from it."""
        self._images: tuple[SharedImage, ...] = ()
        self._meeting = self._meet(group)
        self._publisher: Publisher | None = None
        self._announcer: Announcer | None = None

    def _meet(self, group: dist.ProcessGroup) -> Meeting:
        rank = dist.get_rank()
        sent: list[Any] = [None]
        if rank == 0:
            nbytes, slots = self.plan.manifest.total_bytes, self._config.slots
            require_memory(
                nbytes * slots, f"weight_sync.slots = {slots} version images of {nbytes:,} bytes"
            )
            logger.info(
                "weight sync: %d slots x %s bytes = %.3f GiB of host memory; device memory: one"
                " copy buffer per rank and one bucket per NCCL lane of %s bytes each",
                slots,
                f"{nbytes:,}",
                slots * nbytes / 2**30,
                f"{self._config.bucket_bytes:,}",
            )
            pool = self.pool = ImagePool.create(self.plan.manifest, slots)
            self._images = pool.images
            sent = [Meeting(tuple(image.address for image in pool.images), pool.store.port)]
        dist.broadcast_object_list(sent, src=0, group=group)
        meeting: Meeting = sent[0]
        if rank != 0 and self.plan.ops:
            self._images = tuple(SharedImage.attach(address) for address in meeting.images)
        return meeting

    def start(self, announce: Announce | None = None) -> None:
        """Open this rank's publisher. Not collective. ``announce``: rank 0's SyncWorker.publish;
        None: announce to rank 0."""
        if announce is None:
            if not self.plan.ops:
                return
            announce = self._announcer = Announcer(
                dist.get_rank(), LOOPBACK, self._meeting.store_port, self._config.connect_deadline_s
            )
        tensors = [image.tensor() for image in self._images]
        # Pinning takes seconds per 10 GiB; one rank says it.
        size = sum(tensor.nbytes for tensor in tensors) / 2**30
        what = f"memory: {len(tensors)} version images, {size:.2f} GiB"
        with waiting(what) if dist.get_rank() == 0 else nullcontext():
            snapshotter = Snapshotter(
                self.plan.ops, tensors, self._device, self._config.bucket_bytes
            )
        self._publisher = Publisher(snapshotter, announce)

    def publish(self, version: int, slot: int) -> None:
        """Start the copy of this rank's shards, adapters merged, or of its part of the adapters,
        into ``slot``. A rank that writes no part only helps to gather the adapters."""
        if self._adapters_only:
            if self._publisher is not None:
                self._publisher.publish(version, slot, adapter_shards(self._model))
            return
        merged = merged_shards(self._model, set(self.plan.ops))
        if self._publisher is not None:
            shards = local_shards(named_tensors(self._model), set(self.plan.ops))
            self._publisher.publish(version, slot, {**shards, **merged})

    def fence(self) -> None:
        """Before the optimizer changes the weights."""
        if self._publisher is not None:
            self._publisher.fence()

    def take_fenced_s(self) -> float:
        """See Publisher."""
        return 0.0 if self._publisher is None else self._publisher.take_fenced_s()

    def take_error(self) -> str:
        """The latched error of a rank other than 0, as text; empty if there is none."""
        error = self._announcer.take_error() if self._announcer is not None else None
        return "" if error is None else str(error)

    def close(self) -> None:
        """Stop the thread and free the images; on rank 0 after its SyncWorker. Bounded;
        idempotent."""
        if self._announcer is not None:
            self._announcer.close(timeout_s=5.0)
        if self._publisher is not None:
            self._publisher.close()
        for image in self._images:
            image.close()
        self._images = ()
