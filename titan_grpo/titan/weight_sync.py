"""The trainer's weights as the sync sees them: named tensors without wrapper prefixes, and who
writes which part.

Setting up the weight sync on all ranks, and one rank's handle of it."""

import ipaddress
import logging
import os
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch
import torch.distributed as dist

from titan_grpo.config import Rollout, WeightSync
from titan_grpo.engines.control import ServerControl
from titan_grpo.engines.server import MakeControl, ServerAccess, make_control
from titan_grpo.errors import ConfigError, ProtocolError, SyncError
from titan_grpo.layout.digest import KEYED, block_digests, fingerprint
from titan_grpo.layout.image import ImageAddress, SharedImage, require_memory
from titan_grpo.layout.infer import Layout, infer_layout, strip_prefixes
from titan_grpo.layout.manifest import Manifest
from titan_grpo.layout.plan import CopyOp, assign_writers, chunk_of, copy_ops
from titan_grpo.observe.recorder import Recorder
from titan_grpo.protocol.messages import new_run_id
from titan_grpo.runkey import EpochKeys, Key
from titan_grpo.sync.lane import LaneContext
from titan_grpo.sync.link import LinkOptions
from titan_grpo.sync.pause_guard import PauseGuard
from titan_grpo.sync.publisher import Announce, Announcer, Publisher, local_shards
from titan_grpo.sync.server_set import Fleet
from titan_grpo.sync.slots import ImageSlots, Published
from titan_grpo.sync.snapshot import Snapshotter
from titan_grpo.sync.transports.store import host_store
from titan_grpo.sync.worker import SyncWorker

ToHF = Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


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
    """``named_tensors`` without the buffers that the adapter does not export.

    Those are tables that the engine computes itself; titan.flavors.disable_unexported_buffers has
    switched off the one that training would change (an MoE's load balancing bias).
    """
    parameters = {strip_prefixes(name) for name, _ in model.named_parameters()}
    return [
        (fqn, t) for fqn, t in named_tensors(model) if fqn in parameters or _exported(to_hf, fqn, t)
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
    model: torch.nn.Module, to_hf: ToHF, wire_dtype: str, block_bytes: int
) -> WritePlan:
    """Learn the layout and divide the work among the ranks of rank 0's host. Collective over all
    ranks, once.

    Raises ConfigError on every rank if that host does not hold a whole copy of the weights.
    """
    weights = exported_tensors(model, to_hf)
    shapes = {fqn: tuple(tensor.shape) for fqn, tensor in weights}
    tied = {"output.weight"} if getattr(model, "enable_weight_tying", False) else set()
    layout = infer_layout(to_hf, shapes, tied)
    parameters = {strip_prefixes(name) for name, _ in model.named_parameters()}
    keep = {fqn: str(t.dtype).removeprefix("torch.") for fqn, t in weights if fqn not in parameters}
    manifest = layout.manifest(wire_dtype, block_bytes, keep)
    chunks = {fqn: chunk_of(tensor) for fqn, tensor in weights if layout.by_fqn[fqn]}
    wanted = {fqn: shapes[fqn] for fqn in chunks}
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


logger = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class Meeting:
    """What rank 0 tells the other ranks once."""

    run_id: str
    images: tuple[ImageAddress, ...]
    store_port: int


def is_local(url: str) -> bool:
    """Whether a server's URL names this host's loopback."""
    host = urlsplit(url).hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


OnServer = Callable[[str, int | None, bool, str, str], None]
"""Called with (url, version held or None, accepting, label, engine) after every change; must not
block."""

Drain = Callable[[str], None]
"""Wait, with a deadline, until nothing runs on a server."""

ANYWHERE = "192.0.2.1"
"""An address that no host has (RFC 5737): the way to it is the default route."""


