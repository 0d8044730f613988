"""One rank's side of the weight sync: the ranks of its host, its part of each image, and
publishing."""

import logging
import os
import secrets
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import urlsplit

import torch
import torch.distributed as dist

from titan_grpo.config import WeightSync
from titan_grpo.config.rollout import is_loopback
from titan_grpo.errors import ConfigError, SyncError
from titan_grpo.layout.image import KEYED, Hashing, ImageAddress, SharedImage, open_memfd
from titan_grpo.layout.infer import HFTensor, Layout, ToHF, infer_layout, strip_prefixes
from titan_grpo.layout.manifest import ALIGNMENT, Manifest, Part, Run, extents_of, parts_of
from titan_grpo.layout.memory import MORE, require_memory
from titan_grpo.layout.peft import MergedRows
from titan_grpo.layout.plan import (
    Chunk,
    CopyOp,
    assign_writers,
    chunk_of,
    copy_ops,
    merged,
    written_extents,
    written_pages,
)
from titan_grpo.observe.terminal import waiting
from titan_grpo.runkey import EpochKeys, Key
from titan_grpo.sync.host import HostSync
from titan_grpo.sync.images import ImagePool
from titan_grpo.sync.publisher import Announce, Announcer, Publisher, Snapshotter, local_shards
from titan_grpo.sync.transports.broadcast import LOOPBACK
from titan_grpo.sync.transports.channel import addresses_towards
from titan_grpo.titan import compat
from titan_grpo.titan.lora import (
    adapter_layout,
    adapter_shapes,
    adapter_shards,
    is_adapter,
    merged_shards,
)

logger = logging.getLogger(__name__)

TOKEN_BYTES = 32


@dataclass(frozen=True, slots=True)
class Here:
    """A rank's group and host."""

    group: dist.ProcessGroup | None = None
    """Group of all ranks; None: the default group. It carries the key for blocks in clear, so it
    must be as trusted as the gradients' network."""
    urls: Sequence[str] = ()
    """URLs of known servers, used to find this host's address."""
    run_key: Key | None = None
    """The run key, on rank 0 only. The leaders of other hosts get a key derived from it."""
    name: str = ""
    """For tests: ranks with different names count as on different hosts."""
    address: str = ""
    """Address that this host serves on; empty: ``host_address`` finds it."""


HERE = Here()
"""Defaults: everything is found."""


def leaders(here: Here) -> list[int]:
    """Return for each rank the lowest rank of its host. Collective over all ranks.

    Two ranks are on one host if one can read the other's memory, a random token. Names, boot ids
    and namespace numbers can be equal on two hosts (cloned machines, containers). Raises
    ConfigError on every rank if the ranks of one host cannot all read each other's memory.
    """
    token = secrets.token_bytes(TOKEN_BYTES)
    with SharedImage.create(TOKEN_BYTES, "titan_grpo host") as probe:
        probe.buffer[:] = token
        mine = here.name, probe.address, token
        gathered: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, mine)
        leader = next(
            rank
            for rank, (name, address, its) in enumerate(gathered)
            if name == here.name and _holds(address, its)
        )
        found: list[Any] = [None] * dist.get_world_size()
        # Keep the probe open until here: every rank has read it when this returns.
        dist.all_gather_object(found, leader)
    for rank, its in enumerate(found):
        if found[its] != its:
            raise ConfigError(
                f"the ranks of one host must be able to open each other's memory: rank {rank} can"
                f" open that of rank {its}, which shares none with it but with rank {found[its]};"
                " run them as one user in one container"
            )
    return found


def _holds(address: ImageAddress, token: bytes) -> bool:
    """Whether this process can open that memory and reads ``token`` in it."""
    try:
        fd = open_memfd(address, os.O_RDONLY)
    except SyncError:
        return False
    try:
        return os.pread(fd, TOKEN_BYTES, 0) == token
    except OSError:
        return False
    finally:
        os.close(fd)


