"""One-sided reads of ranges by NIXL (UCX: RDMA, shared memory, TCP), without the source's CPU.

Nor can the source check a proof: a reader of a lane's orders can read the image, in the clear. An
abandoned read may still write its memory, so that memory is never used again. Bytes are copied out
of it, and their digests checked: a slot that is overwritten meanwhile is found as over TCP.
"""

import base64
import ctypes
import importlib
import mmap
import secrets
import threading
import time
from contextlib import suppress
from functools import cache
from typing import Any

from titan_grpo.errors import ConfigError, TransferFailed

SPINS = 200
"""Polls of a read without a rest: a read of 4 MiB over RDMA takes 0.1 ms."""

REST_S = 0.0005
"""Seconds between two polls after that."""


PACKAGES = ("nixl_cu12", "nixl_cu13", "nixl")
"""Equivalent for host memory. The last one imports torch to choose among the others, which costs a
receiver seconds."""


@cache
def _nixl() -> Any:
    """Return the package's interface. Raises ConfigError without it."""
    for package in PACKAGES:
        with suppress(ImportError):
            return importlib.import_module(f"{package}._api")
    raise ConfigError(
        "weight_sync.transport is nixl, which this environment lacks: pip install"
        ' "titan_grpo[nixl]" here, or use tcp'
    )


def nixl_problem() -> str:
    """Return why NIXL cannot be used here; empty if its package is found."""
    try:
        _nixl()
    except ConfigError as error:
        return str(error)
    return ""


@cache
def _errors() -> tuple[type[Exception], ...]:
    """Return NIXL's exception classes, which have no common base of their own."""
    package = _nixl().__name__.removesuffix("._api")
    found = vars(importlib.import_module(f"{package}._bindings")).values()
    return tuple(e for e in found if isinstance(e, type) and issubclass(e, Exception))


class _Agent:
    """One NIXL agent with its lock: it takes one call at a time. No call waits for the peer."""

    def __init__(self, role: str, serves: bool) -> None:
        api = _nixl()
        self.lock = threading.Lock()
        try:
            # The progress thread spins on a core. A source needs it: over TCP and shared memory,
            # reads are not fully one-sided. A reader polls by itself.
            config = api.nixl_agent_config(backends=["UCX"], enable_prog_thread=serves)
            self.of = api.nixl_agent(f"{role}-{secrets.token_hex(8)}", config)
        except _errors() as error:
            raise ConfigError(
                f"weight_sync.transport is nixl, whose UCX does not start here ({error}): see"
                " UCX_TLS and UCX_NET_DEVICES, or use tcp"
            ) from error
        self._others: dict[str, str] = {}
        """Metadata -> name of the remote agent."""

    def name_of(self, metadata: str) -> str:
        """Under the lock: return the name of the remote agent with this metadata; add it if new."""
        if metadata not in self._others:
            name = self.of.add_remote_agent(base64.b64decode(metadata))
            self._others[metadata] = name.decode() if isinstance(name, bytes) else name
        return self._others[metadata]


@cache
def _reader() -> _Agent:
    """Return the process's one reading agent: each costs a second, threads and connections."""
    return _Agent("reader", serves=False)


class NixlSource:
    """Offers memory of this process for reads. Any thread."""

    def __init__(self) -> None:
        """Raises ConfigError if NIXL cannot be used here."""
        self._agent = _Agent("source", serves=True)
        self._known: dict[tuple[int, int], str] = {}

    def place(self, address: int, nbytes: int) -> str:
        """Return RangeSource.nixl of an image, which must stay in place until the process ends.
        Registers its memory once (with RDMA, pins it). Raises TransferFailed if that fails."""
        with self._agent.lock:
            if (address, nbytes) not in self._known:
                try:
                    self._agent.of.register_memory([(address, nbytes, 0, "")], "DRAM")
                    metadata = base64.b64encode(self._agent.of.get_agent_metadata()).decode()
                except _errors() as error:
                    raise TransferFailed(f"an image cannot be offered by NIXL: {error}") from error
                self._known[address, nbytes] = f"{address}:{metadata}"
            return self._known[address, nbytes]


class NixlReader:
    """Reads from one place. See receive.fetch.RangeReader."""

    def __init__(self, place: str, timeout_s: float) -> None:
        """``timeout_s``: for one range, in seconds. Raises TransferFailed if the source cannot be
        reached."""
        address, metadata = place.split(":")
        self._base, self._timeout_s, self._stop = int(address), timeout_s, threading.Event()
        self._memory: mmap.mmap | None = None
        self._registered: Any = None
        try:
            self._agent = _reader()
            with self._agent.lock:
                self._name = self._agent.name_of(metadata)
        except ConfigError as error:
            raise TransferFailed(str(error)) from error
        except _errors() as error:
            raise TransferFailed(f"the source cannot be read by NIXL: {error}") from error

    def read_into(self, offset: int, *views: memoryview) -> None:
        nbytes = sum(view.nbytes for view in views)
        try:
            memory = self._room(nbytes)
            self._read(offset, nbytes)
        except _errors() as error:
            self._abandon()
            raise TransferFailed(f"the source was lost: {type(error).__name__}") from error
        done, whole = 0, memoryview(memory)
        for view in views:
            view[:] = whole[done : done + view.nbytes]
            done += view.nbytes
        whole.release()

    def _room(self, nbytes: int) -> mmap.mmap:
        """Return registered memory for a range."""
        if self._memory is None or len(self._memory) < nbytes:
            self.close()
            self._memory = mmap.mmap(-1, nbytes)
            at = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
            with self._agent.lock:
                self._registered = self._agent.of.register_memory([(at, nbytes, 0, "")], "DRAM")
            self._at = at
        return self._memory

    def _read(self, offset: int, nbytes: int) -> None:
        agent, until = self._agent, time.monotonic() + self._timeout_s
        with agent.lock:
            here = agent.of.get_xfer_descs([(self._at, nbytes, 0)], "DRAM")
            there = agent.of.get_xfer_descs([(self._base + offset, nbytes, 0)], "DRAM")
            handle = agent.of.initialize_xfer("READ", here, there, self._name)
            state = agent.of.transfer(handle)
        looks = 0
        while state == "PROC":
            if time.monotonic() > until:
                self._abandon()
                raise TransferFailed(f"the source gave no range within {self._timeout_s} s by NIXL")
            looks += 1
            if looks > SPINS:
                self._stop.wait(REST_S)
            with agent.lock:
                state = agent.of.check_xfer_state(handle)
        if state != "DONE":
            self._abandon()
            raise TransferFailed("the source was lost: a read by NIXL ended in an error")
        with agent.lock:
            agent.of.release_xfer_handle(handle)

    def _abandon(self) -> None:
        """Keep the memory of a read that may still write, and use it no more."""
        if self._memory is not None:
            _ABANDONED.append(self._memory)
        self._memory = self._registered = None

    def close(self) -> None:
        if self._registered is not None:
            with self._agent.lock:
                self._agent.of.deregister_memory(self._registered)
        self._memory = self._registered = None


_ABANDONED: list[mmap.mmap] = []
"""Never freed: the process ends with its epoch."""
