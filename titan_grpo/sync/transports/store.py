"""The key-value store of a lane: hosted by the trainer on a socket that it bound itself, joined by the receiver."""

import socket
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING

import torch.distributed as dist

from titan_grpo.errors import ConfigError, TransferFailed

if TYPE_CHECKING:
    from collections.abc import Iterator

CONNECT_S = 30.0
"""Deadline of a store's own handshake, in seconds."""


@contextmanager
def store_errors(what: str) -> "Iterator[None]":
    """Turn torch's store errors (timeout, lost connection) into TransferFailed that says what was awaited."""
    try:
        yield
    except dist.DistError as error:
        lost = isinstance(error, dist.DistNetworkError)
        why = "the connection was lost" if lost else "the deadline passed"
        raise TransferFailed(f"{what}: {why} ({str(error).splitlines()[0]})") from error


def host_store(bind_host: str) -> dist.TCPStore:
    """A TCPStore on a free port of the interface ``bind_host`` (a host name or an address, IPv4 or IPv6).

    The listening socket is bound here and handed over: a port that is only looked up and then bound by the store
    can be taken by another process in between, and the store alone would listen on every interface.
    Works under torchrun: it never looks at the agent's store. Raises ConfigError if the address can not be bound.
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
    """A new connection to a hosted store; TransferFailed names the address if it is not there in time.

    One connection serves one blocking call at a time: a thread that must set while another one waits needs its own.
    """
    with store_errors(f"joining the trainer's store at {host}:{port}"):
        return dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=timeout_s))
