"""One-sided reads of ranges by NIXL (UCX: RDMA, shared memory, TCP): the source's processor is not
asked for its bytes.

Nor can it ask for a proof: who reads a lane's orders can read the image, in the clear. A read that
is given up may still write. So it has memory of its own, from which checked bytes are copied, and
which is not used again. What an image's slot gets meanwhile is seen by its digests, as over TCP.
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
"""How often a read is looked at without a rest: one of 4 MiB over RDMA takes 0.1 ms."""

REST_S = 0.0005
"""Between two looks after that, in seconds."""


PACKAGES = ("nixl_cu12", "nixl_cu13", "nixl")
"""The same for memory of the host. The last one chooses among the others by importing torch, which
takes a receiver seconds."""


@cache
def _nixl() -> Any:
    """The package's interface. ConfigError without it."""
    for package in PACKAGES:
        with suppress(ImportError):
            return importlib.import_module(f"{package}._api")
    raise ConfigError(
        "weight_sync.transport is nixl, which this environment lacks: pip install"
        ' "titan_grpo[nixl]" here, or use tcp'
    )


def nixl_problem() -> str:
    """Why NIXL cannot be used here; empty if it can."""
    try:
        _nixl()
    except ConfigError as error:
        return str(error)
    return ""


@cache
def _errors() -> tuple[type[Exception], ...]:
    """What a call of NIXL's raises; the classes have no base of their own."""
    package = _nixl().__name__.removesuffix("._api")
    found = vars(importlib.import_module(f"{package}._bindings")).values()
    return tuple(e for e in found if isinstance(e, type) and issubclass(e, Exception))


class _Agent:
    """One end, and a lock: an agent takes one call at a time, none of which waits for the other
    end."""

    def __init__(self, role: str, serves: bool) -> None:
        api = _nixl()
        self.lock = threading.Lock()
        try:
            # Its thread looks for work without a rest, on a core of its own. Who serves needs it:
            # over TCP and shared memory reads are not one-sided all the way. Who reads looks
            # itself, while it reads.
            config = api.nixl_agent_config(backends=["UCX"], enable_prog_thread=serves)
            self.of = api.nixl_agent(f"{role}-{secrets.token_hex(8)}", config)
        except _errors() as error:
            raise ConfigError(
                f"weight_sync.transport is nixl, whose UCX does not start here ({error}): see"
                " UCX_TLS and UCX_NET_DEVICES, or use tcp"
            ) from error
        self._others: dict[str, str] = {}
        """Name by metadata."""

    def knows(self, metadata: str) -> str:
        """Under the lock: the name of the agent whose metadata this is."""
        if metadata not in self._others:
            name = self.of.add_remote_agent(base64.b64decode(metadata))
            self._others[metadata] = name.decode() if isinstance(name, bytes) else name
        return self._others[metadata]


@cache
def _reader() -> _Agent:
    """Of this process: an agent takes a second, threads and connections."""
    return _Agent("reader", serves=False)


class NixlSource:
    """Offers memory of this process. Any thread."""

    def __init__(self) -> None:
        """ConfigError if NIXL cannot be used here."""
        self._agent = _Agent("source", serves=True)
        self._known: dict[tuple[int, int], str] = {}

    def place(self, address: int, nbytes: int) -> str:
        """RangeSource.nixl of an image, which must stay where it is until the process ends. Its
        memory is registered once: with RDMA that pins it."""
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
    """Reads from one place. See ranges.RangeReader."""

    def __init__(self, place: str, timeout_s: float) -> None:
        """``timeout_s``: of one range, in seconds. TransferFailed if the source cannot be
        reached."""
        address, metadata = place.split(":")
        self._base, self._timeout_s, self._stop = int(address), timeout_s, threading.Event()
        self._memory: mmap.mmap | None = None
        self._registered: Any = None
        try:
            self._agent = _reader()
            with self._agent.lock:
                self._name = self._agent.knows(metadata)
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
        """Memory of its own for a range."""
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
        """A read that may be on its way keeps its memory for good."""
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
