"""The owner's side of ``server_process``: start it under guard, signal it, end it. Never left
behind."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

from tests.rigs.census import children
from titan_grpo.engines import vllm
from titan_grpo.engines.http import Call, SyncDriver
from titan_grpo.errors import ServerUnreachable
from titan_grpo.subprocesses import Guarded

START_S = 120.0
"""Deadline of a start, in seconds: most of it is importing torch."""

GRACE_S = 2.0
"""How long the guard leaves the process to end by itself, in seconds."""


def served(after: int = 0, timeout_s: float = 60.0) -> Call[dict[str, Any]]:
    """What POST /served says; ``visible``, the (label, digest) pairs that requests could meet,
    from entry ``after`` on."""
    return Call("POST", "/served", timeout_s, dict, json={"after": after})


def served_digest(url: str, timeout_s: float) -> str:
    """Of what a server's memory holds."""
    with SyncDriver(url) as driver:
        return str(driver.run(served(timeout_s=timeout_s))["digest"])


class ServerProcess:
    """One server process and its receivers, which are in its process group. A context manager; also
    ends with its owner."""

    def __init__(
        self,
        host: str = "127.0.0.1",
        port: int = 0,
        args: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        log_path: Path | None = None,
        inside: Sequence[str] = (),
    ) -> None:
        """Start it; returns when it listens. ``port`` 0 takes a free one, and keeps it over
        restarts.

        ``args``: more of its arguments; ``env``: more of its environment; ``log_path``: where its
        stderr and its receivers' is appended to, None: where ours goes; ``inside``: the command
        that runs its arguments on another host. Raises ServerUnreachable if it does not start.
        """
        self._host, self._port, self._args, self._env = host, port, tuple(args), dict(env or {})
        self._log_path, self._inside = log_path, tuple(inside)
        self._began = time.monotonic()
        self.pid = 0
        """Process id of the server, which is also its process group; 0 while it is down."""
        self.start()

    @property
    def url(self) -> str:
        """Base URL; the same over restarts."""
        return f"http://{self._host}:{self._port}"

    @property
    def port(self) -> int:
        """The port it listens on."""
        return self._port

    @property
    def group(self) -> int:
        """Its process group, which is ``pid``."""
        return self.pid

    def wait_healthy(self, deadline_s: float) -> float:
        """Seconds that its start took: it listens when its constructor returns."""
        self.run(vllm.health(deadline_s))
        return time.monotonic() - self._began

    @property
    def guard_pid(self) -> int:
        """Process id of its guard."""
        return self._guarded.guard.pid

    @property
    def receiver_pid(self) -> int | None:
        """Process id of the receiver of the epoch in force, as the server says it; None before the
        first."""
        return self.run(served())["receiver_pid"]  # type: ignore[no-any-return]

    @property
    def receiver_pids(self) -> list[int]:
        """Process ids of all its children, told by the kernel: also while the server is stopped or
        busy."""
        return children(self.pid) if self.pid else []

    def run(self, call: Call[Any]) -> Any:
        """Execute one call over a connection of its own."""
        with SyncDriver(self.url) as driver:
            return driver.run(call)

    def start(self) -> None:
        """Start it again after ``kill`` or ``stop``, on the same port: other weights, another
        label, no memory."""
        command = [*self._inside, sys.executable, "-m", "tests.rigs.server_process"]
        command += ["--host", self._host, "--port", str(self._port), *self._args]
        with ExitStack() as stack:
            log = None if self._log_path is None else stack.enter_context(self._log_path.open("ab"))
            self._guarded = Guarded(
                command,
                {**os.environ, "OMP_NUM_THREADS": "1", **self._env},
                GRACE_S,
                stdout=subprocess.PIPE,
                stderr=log,
            )
        try:
            self._port = int(self._first_line()["port"])
            self.pid = self._guarded.group
        except (ValueError, OSError, TypeError) as error:
            self.stop()
            raise ServerUnreachable(
                f"{self.url}: the server process did not start within {START_S:g} s ({error})"
            ) from error

    def _first_line(self) -> Any:
        """What the process says when it listens. Its further output is read and dropped, so that it
        never fills the pipe."""
        stdout = self._guarded.guard.stdout
        assert stdout is not None
        lines: SimpleQueue[bytes] = SimpleQueue()

        def read() -> None:
            with stdout:
                lines.put(stdout.readline())
                while stdout.read(1 << 16):
                    pass

        threading.Thread(target=read, name=f"server {self._port}", daemon=True).start()
        try:
            return json.loads(lines.get(timeout=START_S))
        except Empty:
            raise TimeoutError("it said nothing") from None

    def signal(self, number: int) -> None:
        """Signal the server and its receivers; SIGSTOP and SIGCONT freeze and thaw them."""
        self._guarded.signal(number)

    def alive(self) -> bool:
        """Whether the server's process runs."""
        return self._guarded.poll() is None

    def kill(self) -> None:
        """SIGKILL to the server and its receivers; returns when they are gone. ``start`` brings it
        back."""
        self.signal(signal.SIGKILL)
        self.stop()

    def stop(self) -> None:
        """End it, also while it is stopped; returns when it is gone. Idempotent."""
        self._guarded.stop()
        self.pid = 0

    def __enter__(self) -> "ServerProcess":
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()
