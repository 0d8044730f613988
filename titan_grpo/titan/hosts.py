"""Which ranks run on one host, found by trying it; and a host's address in the servers' network."""

import os
import secrets
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import torch.distributed as dist

from titan_grpo.config.rollout import is_loopback
from titan_grpo.engines.http import address_towards
from titan_grpo.errors import ConfigError, SyncError
from titan_grpo.layout.image import ImageAddress, SharedImage, open_memfd
from titan_grpo.runkey import Key
from titan_grpo.sync.lanes import ANYWHERE
from titan_grpo.sync.part import LOOPBACK

TOKEN_BYTES = 32


@dataclass(frozen=True, slots=True)
class Here:
    """Where a rank runs."""

    group: dist.ProcessGroup | None = None
    """Of all ranks, as trusted as gradients are: a key for blocks goes over it; None: the
    default."""
    urls: Sequence[str] = ()
    """Of servers that are known, for the way to them."""
    run_key: Key | None = None
    """On rank 0, if the run has one: the leaders of other hosts get a key of it."""
    name: str = ""
    """For tests of several hosts on one machine: ranks of other names are on other hosts."""
    address: str = ""
    """Where the host serves; empty: found (host_address)."""


def leaders(here: Here) -> list[int]:
    """For each rank the lowest rank of its host. Collective over all ranks.

    Two ranks are on one host if one can open the other's memory: names, boot ids and namespace
    numbers can be alike on two hosts (clones of a machine, containers), a random number cannot.
    ConfigError, on every rank, where ranks of one host cannot all read each other's.
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
        # the memory lives until every rank has looked
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
    """Whether this process can open that memory, and finds ``token`` in it."""
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
    """This host's address in the network of ``bind_host`` (an address of rank 0's host), else of
    the first server that is elsewhere, else of ``master`` (torchrun's MASTER_ADDR).

    On rank 0's host with a ``bind_host`` that is ``bind_host`` itself. Nothing is sent.
    """
    ways = (bind_host, *(urlsplit(url).hostname or "" for url in urls), master, ANYWHERE)
    for way in ways:
        if way and not is_loopback(way):
            with suppress(OSError):  # an unknown name, or no route to it
                if not is_loopback(address := address_towards(way, 80)):
                    return address
    return LOOPBACK
