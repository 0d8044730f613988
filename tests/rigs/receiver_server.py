"""A server without an engine: the real plugin half and a real receiver process, and no model and no
generation.

What it is for: testing and measuring the sync without a GPU, a model or an inference engine. A lane
drives it through ``DirectControl``, or over HTTP in a process of its own (server_process), as it
drives a real server; bytes, digests, epochs and commits take the real path. It can freeze, lose its
receiver, go away and come back."""

import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from tests.rigs.signals import send
from titan_grpo.errors import ServerRefused, ServerUnfit, ServerUnreachable
from titan_grpo.protocol.messages import Label
from titan_grpo.receive.commit import Engine, EngineSide, Workers
from titan_grpo.receive.process import ReceiverHandle
from titan_grpo.runkey import Key

OWN_LABEL = "default"
"""What the server shows before the first commit, as vLLM does."""

Inspect = Callable[[str, torch.Tensor], None]
"""Looks at one (HF name, tensor) of a version while it is loaded; the tensor is valid during the
call only."""


class BareEngine(Engine):
    """An engine that accepts any names and keeps nothing."""

    def __init__(self, inspect: Inspect | None, quantization: str = "") -> None:
        self._inspect, self.quantization = inspect, quantization

    def load(self, tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in tensors:
            if self._inspect is not None:
                self._inspect(name, tensor)


class ReceiverServer:
    """One server. Its methods may be called from any thread; what a lane calls is in
    ``DirectControl``.

    A context manager: leaving it ends the receiver process, also one that is frozen.
    """

    def __init__(
        self,
        url: str,
        inspect: Inspect | None = None,
        run_key: Key | None = None,
        make_side: Callable[[], EngineSide] | None = None,
        quantization: str = "",
    ) -> None:
        """``url`` is only a name. With a ``run_key`` weights come from who has it. Starts nothing
        until a lane greets it. ``make_side``: of another engine than BareEngine."""
        self.url = url
        self.reads_tool_calls = True
        self._new_side = make_side or (
            lambda: EngineSide(BareEngine(inspect, quantization), Workers(), "", run_key)
        )
        self._changed = threading.Condition()
        # An engine answers one call at a time, on a thread that lives as long as it does: the
        # receivers are killed when the thread that started them ends.
        self._calls = ThreadPoolExecutor(1, thread_name_prefix="engine")
        self._up = True
        self._label = OWN_LABEL
        self._paused = False
        self._versions: list[int] = []
        self._side = self._new_side()

    @property
    def versions(self) -> list[int]:
        """Versions that became visible here, in order, over all restarts."""
        with self._changed:
            return list(self._versions)

    @property
    def label(self) -> str:
        """The label that it shows."""
        with self._changed:
            return self._label

    @property
    def paused(self) -> bool:
        """Whether generation would stand still."""
        with self._changed:
            return self._paused

    @property
    def receiver(self) -> ReceiverHandle | None:
        """The receiver of the epoch in force; None before the first."""
        return self._side.receiver

    @property
    def receiver_pid(self) -> int | None:
        serving = self.receiver._serving if self.receiver is not None else None
        return serving.pid if serving is not None else None

    def wait_version(self, version: int, timeout_s: float) -> bool:
        """Wait until the label shows ``version`` or newer, of any run; False if it does not within
        ``timeout_s`` seconds."""
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while (shown := Label.parse(self._label)) is None or shown.version < version:
                remaining = deadline - time.monotonic()
                if remaining <= 0:
                    return False
                self._changed.wait(remaining)
            return True

    # What goes wrong with servers.

    def freeze_receiver(self) -> None:
        """Stop the receiver where it is (SIGSTOP): it holds its connections and does nothing."""
        self._signal(signal.SIGSTOP)

    def thaw_receiver(self) -> None:
        """Let a frozen receiver go on."""
        self._signal(signal.SIGCONT)

    def kill_receiver(self) -> None:
        """Kill the receiver process; the server itself lives on."""
        self._signal(signal.SIGKILL)

    def _signal(self, number: int) -> None:
        pid = self.receiver_pid
        if pid is None:
            raise ServerRefused(f"{self.url} has no receiver process: no lane has greeted it yet")
        send(pid, number)

    def go_away(self) -> None:
        """The server's process ends, and its receiver with it: every call fails until
        ``come_back``."""
        with self._changed:
            self._up = False
        # no deadline: the engine ends its receiver within deadlines of its own
        self._calls.submit(self._side.close).result()

    def come_back(self) -> None:
        """A restarted server: healthy, with weights and a label of its own, and no memory of any
        epoch."""
        with self._changed:
            self._side = self._new_side()
            self._up, self._paused, self._label = True, False, OWN_LABEL

    def close(self) -> None:
        """End the receiver. Idempotent."""
        self.go_away()

    def __enter__(self) -> "ReceiverServer":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # What DirectControl calls.

    def _call(self, work: Callable[[EngineSide], object]) -> None:
        def call() -> None:
            self._check_up()
            work(self._side)

        # no deadline: the engine's own; what it loads in a test may be held there
        self._calls.submit(call).result()

    def _check_up(self) -> None:
        with self._changed:
            if not self._up:
                raise ServerUnreachable(f"{self.url} is away")

    def _set(self, paused: bool | None = None, label: str | None = None) -> None:
        self._check_up()
        with self._changed:
            self._paused = self._paused if paused is None else paused
            if label is not None:
                self._label = label
                shown = Label.parse(label)
                if shown is not None and self._versions[-1:] != [shown.version]:
                    self._versions.append(shown.version)
            self._changed.notify_all()


class DirectControl:
    """``engines.server.ServerControl`` of a ReceiverServer in this process: calls instead of HTTP,
    same order and errors."""

    engine = ""

    def __init__(self, server: ReceiverServer) -> None:
        self._server = server
        self.url = server.url

    def label(self) -> str:
        self._server._check_up()
        return self._server.label

    def check_tool_parser(self) -> None:
        if not self._server.reads_tool_calls:
            raise ServerUnfit(f"{self.url} reads no calls of tools")

    def greet(self, hello: Mapping[str, Any]) -> None:
        self._server._call(lambda side: side.hello(dict(hello)))

    def paused(self) -> bool:
        self._server._check_up()
        return self._server.paused

    def pause(self) -> None:
        self._server._set(paused=True)

    def drop_kv(self) -> None:
        """There is none."""

    def load(self, info: Mapping[str, Any]) -> None:
        self._server._call(lambda side: side.commit(dict(info)))

    def finish(self, label: str) -> None:
        self._server._set(label=label)

    def stock(self) -> None:
        """Our receiver is there."""

    def relabel(self, label: str) -> None:
        self._server._set(label=label)

    def resume(self) -> None:
        self._server._set(paused=False)

    def close(self) -> None:
        """The connection ends; the server stays."""
