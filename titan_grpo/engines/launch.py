"""Start real servers on this host, and make sure that they end. Command lines and environments are
in vllm.py and sglang.py."""

import contextlib
import logging
import os
import re
import socket
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from titan_grpo.engines import sglang, vllm
from titan_grpo.engines.http import SyncDriver
from titan_grpo.engines.server import dialect
from titan_grpo.errors import ServerRefused, ServerUnreachable
from titan_grpo.observe import terminal
from titan_grpo.observe.terminal import waiting
from titan_grpo.runkey import Key, with_run_key
from titan_grpo.subprocesses import Guarded, how_ended, past_proxies, without_torchrun

LOG_TAIL = 2000
"""Characters."""
POLL_S = 0.25
GRACE_S = 10.0
"""Seconds between SIGTERM and SIGKILL."""
_ERROR = re.compile(r"^(?:.*?[\])] )?((?:\w+\.)*\w*(?:Error|Exception): .+)$", re.MULTILINE)
"""An exception's last line, alone or after what an engine's logger puts before it."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ServerSpec:
    """One server to start.

    ``python``: interpreter of the engine's environment. ``max_model_len``: most tokens of a prompt
    and its completion; ``position_limit``: of the model itself, 0 if unknown. ``weight_transfer``:
    start with our plugin. ``cpu_threads``: 0 lets the engine choose (a GPU machine, or a host of
    its own). ``run_key``: take weights only from trainers with this key. ``api_key``: required for
    every call; ``admin_key`` (SGLang): for calls that pause it or send weights. ``lora_rank``
    (vLLM): take adapters of that rank as versions; 0: whole weights. ``routes``: return the experts
    of each token on request. ``tool_calls``: parse tool calls by the parser that ``args`` name.
    ``fp32_head``: logits in float32.
    """

    python: str
    model: str
    log_path: str
    engine: str = vllm.NAME
    port: int = 0
    host: str = "127.0.0.1"
    max_model_len: int = 256
    position_limit: int = 0
    dtype: str = "bfloat16"
    max_num_seqs: int = 64
    tensor_parallel: int = 1
    lora_rank: int = 0
    routes: bool = False
    tool_calls: bool = False
    fp32_head: bool = False
    weight_transfer: bool = True
    cpu: bool = True
    cpu_threads: int = 1
    args: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    run_key: Key | None = None
    api_key: str = field(default="", repr=False)
    admin_key: str = field(default="", repr=False)

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"

    @property
    def shares_cores(self) -> bool:
        """Whether other processes need its CPU cores too: then few threads and processes, and no
        spinning."""
        return self.cpu and self.cpu_threads > 0


def first_error(log: str) -> str:
    """Return the first exception in a server's log, or "". The end of the log is often that of an
    outer process, which says only that the engine has ended. Pure.

    >>> first_error("(Engine pid=1) ERROR [core.py:9] OSError: no GPU\\nRuntimeError: see above")
    'OSError: no GPU'
    """
    found = _ERROR.search(log)
    return found.group(1) if found else ""


def command(spec: ServerSpec, keys_path: str = "") -> list[str]:
    """Return the server's command line. ``keys_path``: file with SGLang's keys, if any."""
    return sglang.command(spec, keys_path) if spec.engine == "sglang" else vllm.command(spec)


def environment(base: Mapping[str, str], spec: ServerSpec) -> dict[str, str]:
    """Return the server's environment, from ``base``. It holds the run key: command lines are
    public."""
    out = without_torchrun(base) | {"HF_HUB_OFFLINE": "1"}
    # For our interpreter and our allocator, not for the engine's: with expandable segments vLLM
    # refuses a KV connector, and SGLang's memory saver does not start.
    for name in ("PYTHONHOME", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        out.pop(name, None)
    # SGLang calls itself once it has started, and ends itself if it gets no answer.
    out |= past_proxies(out, spec.host)
    if spec.shares_cores:
        # A server that spins takes the cores that the trainer's ranks need.
        out |= {"OMP_NUM_THREADS": str(spec.cpu_threads), "OMP_WAIT_POLICY": "PASSIVE"}
        out |= {"KMP_BLOCKTIME": "0", "TOKENIZERS_PARALLELISM": "false"}
    if spec.engine == "sglang":
        out = sglang.environment(out, spec, sorted(os.sched_getaffinity(0)))
    else:
        out = vllm.environment(out, spec)
    return with_run_key(out, spec.run_key)


class Server:
    """A launched server, as a context manager; it also ends when this process ends."""

    def __init__(self, spec: ServerSpec) -> None:
        self._held = None
        if not spec.port:
            # An engine binds its port only after loading the model. Until then a socket that never
            # listens reserves it; a server with SO_REUSEADDR, as both engines set it, can still
            # bind.
            self._held = socket.socket()
            self._held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._held.bind((spec.host, 0))
            spec = replace(spec, port=self._held.getsockname()[1])
        self.spec, self.url = spec, spec.url
        self._started = time.monotonic()
        log = Path(spec.log_path)
        log.parent.mkdir(parents=True, exist_ok=True)
        self._keys = Path(f"{log}.keys.yaml")
        keys = sglang.keys(spec) if spec.engine == "sglang" else ""
        # A file of its own: the server of a killed run may write to the one before while it ends.
        log.unlink(missing_ok=True)
        with log.open("wb") as output, contextlib.ExitStack() as failed:
            failed.callback(self._forget_start)
            if keys:
                # Private: SGLang logs all its arguments, keys included.
                os.fchmod(output.fileno(), 0o600)
                self._keys.unlink(missing_ok=True)
                flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
                with open(os.open(self._keys, flags, 0o600), "w") as file:
                    file.write(keys)
            self._guarded = Guarded(
                command(spec, str(self._keys) if keys else ""),
                environment(os.environ, spec),
                GRACE_S,
                stdout=output,
            )
            failed.pop_all()

    @property
    def group(self) -> int:
        """Process group of the server; 0 if it did not start."""
        return self._guarded.group

    def wait_healthy(self, deadline_s: float = 300.0) -> float:
        """Wait until /health answers 200, as in both engines once they can generate; it needs no
        key. Return the seconds since the start.

        Raises ServerUnreachable, with what the log says, if the process ends or at the deadline.
        """
        health = dialect(self.spec.engine).health(2.0)
        with SyncDriver(self.url) as driver:
            while True:
                with contextlib.suppress(ServerUnreachable, ServerRefused):
                    driver.run(health)
                    self._forget_start()
                    return time.monotonic() - self._started
                status = self._guarded.poll()
                if status is not None:
                    what = f"ended with {how_ended(status)} before it was healthy"
                elif time.monotonic() > self._started + deadline_s:
                    what = f"was not healthy after {deadline_s:g} s"
                else:
                    threading.Event().wait(POLL_S)
                    continue
                log = Path(self.spec.log_path)
                said = log.read_text(errors="replace")
                if error := first_error(said):
                    what += f", its first error: {error}"
                raise ServerUnreachable(
                    f"{self.url}: the launched server {what}; see {log}, which ends with:\n"
                    f"{said[-LOG_TAIL:]}"
                )

    def signal(self, number: int) -> None:
        """Signal every process of the server; SIGSTOP and SIGCONT freeze and thaw it."""
        self._guarded.signal(number)

    def alive(self) -> bool:
        return self._guarded.poll() is None

    def stop(self) -> None:
        """Send SIGTERM, after the grace SIGKILL, to the whole group, and wait for its end
        (bounded). Idempotent."""
        self._forget_start()
        self._guarded.stop()

    def _forget_start(self) -> None:
        """Release what only the start needs: the reserved port and the file of keys."""
        if self._held is not None:
            self._held.close()
        self._keys.unlink(missing_ok=True)

    def __enter__(self) -> "Server":
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


class ServerGroup:
    """Servers that start and stop together."""

    def __init__(self, specs: Sequence[ServerSpec]) -> None:
        self._specs, self._servers = tuple(specs), list[Server]()

    @property
    def urls(self) -> tuple[str, ...]:
        """Base URLs of the started servers, in order; they answer after ``wait_healthy``."""
        return tuple(server.url for server in self._servers)

    def start(self) -> None:
        for spec in self._specs:
            self._servers.append(Server(spec))

    def wait_healthy(self, deadline_s: float) -> None:
        """Wait until every server answers. Raises ServerUnreachable with the end of the log of a
        server that does not."""
        for server in self._servers:
            log = Path(server.spec.log_path)
            with waiting(f"the launched server {log.stem} (log: {log})", deadline_s):
                started_s = server.wait_healthy(deadline_s)
            terminal.print_status(
                f"{server.spec.engine} at {server.url} is healthy after {started_s:.0f} s"
            )

    def stop(self) -> None:
        """Stop the started servers; log those that do not end in time. Idempotent."""
        while self._servers:
            server = self._servers.pop()
            try:
                server.stop()
            except subprocess.TimeoutExpired as error:
                # Go on: the remaining servers would outlive this process's work.
                logger.warning("the launched server %s may still run: %s", server.url, error)