def host_address(bind_host: str, urls: Iterable[str], master: str) -> str:
    """Return this host's address on the route to ``bind_host`` (an address of rank 0's host), else
    to the first server on another host, else to ``master`` (torchrun's MASTER_ADDR). On rank 0's
    host that is ``bind_host`` itself, if given. Sends nothing."""
    named = (bind_host, *(urlsplit(url).hostname or "" for url in urls), master)
    ways = addresses_towards(*(host for host in named if host and not is_loopback(host)))
    return next((address for address in ways if not is_loopback(address)), LOOPBACK)


@dataclass(frozen=True, slots=True)
class WritePlan:
    """Division of an image among the ranks. Equal on every rank except ``ops`` and ``part``."""

    manifest: Manifest
    """Manifest with one part for each of ``hosts``."""
    layout: Layout
    ops: dict[str, list[CopyOp]]
    """This rank's copies by parameter name; empty on ranks that write nothing."""
    hosts: tuple[tuple[int, ...], ...]
    """Global ranks that write, by host: rank 0's host first, then the others that write."""
    part: int
    """Index of this rank's host in ``hosts``; -1 if its ranks write nothing."""

    @property
    def leaders(self) -> tuple[int, ...]:
        """The rank of each of ``hosts`` that owns its images; on the first host rank 0, even if it
        writes nothing."""
        return (0, *(ranks[0] for ranks in self.hosts[1:]))

    @property
    def others(self) -> tuple[int, ...]:
        """The writing ranks of this rank's host, without the leader."""
        return tuple(rank for rank in self.hosts[self.part] if rank != self.leaders[self.part])


@dataclass(frozen=True, slots=True)
class Stages:
    """A rank's pipeline stages of a model; without a pipeline one, the model itself."""

    parts: Sequence[torch.nn.Module]
    whole: torch.nn.Module
    """The whole model, which every rank lays out; with a pipeline on the meta device."""


def _parameters(parts: Sequence[torch.nn.Module]) -> list[tuple[str, torch.Tensor]]:
    return [(strip_prefixes(name), p) for part in parts for name, p in part.named_parameters()]


def named_tensors(parts: Sequence[torch.nn.Module]) -> list[tuple[str, torch.Tensor]]:
    """Return parameters, then persistent buffers, in the model's order, wrapper prefixes
    stripped."""
    out = _parameters(parts)
    for part in parts:
        for prefix, module in part.named_modules():
            for name, buffer in module.named_buffers(recurse=False):
                if name not in module._non_persistent_buffers_set:
                    out.append((strip_prefixes(f"{prefix}.{name}" if prefix else name), buffer))
    return out


def exported_tensors(
    parts: Sequence[torch.nn.Module], to_hf: ToHF
) -> list[tuple[str, torch.Tensor]]:
    """Return ``named_tensors`` without LoRA adapters and without the buffers that the state dict
    adapter does not export.

    Such buffers are tables that the engine computes itself. The one that training would change (an
    MoE's load balancing bias) is switched off by titan.flavors.disable_unexported_buffers.
    """
    parameters = {name for name, _ in _parameters(parts)}
    return [
        (fqn, t)
        for fqn, t in named_tensors(parts)
        if not is_adapter(fqn) and (fqn in parameters or _exported(to_hf, fqn, t))
    ]


def stored_tensors(parts: Sequence[torch.nn.Module], to_hf: ToHF) -> list[tuple[str, torch.Tensor]]:
    """Return the tensors of a model that its checkpoint has, by the names there: torchtitan 0.3's
    state dict splits fused projections. Leaves out what ``exported_tensors`` does. Collective."""
    exported = {name for name, _ in exported_tensors(parts, to_hf)}
    left_out = {name for name, _ in named_tensors(parts)} - exported
    return [
        (name, tensor)
        for part in parts
        for own, tensor in part.state_dict().items()
        if (name := strip_prefixes(own)) not in left_out
    ]


def _exported(to_hf: ToHF, fqn: str, buffer: torch.Tensor) -> bool:
    try:
        return bool(to_hf({fqn: torch.empty(buffer.shape, device="meta")}))
    except KeyError:
        # llama's adapter looks up every name and lacks those of rope tables.
        return False


