"""Which transports there are, and opening one by name."""

import torch
import torch.distributed as dist

from titan_grpo.errors import ConfigError
from titan_grpo.sync.transports.base import Transport, TransportOptions


def transport_problem(kind: str) -> str:
    """Why this host can not open transport ``kind``; empty if it can."""
    if kind == "nccl":
        if not (dist.is_nccl_available() and torch.cuda.is_available()):
            return "weight_sync.transport is nccl, but this host has no CUDA device or a torch without NCCL; use gloo"
    elif kind != "gloo":
        return f"weight_sync.transport must be gloo or nccl here, got {kind!r}"
    return ""


def open_transport(kind: str, store: dist.Store, rank: int, size: int, options: TransportOptions) -> Transport:
    """Open the communicator that "gloo" or "nccl" names; blocks until all ``size`` ranks are there or the deadline passed.

    Raises TransferFailed if a rank does not come, ConfigError for an unknown kind or one that this host can not do.
    """
    if problem := transport_problem(kind):
        raise ConfigError(problem)
    # imported here: a CPU-only host never loads the NCCL half
    if kind == "nccl":
        from titan_grpo.sync.transports.nccl import NcclTransport

        return NcclTransport(store, rank, size, options)
    from titan_grpo.sync.transports.gloo import GlooTransport

    return GlooTransport(store, rank, size, options)
