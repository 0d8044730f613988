"""torch's ProcessGroupNCCL without a GPU: bytes go through the store, and what hurts is as in torch
2.13: the constructor reads the environment; a group with a watchdog has the process ended when a
peer is lost; a blocking initialisation waits for a missing peer without end, and cannot be aborted;
an abort may block, or raise."""

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
import torch.distributed as dist

ENDLESS_S = 60.0
"""A wait that is longer counts as one without end."""

POLL_S = 0.01


class Options:
    """As torch's: a communicator blocks unless it is told not to."""

    def __init__(self, is_high_priority_stream: bool) -> None:
        self._timeout = timedelta(minutes=10)
        self.config = SimpleNamespace(blocking=1, min_ctas=0, max_ctas=0)


class ProcessGroupNCCL:
    """One rank of a group. Class attributes are the process's, as the statics of torch are."""

    Options = Options
    ends: ClassVar[list[str]] = []
    """Why torch's monitor would end this process."""
    on_abort: Callable[[], object] = staticmethod(lambda: None)

    def __init__(self, store: dist.Store, rank: int, size: int, options: Any) -> None:
        self._watchdog = os.environ.get("TORCH_NCCL_BLOCKING_WAIT") != "1"
        self._store, self._rank, self._options = store, rank, options
        self._connected = self._aborted = False
        self._count = 0

    def broadcast(self, tensors: list[torch.Tensor], options: Any) -> "Work":
        """The first one makes the communicator."""
        if not self._connected:
            self._connect()
        self._count += 1
        key = f"bytes/{self._count}"
        if self._rank == options.rootRank:
            self._store.set(key, tensors[0].numpy().tobytes())  # type: ignore[arg-type]
        return Work(self, tensors[0], key)

    def abort(self) -> None:
        """It may block, or raise."""
        self._aborted = True
        type(self).on_abort()

    def vanish(self) -> None:
        self._store.set(f"gone/{self._rank}", "1")

    def _connect(self) -> None:
        self._store.set(f"joined/{self._rank}", "1")
        left_s = ENDLESS_S
        if self._options.config.blocking == 0:
            left_s = float(os.environ.get("TORCH_NCCL_NONBLOCKING_TIMEOUT", "1800"))
        deadline = time.monotonic() + min(left_s, ENDLESS_S)
        while not self._store.check([f"joined/{1 - self._rank}"]):
            if time.monotonic() > deadline:
                assert left_s < ENDLESS_S, "the lane's thread waits for the peer without end"
                raise RuntimeError("NCCL timed out while it waited for nonblocking call")
            threading.Event().wait(POLL_S)
        self._connected = True


class Work:
    """One broadcast under way."""

    def __init__(self, group: ProcessGroupNCCL, tensor: torch.Tensor, key: str) -> None:
        self._group, self._tensor, self._key = group, tensor, key

    def wait(self, timeout: timedelta) -> None:
        """Until the bytes are here, and the other rank has them."""
        group, deadline = self._group, time.monotonic() + timeout.total_seconds()
        while not group._store.check([self._key]):
            if group._store.check([f"gone/{1 - group._rank}"]):
                if group._watchdog:
                    type(group).ends.append("the watchdog saw that a peer was lost")
                raise RuntimeError("NCCL communicator was aborted: remote process exited")
            if group._aborted:
                raise RuntimeError("NCCL communicator was aborted")
            if time.monotonic() > deadline:
                raise RuntimeError("Work ran for longer than its timeout")
            threading.Event().wait(POLL_S)
        data = bytearray(group._store.get(self._key))
        self._tensor.copy_(torch.frombuffer(data, dtype=torch.uint8))


@contextmanager
def fake_nccl(monkeypatch: Any) -> Iterator[type[ProcessGroupNCCL]]:
    """``broadcast.py`` finds this group, and a device that is the host."""
    from titan_grpo.sync.transports import broadcast

    class Group(ProcessGroupNCCL):
        """With statics of its own."""

        ends: ClassVar[list[str]] = []

    cuda = SimpleNamespace(
        current_device=lambda: 0, Stream=lambda _: None, device=nullcontext, stream=nullcontext
    )
    host = SimpleNamespace(
        cuda=cuda,
        device=lambda *_: torch.device("cpu"),
        empty=torch.empty,
        uint8=torch.uint8,
        Tensor=torch.Tensor,
    )
    monkeypatch.setattr(broadcast, "torch", host)
    monkeypatch.setattr(
        broadcast,
        "dist",
        SimpleNamespace(ProcessGroupNCCL=Group, BroadcastOptions=dist.BroadcastOptions),
    )
    monkeypatch.delenv("TORCH_NCCL_NONBLOCKING_TIMEOUT", raising=False)
    monkeypatch.setenv("TORCH_NCCL_BLOCKING_WAIT", "0")
    yield Group