def layout_of(
    model: torch.nn.Module, tensors: Iterable[tuple[str, torch.Tensor]], to_hf: ToHF
) -> Layout:
    """Return the places of a model's tensors in a Hugging Face checkpoint."""
    shapes = {fqn: tuple(tensor.shape) for fqn, tensor in tensors}
    tied = compat.upstream().TIED if getattr(model, "enable_weight_tying", False) else set()
    return infer_layout(to_hf, shapes, tied)


def _shared_layout(
    model: torch.nn.Module, tensors: Sequence[tuple[str, torch.Tensor]], to_hf: ToHF
) -> Layout:
    """Do as ``layout_of``, each rank with its share of the tensors: one rank alone takes 8 minutes
    for Llama 3 405B. Collective over all ranks. Raises ConfigError on all of them alike."""
    rank, world = dist.get_rank(), dist.get_world_size()
    shapes = {fqn: tuple(tensor.shape) for fqn, tensor in tensors}
    found: dict[str, list[HFTensor]] | str
    try:
        found = layout_of(model, tensors[rank::world], to_hf).by_fqn
    except ConfigError as error:
        found = str(error)  # send it: the other ranks wait in the collective below
    gathered: list[Any] = [None] * world
    dist.all_gather_object(gathered, (shapes, found))
    if any(theirs != shapes for theirs, _ in gathered):
        raise ConfigError(
            "every rank must lay the weights out alike, their names and shapes differ: do all ranks"
            " run the same model?"
        )
    for _, share in gathered:
        if isinstance(share, str):
            raise ConfigError(share)
    by_fqn = {fqn: theirs for _, share in gathered for fqn, theirs in share.items()}
    return Layout(shapes, tuple(tensor for fqn in shapes for tensor in by_fqn[fqn]))


def plan_writes(
    model: Stages,
    to_hf: ToHF,
    wire_dtype: str,
    block_bytes: int,
    adapters_only: bool = False,
    here: Here = HERE,
) -> WritePlan:
    """Infer the layout; divide the work among the ranks and the image among their hosts. Collective
    over all ranks, once. ``adapters_only``: versions are LoRA adapters instead of weights.

    The lowest of the ranks that hold the same shard (replicas) writes it. Raises ConfigError on
    every rank if their models differ or their shards do not cover every parameter exactly once.
    """
    weights = exported_tensors(model.parts, to_hf)
    described = exported_tensors([model.whole], to_hf)
    layout = _shared_layout(model.whole, described, to_hf)
    parameters = {name for name, _ in _parameters([model.whole])}
    keep = {f: str(t.dtype).removeprefix("torch.") for f, t in described if f not in parameters}
    if adapters_only:
        layout, keep = adapter_layout(layout, adapter_shapes(model.whole)), {}
        weights = [pair for pair in named_tensors(model.parts) if is_adapter(pair[0])]
    manifest = layout.manifest(wire_dtype, block_bytes, keep)
    chunks = {fqn: chunk_of(tensor) for fqn, tensor in weights if layout.by_fqn[fqn]}
    held: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(held, chunks)
    assigned = assign_writers(held, {f: layout.shapes[f] for f, to in layout.by_fqn.items() if to})
    leader_of = leaders(here)
    writing: dict[int, list[int]] = {0: []}
    for rank, fqns in enumerate(assigned):
        if fqns:
            writing.setdefault(leader_of[rank], []).append(rank)
    rank = dist.get_rank()
    part = list(writing).index(leader_of[rank]) if leader_of[rank] in writing else -1
    plan = WritePlan(
        manifest,
        layout,
        {f: copy_ops(layout, manifest, f, *chunks[f]) for f in chunks if f in assigned[rank]},
        tuple(tuple(ranks) for ranks in writing.values()),
        part,
    )
    if len(plan.hosts) == 1:
        return plan
    # Every rank could compute its host's extents: only the leader does.
    runs: Sequence[Run] = ()
    if part >= 0 and rank == plan.leaders[part]:
        runs = _host_part(layout, manifest, plan.hosts[part], held, assigned).runs
    written: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(written, runs)
    hosts = extents_of([written[leader] for leader in plan.leaders])
    return replace(
        plan, manifest=manifest.with_parts(parts_of(hosts, manifest.total_bytes, ALIGNMENT))
    )


