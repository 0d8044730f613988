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
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path

from titan_grpo.engines import sglang, vllm
from titan_grpo.engines.http import SyncDriver
from titan_grpo.engines.server import dialect
from titan_grpo.errors import ServerRefused, ServerUnreachable, TitanGrpoError
from titan_grpo.observe import terminal
from titan_grpo.observe.terminal import waiting
from titan_grpo.runkey import Key, with_run_key
from titan_grpo.subprocesses import (
    Guarded,
    how_ended,
    past_proxies,
    received,
    without_torchrun,
)

LOG_END, LOG_TAIL = 1 << 20, 2000
"""Bytes of the end of a log that are read, and characters that are shown."""
POLL_S = 0.25
LOOK_S = 2.0
"""Seconds between two looks at the servers of a run."""
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


def _unused(log: Path) -> Path:
    """Return the first of name-2.log, name-3.log, ... that is not there."""
    return next(p for n in count(2) if not (p := log.with_stem(f"{log.stem}-{n}")).exists())


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
        # That one stays: it may say why the run is started again.
        with contextlib.suppress(FileNotFoundError):
            log.rename(_unused(log))
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
        while not self.healthy():
            if not self.alive():
                what = f"{self.ended()} before it was healthy"
            elif time.monotonic() > self._started + deadline_s:
                what = f"was not healthy after {deadline_s:g} s"
            else:
                threading.Event().wait(POLL_S)
                continue
            if error := self.error():
                what += f", its first error: {error}"
            raise ServerUnreachable(
                f"{self.url}: the launched server {what}; see {self.spec.log_path}, which ends"
                f" with:\n{self._said()[-LOG_TAIL:]}"
            )
        return self.age_s

    def healthy(self) -> bool:
        """Return whether /health answers 200; if so, release what only the start needs."""
        with SyncDriver(self.url) as driver:
            try:
                driver.run(dialect(self.spec.engine).health(2.0))
            except (ServerUnreachable, ServerRefused):
                return False
        self._forget_start()
        return True

    @property
    def name(self) -> str:
        return Path(self.spec.log_path).stem

    @property
    def age_s(self) -> float:
        """Seconds since its start."""
        return time.monotonic() - self._started

    def signal(self, number: int) -> None:
        """Signal every process of the server; SIGSTOP and SIGCONT freeze and thaw it."""
        self._guarded.signal(number)

    def alive(self) -> bool:
        return self._guarded.poll() is None

    def ended(self) -> str:
        """Return in words how it ended."""
        return f"ended with {how_ended(self._guarded.poll())}"

    def error(self) -> str:
        """Return the first error at the end of its log, or ""."""
        return first_error(self._said())

    def _said(self) -> str:
        with contextlib.suppress(OSError), open(self.spec.log_path, "rb") as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - LOG_END))
            return log.read().decode(errors="replace")
        return ""  # the log is gone

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
    """Servers of a run, which start and stop together."""

    def __init__(self, specs: Sequence[ServerSpec]) -> None:
        self._specs, self._servers = tuple(specs), list[Server]()
        self._changing = threading.Lock()
        """Held while a server is replaced, and while ``stop`` takes them all."""
        self._stopping = threading.Event()

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
            what = f"the launched server {server.name} (log: {server.spec.log_path})"
            with waiting(what, deadline_s):
                _say_healthy(server, server.wait_healthy(deadline_s))

    def watch(self, run: "Restarts") -> None:
        """Start a server again that ends from now on; call it after ``wait_healthy``."""
        if self._servers:
            # A daemon, which ``stop`` does not wait for: it may be looking at a server.
            threading.Thread(target=self._watch, args=(run,), name="launched", daemon=True).start()

    def _watch(self, run: "Restarts") -> None:
        try:
            while not self._stopping.wait(LOOK_S):
                for n, server in enumerate(tuple(self._servers)):
                    if run.look(server):
                        try:
                            self._replace(n, server)
                        except OSError as error:  # no process, descriptor or disk space now
                            run.report(f"{server.url} cannot be started again: {error}")
        except Exception as error:  # noqa: BLE001 - top of a thread
            run.report(f"launched servers that end are not started again any more: {error!r}")

    def _replace(self, n: int, ended: Server) -> None:
        """Start a server again, at its port and with a log of its own. Raises OSError."""
        ended.stop()  # what is left of its group has memory and the port
        path = _unused(Path(self._specs[n].log_path))
        with self._changing:
            if not self._stopping.is_set():
                self._servers[n] = Server(replace(ended.spec, log_path=str(path)))

    def stop(self) -> None:
        """Stop the started servers; log those that do not end in time. Idempotent."""
        self._stopping.set()
        with self._changing:
            servers, self._servers = self._servers, []
        while servers:
            server = servers.pop()
            try:
                server.stop()
            except subprocess.TimeoutExpired as error:
                # Go on: the remaining servers would outlive this process's work.
                logger.warning("the launched server %s may still run: %s", server.url, error)


class Restarts:
    """Which launched servers of a run are started again: each that ends, unless it ends before it
    was healthy, since the next one would end like it, and unless it has left the run."""

    def __init__(
        self,
        wanted: Callable[[], Collection[str]],
        report: Callable[[str], None],
        fail: Callable[[TitanGrpoError], None],
    ) -> None:
        """``wanted``: returns the URLs of the run's servers. ``report``: called with a line.
        ``fail``: called with an error once no server of the run can come back. All three are called
        on a thread of the group's."""
        self._wanted, self.report, self._fail = wanted, report, fail
        self._starting, self._gone = set[str](), set[str]()

    def look(self, server: Server) -> bool:
        """Return whether to start the server again now."""
        if server.alive():
            if server.url in self._starting and server.healthy():
                self._starting.discard(server.url)
                _say_healthy(server, server.age_s)
            return False
        # A signal to all processes of a job ends its servers too.
        if received or server.url in self._gone or server.url not in self._wanted():
            return False
        ended, error = f"the launched server {server.name} {server.ended()}", server.error()
        why = f" (its first error: {error})" if error else ""
        if server.url not in self._starting:
            self._starting.add(server.url)
            self.report(f"{ended}: it is started again{why}")
            return True
        self._gone.add(server.url)
        self.report(f"{ended} before it was healthy: it is not started again{why}")
        if self._gone >= set(self._wanted()):
            self._fail(ServerUnreachable(f"no server is left: {ended}{why}"))
        return False


def _say_healthy(server: Server, seconds: float) -> None:
    terminal.print_status(f"{server.spec.engine} at {server.url} is healthy after {seconds:.0f} s")
