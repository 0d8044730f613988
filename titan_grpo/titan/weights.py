"""The trainer's weights as the sync sees them: named tensors without wrapper prefixes, and who writes which part."""

import os
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from titan_grpo.errors import ConfigError
from titan_grpo.layout.learn import Layout, learn, strip_prefixes
from titan_grpo.layout.manifest import Manifest
from titan_grpo.layout.plan import CopyOp, assign_writers, chunk_of, copy_ops

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
    out: list[tuple[str, torch.Tensor]] = [(strip_prefixes(name), p) for name, p in model.named_parameters()]
    for prefix, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                out.append((strip_prefixes(f"{prefix}.{name}" if prefix else name), buffer))
    return out


def exported_tensors(model: torch.nn.Module, to_hf: ToHF) -> list[tuple[str, torch.Tensor]]:
    """``named_tensors`` without the buffers that the adapter does not export.

    Those are tables that the engine computes itself; titan.flavors.disable_unexported_buffers has switched off the one
    that training would change (an MoE's load balancing bias).
    """
    parameters = {strip_prefixes(name) for name, _ in model.named_parameters()}
    return [(fqn, t) for fqn, t in named_tensors(model) if fqn in parameters or _exported(to_hf, fqn, t)]


def _exported(to_hf: ToHF, fqn: str, buffer: torch.Tensor) -> bool:
    try:
        return bool(to_hf({fqn: torch.empty(buffer.shape, device="meta")}))
    except KeyError:
        # llama's adapter looks every name up and has none for rope tables.
        return False


def host_identity() -> str:
    """What ranks of one host share and ranks of two hosts do not, also in containers with one host name."""
    boot = BOOT_ID.read_text().strip() if BOOT_ID.exists() else ""
    namespace = os.readlink("/proc/self/ns/pid") if os.path.exists("/proc/self/ns/pid") else ""
    return f"{socket.gethostname()}/{boot}/{namespace}"


def plan_writes(model: torch.nn.Module, to_hf: ToHF, wire_dtype: str, block_bytes: int) -> WritePlan:
    """Learn the layout and divide the work among the ranks of rank 0's host. Collective over all ranks, once.

    Raises ConfigError on every rank if that host does not hold a whole copy of the weights.
    """
    weights = exported_tensors(model, to_hf)
    shapes = {fqn: tuple(tensor.shape) for fqn, tensor in weights}
    tied = {"output.weight"} if getattr(model, "enable_weight_tying", False) else set()
    layout = learn(to_hf, shapes, tied)
    parameters = {strip_prefixes(name) for name, _ in model.named_parameters()}
    keep = {fqn: str(t.dtype).removeprefix("torch.") for fqn, t in weights if fqn not in parameters}
    manifest = layout.manifest(wire_dtype, block_bytes, keep)
    chunks = {fqn: chunk_of(tensor) for fqn, tensor in weights if layout.by_fqn[fqn]}
    wanted = {fqn: shapes[fqn] for fqn in chunks}
    mine = (host_identity(), manifest.digest, chunks)
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, mine)
    if len({digest for _, digest, _ in gathered}) != 1:
        raise ConfigError("every rank must lay the weights out alike, the manifests differ: do all ranks run the same model?")
    host = gathered[0][0]
    local = [chunks if where == host else {} for where, _, chunks in gathered]
    assigned = assign_writers(local, wanted)
    rank = dist.get_rank()
    ops = {fqn: copy_ops(layout, manifest, fqn, *chunks[fqn]) for fqn in chunks if fqn in assigned[rank]}
    return WritePlan(manifest, layout, ops, tuple(r for r, fqns in enumerate(assigned) if fqns))