def _host_part(
    layout: Layout,
    manifest: Manifest,
    ranks: Sequence[int],
    held: Sequence[Mapping[str, Chunk]],
    assigned: Sequence[Collection[str]],
) -> Part:
    """Return the extents of an image that these ranks write, without the padding after them.
    Merging their boxes first leaves far fewer rows to list."""
    boxes: dict[str, list[Chunk]] = {}
    for rank in ranks:
        for fqn in assigned[rank]:
            boxes.setdefault(fqn, []).append(held[rank][fqn])
    return Part(
        written_extents(
            op
            for fqn, of in boxes.items()
            for box in merged(of)
            for op in copy_ops(layout, manifest, fqn, *box)
        )
    )


def _require_ranges(config: WeightSync, hosts: int) -> None:
    """Raise ConfigError for settings that send whole images from one host."""
    for key, value in ("transport", "nixl"), ("apply", "streamed"), ("transport", "nccl"):
        if getattr(config, key) == value:
            raise ConfigError(
                f'weight_sync.{key} must not be "{value}" where the weights are sharded over'
                f" {hosts} hosts: it sends whole images from rank 0's host; leave"
                f" weight_sync.{key} out"
            )


@dataclass(frozen=True, slots=True)
class Meeting:
    """What a host's leader sends once to all ranks."""

    images: tuple[ImageAddress, ...]
    store_port: int = 0
    """Port on loopback, for the ranks of this host."""
    hashed: tuple[str, int] = ("", 0)
    """Host and port of rank 0's store for the other leaders; set by rank 0."""
    key: str = ""
    """EpochKeys.blocks in hexadecimal; set by rank 0 if the run has a key."""
    error: str = ""
    """Why this host cannot take part; empty if it can."""


