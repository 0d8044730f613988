"""Starting real servers on this host, and making sure that they end. What is particular to an
engine: launch_<engine>.py."""

import contextlib
import dataclasses
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

from titan_grpo.engines import sglang, vllm
from titan_grpo.engines.http import Call, SyncDriver, ignore
from titan_grpo.engines.process_guard import kill_group
from titan_grpo.errors import ServerRefused, ServerUnreachable
from titan_grpo.runkey import with_run_key
from titan_grpo.subprocesses import ServerSpec, wait_process

__all__ = ["Server", "ServerSpec", "command", "environment", "free_port"]

HEALTH = Call("GET", "/health", 2.0, ignore)
"""Both engines answer it with 200 once they can generate, and ask for no key."""

LOG_TAIL_BYTES = 2000
POLL_S = 0.25


def command(spec: ServerSpec, keys_path: str = "") -> list[str]:
    """The server's command line; ``keys_path``: a file with its keys, for an engine that reads them
    from one."""
    return sglang.command(spec, keys_path) if spec.engine == "sglang" else vllm.command(spec)


def environment(base: Mapping[str, str], spec: ServerSpec) -> dict[str, str]:
    """The server's environment, made of ``base``; the run key goes by it, because anybody can read
    a command line."""
    if spec.engine == "sglang":
        out = sglang.environment(base, spec, sorted(os.sched_getaffinity(0)))
    else:
        out = vllm.environment(base, spec)
    return with_run_key(out, spec.run_key)


def free_port(host: str = "127.0.0.1") -> int:
    """A port that was free a moment ago. If somebody takes it first, the server exits and
    wait_healthy says so."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


class Server:
    """A launched server. A context manager; ``stop`` is idempotent, and the server also ends when
    this process does."""

    def __init__(self, spec: ServerSpec, stop_grace_s: float = 10.0) -> None:
        # An engine binds its port when the model is loaded: until then nobody else shall be given
        # it.
        self._held = None if spec.port else _hold_port(spec.host)
        self.spec = (
            spec
            if self._held is None
            else dataclasses.replace(spec, port=self._held.getsockname()[1])
        )
        self.url = self.spec.url
        self._grace_s = stop_grace_s
        self._started = time.monotonic()
        ours, theirs = socket.socketpair()
        Path(self.spec.log_path).parent.mkdir(parents=True, exist_ok=True)
        self._keys_path = _write_keys(self.spec)
        guard = [
            sys.executable,
            "-m",
            "titan_grpo.engines.process_guard",
            "--fd",
            str(theirs.fileno()),
            "--grace",
            str(stop_grace_s),
        ]
        with open(self.spec.log_path, "wb") as log:
            if self._keys_path:
                # SGLang writes all its arguments into its log, keys too.
                os.fchmod(log.fileno(), 0o600)
            self._guard = subprocess.Popen(
                [*guard, "--", *command(self.spec, self._keys_path)],
                env=environment(os.environ, self.spec),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        theirs.close()
        self._owner = ours
        ours.settimeout(30.0)
        try:
            # no deadline: the socket has a timeout
            self.group = int(ours.makefile("rb").readline() or b"0")
        except (OSError, ValueError):
            self.group = 0
        """Process group of the server; 0 if it did not start."""

    def wait_healthy(
        self, deadline_s: float = 300.0, cancel: threading.Event | None = None
    ) -> float:
        """Wait until /health answers 200; returns the seconds since the start.

        Raises ServerUnreachable when the process ended, ``cancel`` was set, or the deadline passed,
        with the log's end.
        """
        cancel = cancel or threading.Event()
        deadline = self._started + deadline_s
        with SyncDriver(self.url) as driver:
            while True:
                with contextlib.suppress(ServerUnreachable, ServerRefused):
                    driver.run(HEALTH)
                    self._forget_start()
                    return time.monotonic() - self._started
                if self._guard.poll() is not None:
                    raise self._failed(
                        f"ended with exit code {self._guard.returncode} before it was healthy"
                    )
                if time.monotonic() > deadline:
                    raise self._failed(f"was not healthy after {deadline_s:g} s")
                if cancel.wait(POLL_S):
                    raise self._failed("was cancelled while it started")

    def signal(self, number: int) -> None:
        """Send a signal to every process of the server (SIGSTOP and SIGCONT freeze and thaw it)."""
        if self.group:
            kill_group(self.group, number)

    def alive(self) -> bool:
        """Whether the server's process runs."""
        return self._guard.poll() is None

    def stop(self) -> None:
        """SIGTERM, then after the grace SIGKILL, to the whole group; returns when it is gone
        (bounded)."""
        self._forget_start()
        self._owner.close()
        self.signal(signal.SIGCONT)
        try:
            wait_process(self._guard, self._grace_s + 5.0)
        except subprocess.TimeoutExpired:
            self.signal(signal.SIGKILL)
            self._guard.kill()
            wait_process(self._guard, 5.0)

    def _forget_start(self) -> None:
        """What only the start needed. Idempotent."""
        if self._held is not None:
            self._held.close()
        if self._keys_path:
            Path(self._keys_path).unlink(missing_ok=True)

    def _failed(self, what: str) -> ServerUnreachable:
        log = Path(self.spec.log_path)
        tail = log.read_bytes()[-LOG_TAIL_BYTES:].decode(errors="replace") if log.exists() else ""
        return ServerUnreachable(
            f"{self.url}: the launched server {what}; see {log}, which ends with:\n{tail}"
        )

    def __enter__(self) -> "Server":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()


def _hold_port(host: str) -> socket.socket:
    """A socket on a free port that never listens. While it is there nobody is given that port, and
    a server that sets SO_REUSEADDR, as both engines do, can still bind it (Linux: as long as none
    of the two listens)."""
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind((host, 0))
    return held


def _write_keys(spec: ServerSpec) -> str:
    """Path of a new file that only this user can read, with the keys of a server that takes them
    so; empty without."""
    text = sglang.keys(spec) if spec.engine == "sglang" else ""
    if not text:
        return ""
    path = Path(f"{spec.log_path}.keys.yaml")
    path.unlink(missing_ok=True)
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(text)
    return str(path)