def resolve_bind_host(configured: str, url: str) -> str:
    """The address for the sockets of a server's lane: as configured, loopback for a local server,
    else the one towards it.

    The kernel's routing answers without sending a packet (a connected UDP socket). Where the
    server's name can not be resolved now, the address of the default route: the server may come up
    later, and nobody waits for its name.
    """
    if configured:
        return configured
    if is_local(url):
        return LOOPBACK
    parts = urlsplit(url)
    for host in (parts.hostname, ANYWHERE):
        family = socket.AF_INET6 if ":" in (host or "") else socket.AF_INET
        with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((host, parts.port or 80))
            return str(probe.getsockname()[0])
    return LOOPBACK


def load_deadline_s(config: WeightSync) -> float:
    """Of a server's load call, which streamed waits for the transfer too, in seconds."""
    return config.commit_deadline_s + (
        config.lane_deadline_s if config.apply == "streamed" else 0.0
    )


class TrainerSync:
    """One rank's weight sync. Built collectively; afterwards no collective of the trainer is
    involved any more."""

    def __init__(
        self,
        model: torch.nn.Module,
        to_hf: ToHF,
        config: WeightSync,
        device: torch.device,
        group: dist.ProcessGroup,
    ) -> None:
        self._model, self._config, self._device = model, config, device
        self.plan: WritePlan = plan_writes(model, to_hf, config.wire_dtype, config.block_bytes)
        self._store: dist.TCPStore | None = None
        self.images: tuple[SharedImage, ...] = ()
        self.meeting = self._meet(group)
        self.worker: SyncWorker | None = None
        self.run_key: Key | None = None
        self._rollout: Rollout | None = None
        self.make_control: MakeControl = make_control
        """Set before ``start`` where engine calls do not go from here."""
        self._controls: dict[str, ServerControl] = {}
        """The newest control plane of each server, which knows what engine it met."""
        self._pause_guard: PauseGuard | None = None
        self.publisher: Publisher | None = None
        self._announcer: Announcer | None = None

    def _meet(self, group: dist.ProcessGroup) -> Meeting:
        rank = dist.get_rank()
        told: list[Any] = [None]
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
            self.images = tuple(
                SharedImage.create(nbytes, f"titan_grpo slot {i}") for i in range(slots)
            )
            self._store = host_store(LOOPBACK)
            told = [
                Meeting(
                    new_run_id(time.time()), tuple(i.address for i in self.images), self._store.port
                )
            ]
        dist.broadcast_object_list(told, src=0, group=group)
        meeting: Meeting = told[0]
        if rank != 0 and self.plan.ops:
            self.images = tuple(SharedImage.attach(address) for address in meeting.images)
        return meeting

    def start(
        self,
        rollout: Rollout,
        urls: list[str],
        on_server: OnServer,
        recorder: Recorder | None,
        run_key: Key | None = None,
        drain: Drain | None = None,
    ) -> None:
        """Open this rank's publisher; on rank 0 also start one lane per server. Not collective.
        ``drain``: see LaneContext."""
        self.run_key = run_key
        self._rollout = rollout
        announce: Announce
        if recorder is not None:
            self.worker = self._start_worker(urls, on_server, recorder, drain)
            announce = self.worker.publish
        elif self.plan.ops:
            announce = self._announcer = Announcer(
                dist.get_rank(), LOOPBACK, self.meeting.store_port, self._config.connect_deadline_s
            )
        else:
            return
        tensors = [image.tensor() for image in self.images]
        chunk_bytes = self._config.bucket_bytes
        self.publisher = Publisher(
            Snapshotter(self.plan.ops, tensors, self._device, chunk_bytes), announce
        )

    def _start_worker(
        self, urls: list[str], on_server: OnServer, recorder: Recorder, drain: Drain | None
    ) -> SyncWorker:
        config = self._config
        transport = config.transport
        if transport == "auto":
            transport = "nccl" if self._device.type == "cuda" else "gloo"
        link = LinkOptions(
            transport=transport,
            # of the process that looks after paused servers; each lane has its own, see SyncWorker
            bind_host=resolve_bind_host(
                config.bind_host, next((url for url in urls if not is_local(url)), urls[0])
            ),
            digest_algorithm=config.digest,
            bucket_bytes=config.bucket_bytes,
            timeout_s=config.lane_deadline_s,
            device=str(self._device) if transport == "nccl" else "cpu",
            apply=config.apply,
            run_key=self.run_key,
        )
        self._pause_guard = PauseGuard(config, link, recorder.run_dir / "pause_guard.log")
        context = LaneContext(
            run_id=self.meeting.run_id,
            manifest=self.plan.manifest,
            images=tuple(image.tensor() for image in self.images),
            config=config,
            link=link,
            slots=ImageSlots(config.slots),
            fleet=Fleet(
                urls,
                lambda url, version, accepting, label: on_server(
                    url, version, accepting, label, self._engine(url)
                ),
            ),
            recorder=recorder,
            watch=self._pause_guard.watch,
            drain=drain,
        )
        assert self._store is not None
        remote_writers = [r for r in self.plan.writers if r != 0]
        worker = SyncWorker(
            context,
            self.images,
            self._store,
            remote_writers,
            lambda url: resolve_bind_host(config.bind_host, url),
        )
        worker.start([self._control(url) for url in urls])
        return worker

    def add_server(self, url: str) -> None:
        """Rank 0: see SyncWorker.add."""
        self._worker().add(self._control(url))

    def remove_server(self, url: str) -> None:
        """Rank 0: see SyncWorker.remove."""
        self._worker().remove(url)

    def latch(self, error: SyncError) -> None:
        """Rank 0: an error for the next step boundary."""
        self._worker().latch(error)

    def _worker(self) -> SyncWorker:
        if self.worker is None:
            raise ProtocolError("the weight sync is not running on this rank")
        return self.worker

    def _control(self, url: str) -> ServerControl:
        rollout = self._rollout
        assert rollout is not None
        api_key, admin_key = (
            os.environ.get(n, "") if n else "" for n in (rollout.api_key_env, rollout.admin_key_env)
        )
        if self._pause_guard is not None:
            self._pause_guard.know(url, api_key, admin_key)
        config = self._config
        load_s = load_deadline_s(config)
        control = self.make_control(
            rollout.engine, ServerAccess(url, config.commit_deadline_s, load_s, api_key, admin_key)
        )
        self._controls[url] = control
        return control

    def _engine(self, url: str) -> str:
        control = self._controls.get(url)
        return control.engine if control is not None else ""

    def image_fingerprint(self, image: memoryview) -> str:
        """Rank 0: the fingerprint of a version with these bytes, under this run's key."""
        manifest, key = self.plan.manifest, self.run_key
        algorithm: str = self._config.digest
        block_key = None
        if key is not None:
            algorithm, block_key = KEYED, EpochKeys.of(key, self.meeting.run_id, 0).blocks.raw
        return fingerprint(manifest.digest, block_digests(image, manifest, algorithm, block_key))

    def newest(self) -> Published | None:
        """Rank 0: the newest complete version."""
        return self.worker.newest() if self.worker is not None else None

    def publish(self, version: int, slot: int) -> None:
        """Start the copy of this rank's shards into ``slot``. Nothing on a rank that writes no
        part."""
        if self.publisher is not None:
            shards = local_shards(named_tensors(self._model), set(self.plan.ops))
            self.publisher.publish(version, slot, shards)

    def fence(self) -> None:
        """Before the optimizer changes the weights."""
        if self.publisher is not None:
            self.publisher.fence()

    def take_error(self) -> str:
        """The latched background error of this rank, as text; empty if there is none."""
        sources: list[Callable[[], Exception | None]] = []
        if self.worker is not None:
            sources.append(self.worker.take_error)
        if self._announcer is not None:
            sources.append(self._announcer.take_error)
        return "; ".join(str(error) for take in sources if (error := take()) is not None)

    def close(self) -> None:
        """Stop lanes and threads and let go of the images. Bounded; idempotent."""
        if self.worker is not None:
            self.worker.close()
        if self._pause_guard is not None:
            self._pause_guard.close()
        if self._announcer is not None:
            self._announcer.close(timeout_s=5.0)
        if self.publisher is not None:
            self.publisher.close()
        for image in self.images:
            image.close()
        self.images = ()