class TrainerSync:
    """One rank's side of the weight sync. Construction is collective; of the later calls only
    ``shards`` with merged LoRA is (it gathers the adapters)."""

    def __init__(
        self,
        model: Stages,
        to_hf: ToHF,
        config: WeightSync,
        device: torch.device,
        adapters_only: bool = False,
        here: Here = HERE,
    ) -> None:
        self._model, self._config, self._device = model, config, device
        self._adapters_only = adapters_only
        wire, block = config.wire_dtype, config.block_bytes
        self.plan: WritePlan = plan_writes(model, to_hf, wire, block, adapters_only, here)
        if len(self.plan.hosts) > 1:
            _require_ranges(config, len(self.plan.hosts))
        self.pool: ImagePool | None = None
        """The images of this host's part; None except on its leader."""
        self._images: tuple[SharedImage, ...] = ()
        # Before the meeting: it calls ``close`` where a host cannot take part.
        self.publisher = Publisher()
        """Publishes nothing before ``start``, nor on a rank that writes nothing."""
        self._announcer: Announcer | HostSync | None = None
        self._address = here.address or host_address(
            config.bind_host, here.urls, os.environ.get("MASTER_ADDR", "")
        )
        self._meetings = self._meet(here.group, here.run_key)

    def _meet(self, group: dist.ProcessGroup | None, run_key: Key | None) -> dict[int, Meeting]:
        """Create or attach this host's images; return the meetings by leader. Raises ConfigError on
        every rank."""
        rank, plan = dist.get_rank(), self.plan
        mine: Meeting | None = None
        if rank in plan.leaders:
            try:
                mine = self._open_pool(run_key)
            except ConfigError as error:
                # Send it: the other ranks wait in the collective below.
                mine = Meeting((), error=str(error))
        gathered: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, mine, group=group)
        meetings: dict[int, Meeting] = {leader: gathered[leader] for leader in plan.leaders}
        for leader, meeting in meetings.items():
            if meeting.error:
                self.close()
                raise ConfigError(f"rank {leader}: {meeting.error}")
        if self.pool is None and plan.ops:
            # Its own pages only: on a host with eight ranks each would map 8 times as many, which
            # takes as long, and memory for page tables.
            pages = written_pages(op for ops in plan.ops.values() for op in ops)
            self._images = tuple(
                SharedImage.attach(address, pages)
                for address in meetings[plan.leaders[plan.part]].images
            )
        return meetings

    def _open_pool(self, run_key: Key | None) -> Meeting:
        manifest, part, slots = self.plan.manifest, self.plan.part, self._config.slots
        nbytes = manifest.parts[part].nbytes
        require_memory(
            nbytes * slots,
            f"weight_sync.slots = {slots} version images of {nbytes:,} bytes",
            f"{'fewer of them, ' if slots > 2 else ''}{MORE}, or more trainer hosts",
        )
        logger.info(
            "weight sync: %d slots x %s bytes%s = %.3f GiB of host memory; device memory: one copy"
            " buffer per rank and one bucket per NCCL lane of %s bytes each",
            slots,
            f"{nbytes:,}",
            f" (part {part} of {len(manifest.parts)})" if len(manifest.parts) > 1 else "",
            slots * nbytes / 2**30,
            f"{self._config.bucket_bytes:,}",
        )
        several = len(self.plan.hosts) > 1 and part == 0
        host = self._address if several else ""
        pool = self.pool = ImagePool.create(manifest, slots, part=part, hashed_host=host)
        self._images = pool.images
        keys = EpochKeys.of(run_key, pool.run_id, 0) if run_key is not None else None
        return Meeting(
            tuple(image.address for image in pool.images),
            pool.store.port,
            (host, pool.hashed.port if pool.hashed is not None else 0),
            keys.blocks.hex() if keys is not None else "",
        )

    def start(self, announce: Announce | None = None) -> None:
        """Open this rank's publisher. Not collective. ``announce``: on rank 0 SyncProcess.publish.
        None elsewhere: ranks announce to their host's leader, leaders to rank 0."""
        if announce is None:
            if not self.plan.ops:
                return
            announce = self._announcer = self._announce()
        tensors = [image.tensor() for image in self._images]
        # Pinning takes seconds per 10 GiB; only rank 0 prints the wait.
        size = sum(tensor.nbytes for tensor in tensors) / 2**30
        what = f"memory: {len(tensors)} version images, {size:.3g} GiB"
        with waiting(what) if dist.get_rank() == 0 else nullcontext():
            snapshotter = Snapshotter(
                self.plan.ops, tensors, self._device, self._config.bucket_bytes
            )
        self.publisher = Publisher(snapshotter, announce)

    def _announce(self) -> Announcer | HostSync:
        plan, meetings, config = self.plan, self._meetings, self._config
        if self.pool is None:
            port = meetings[plan.leaders[plan.part]].store_port
            copy_s = config.transfer_s(plan.manifest.parts[plan.part].nbytes)
            return Announcer(dist.get_rank(), port, config.connect_deadline_s, copy_s)
        rank0 = meetings[0]
        key = Key.parse(rank0.key, "the run's key for blocks") if rank0.key else None
        hashing = Hashing(KEYED if key is not None else config.digest, key)
        ranks = dist.get_rank(), *plan.others
        return HostSync(self.pool, ranks, hashing, self._address, rank0.hashed, config)

    def shards(self) -> Mapping[str, torch.Tensor | MergedRows]:
        """Return this rank's shards (adapters merged) of the next version; with ``adapters_only``
        its adapters."""
        if self._adapters_only:
            return adapter_shards(self._model.whole)
        wanted = set(self.plan.ops)
        merged: dict[str, MergedRows] = {}
        for part in self._model.parts:
            merged |= merged_shards(part, wanted)
        return {**local_shards(named_tensors(self._model.parts), wanted), **merged}

    def take_error(self) -> str:
        """Return and clear the latched error of a rank other than 0, as text; empty if none."""
        error = self._announcer.take_error() if self._announcer is not None else None
        return "" if error is None else str(error)

    def close(self) -> None:
        """Stop the announcer (a thread, or a host's sync process) and free the images. On rank 0
        call it after its SyncProcess has ended. Bounded; idempotent."""
        if self._announcer is not None:
            self._announcer.close(timeout_s=5.0)
        self.publisher.close()
        for image in self._images:
            image.close()
        self._images = ()
