"""A CUDA runtime without a GPU: streams that do nothing until somebody waits, and then what is
enqueued in a random legal order.

"Device" tensors are host tensors. Within the device's mode whatever reads or writes one is enqueued
on the current stream, and views are made at once, as on a GPU. A stream does its work in order; two
streams are ordered by events only. A wait for an event binds to its newest record when the wait is
enqueued, and to nothing if there is none.
"""

import ctypes
import random
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from titan_grpo.layout.cuda_runtime import Block


class Record:
    """One record of an event: done when the stream has got there."""

    def __init__(self) -> None:
        self.done = False


class Device:
    """All streams, and what is enqueued on them."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self.main = Stream(self)
        self.current = self.main
        self._streams = [self.main]

    def stream(self) -> "Stream":
        self._streams.append(Stream(self))
        return self._streams[-1]

    def run(self, until: Callable[[], bool] = lambda: False) -> None:
        """Work until that holds, or nothing is left, in any legal order. A stream that waits for
        what nobody enqueued is a hang."""
        while not until():
            ready = [stream for stream in self._streams if stream.ready()]
            if not ready:
                assert not any(stream.queue for stream in self._streams), "a wait without a record"
                return
            self._random.choice(ready).step()

    def some(self) -> None:
        """Work a random while, as a device does beside its host."""
        left = iter(range(self._random.randrange(6)))
        self.run(lambda: next(left, None) is None)


class Stream:
    """Work in order: calls, and records that it waits for."""

    cuda_stream = 0

    def __init__(self, device: Device) -> None:
        self.device = device
        self.queue: deque[Callable[[], object] | Record] = deque()

    def ready(self) -> bool:
        """Whether the next thing can be done."""
        head = self.queue[0] if self.queue else None
        return head.done if isinstance(head, Record) else head is not None

    def step(self) -> None:
        head = self.queue.popleft()
        if not isinstance(head, Record):
            head()

    def wait_stream(self, other: "Stream") -> None:
        """As torch's: for all that is enqueued there now."""
        event = Event()
        event.record(other)
        self.wait_event(event)

    def wait_event(self, event: "Event") -> None:
        if event.newest is not None:
            self.queue.append(event.newest)

    def synchronize(self) -> None:
        self.device.run(lambda: not self.queue)


class Event:
    """As torch.cuda.Event; the time between two is a second."""

    device: Device

    def __init__(self, enable_timing: bool = False, blocking: bool = False) -> None:
        self.newest: Record | None = None

    def record(self, stream: Stream) -> None:
        """From now on it is this record that is waited for."""
        record = self.newest = Record()
        stream.queue.append(lambda: setattr(record, "done", True))

    def query(self) -> bool:
        """Whether the newest record is done."""
        return self.newest is None or self.newest.done

    def synchronize(self) -> None:
        self.device.run(self.query)

    def elapsed_time(self, later: "Event") -> float:
        """In milliseconds. An event that was never recorded is an error, as in CUDA."""
        assert self.newest is not None
        assert later.newest is not None
        return 1000.0


class Runtime:
    """CudaRuntime: copies by address."""

    device: Device

    def register(self, pointer: int, nbytes: int) -> None:
        """Everything is pinned."""

    def unregister(self, pointer: int) -> None:
        """Nothing was."""

    def copy_to_host(self, host: Block, device: Block, width: int, rows: int, stream: int) -> None:
        """Enqueue it on the current stream, whose number all streams have."""

        def copy() -> None:
            for row in range(rows):
                to, source = host.pointer + row * host.pitch, device.pointer + row * device.pitch
                ctypes.memmove(to, source, width)

        self.device.current.queue.append(copy)


class Lazy(TorchDispatchMode):
    """Enqueues what reads or writes elements."""

    def __init__(self, device: Device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device = device

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.is_view or "empty" in str(func) or "detach" in str(func):
            return func(*args, **kwargs)
        if func._schema.is_mutable:  # copy_, add_, ...
            self._device.current.queue.append(lambda: func(*args, **kwargs))
            return args[0]
        # for its shape only: what it is will be known when the stream gets there
        out = torch.full_like(func(*args, **kwargs), -1)
        self._device.current.queue.append(lambda: out.copy_(func(*args, **kwargs)))
        return out


@contextmanager
def fake_cuda(monkeypatch: Any, seed: int) -> Iterator[Device]:
    """torch's CUDA calls go to a device of ours, within it."""
    from titan_grpo.sync import publisher

    device = Device(seed)

    @contextmanager
    def on(stream: Stream) -> Iterator[None]:
        before, device.current = device.current, stream
        try:
            yield
        finally:
            device.current = before

    @contextmanager
    def anywhere(_: Any) -> Iterator[None]:
        yield

    for kind in (Event, Runtime):
        monkeypatch.setattr(kind, "device", device, raising=False)
    for name, value in {
        "Stream": lambda _: device.stream(),
        "Event": Event,
        "current_stream": lambda _: device.current,
        "stream": on,
        "device": anywhere,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(publisher, "CudaRuntime", Runtime)
    yield device
