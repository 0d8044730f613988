"""The key-value store at which the ranks of a communicator meet; and opening a transport by name.

A lane hosts one for gloo and NCCL only, and the trainer one for the notices of its ranks."""

import math
import os
import socket
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from titan_grpo.errors import ConfigError, TransferFailed
from titan_grpo.protocol.messages import RANGES
from titan_grpo.sync.transports.base import Transport, TransportOptions

if TYPE_CHECKING:
    from collections.abc import Iterator

CONNECT_S = 30.0
"""Deadline of a store's own handshake, in seconds."""


@contextmanager
def store_errors(what: str) -> "Iterator[None]":
    """Turn torch's store errors (timeout, lost connection) into TransferFailed that says what was
    awaited."""
    try:
        yield
    except dist.DistError as error:
        lost = isinstance(error, dist.DistNetworkError)
        why = "the connection was lost" if lost else "the deadline passed"
        raise TransferFailed(f"{what}: {why} ({str(error).splitlines()[0]})") from error


def host_store(bind_host: str) -> dist.TCPStore:
    """A TCPStore on a free port of the interface ``bind_host`` (a host name or an address, IPv4 or
    IPv6).

    The listening socket is bound here and handed over: a port that is only looked up and then bound
    by the store can be taken by another process in between, and the store alone would listen on
    every interface. Works under torchrun: it never looks at the agent's store. Raises ConfigError
    if the address cannot be bound.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(bind_host, 0, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.bind(address)
        listener.listen(128)
    except OSError as error:
        raise ConfigError(
            f"weight_sync.bind_host must be an address of this host, got {bind_host!r} ({error}); "
            "servers could not reach the trainer; set it to this host's address in their network"
        ) from error
    port = listener.getsockname()[1]
    with store_errors(f"hosting a store on {bind_host}:{port}"):
        # the store owns the descriptor from here on, also if its constructor fails
        return dist.TCPStore(
            bind_host,
            port,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=CONNECT_S),
            master_listen_fd=listener.detach(),
        )


def join_store(host: str, port: int, timeout_s: float) -> dist.TCPStore:
    """A new connection to a hosted store; TransferFailed names the address if it is not there in
    time.

    One connection serves one blocking call at a time: a thread that must set while another one
    waits needs its own.
    """
    with store_errors(f"joining the store at {host}:{port}"):
        return dist.TCPStore(
            host,
            port,
            is_master=False,
            wait_for_workers=False,
            timeout=timedelta(seconds=timeout_s),
        )


def limit_nccl_opening(open_s: float) -> None:
    """Have torch give up a non-blocking NCCL initialisation whose peer does not come, after
    ``open_s`` seconds in place of 30 minutes.

    Call it before the process's first NCCL group: torch reads the variable once, at the first use
    of any. What a user has set stays. Blocking groups, as torchtitan's are, never look at it.
    """
    os.environ.setdefault("TORCH_NCCL_NONBLOCKING_TIMEOUT", str(math.ceil(open_s)))


def nccl_version() -> str:
    """Version of this process's NCCL, as "2.28.9"; empty where it cannot be used."""
    if not (dist.is_nccl_available() and torch.cuda.is_available()):
        return ""
    return ".".join(map(str, torch.cuda.nccl.version()))


def transport_problem(kind: str, trainers_nccl: str = "") -> str:
    """Why this host cannot open transport ``kind``; empty if it can. ``trainers_nccl``: the version
    of the other end (empty: unknown)."""
    if kind == "nccl":
        ours = nccl_version()
        if not ours:
            return (
                "weight_sync.transport is nccl, but this host has no CUDA device or a torch without"
                " NCCL; use tcp"
            )
        if trainers_nccl not in ("", ours):
            return (
                f"weight_sync.transport nccl needs one version of NCCL at both ends, this server"
                f" has {ours} and the trainer {trainers_nccl}: NCCL refuses to connect them;"
                " install the same torch at both ends, or use tcp"
            )
    elif kind not in ("gloo", *RANGES):
        return f"weight_sync.transport must be tcp, nixl, gloo or nccl here, got {kind!r}"
    return ""


def open_transport(
    kind: str, store: dist.Store, rank: int, size: int, options: TransportOptions
) -> Transport:
    """Open the communicator that "gloo" or "nccl" names; blocks until all ``size`` ranks are there
    or the deadline passed.

    Raises TransferFailed if a rank does not come, ConfigError for an unknown kind or one that this
    host cannot open.
    """
    if problem := transport_problem(kind):
        raise ConfigError(problem)
    # imported here: a CPU-only host never loads the NCCL half
    if kind == "nccl":
        from titan_grpo.sync.transports.nccl import NcclTransport

        return NcclTransport(store, rank, size, options)
    from titan_grpo.sync.transports.gloo import GlooTransport

    return GlooTransport(store, rank, size, options)
