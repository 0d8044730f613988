"""Waiting for a child process: subprocess has no wait with a deadline that does not ask again every
50 ms.

What servers of all engines have in common when we start them: the description of one, and a clean
environment."""

import os
import select
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal

from titan_grpo.runkey import Key


def wait_process(process: "subprocess.Popen[Any]", timeout_s: float) -> int:
    """As ``process.wait(timeout_s)``, asleep until it ends: its exit status, or
    subprocess.TimeoutExpired.

    Several threads may wait for one process.
    """
    if process.poll() is None and not _ends(process.pid, timeout_s):
        raise subprocess.TimeoutExpired(process.args, timeout_s)
    # no deadline: the process has ended
    return process.wait()


def _ends(pid: int, timeout_s: float) -> bool:
    with suppress(ProcessLookupError):  # another thread has met its end
        pidfd = os.pidfd_open(pid)
        try:
            poll = select.poll()
            poll.register(pidfd, select.POLLIN)
            return bool(poll.poll(max(0.0, timeout_s) * 1000.0))
        finally:
            os.close(pidfd)
    return True


TORCHRUN_NAMES = frozenset(
    {
        "RANK",
        "LOCAL_RANK",
        "WORLD_SIZE",
        "LOCAL_WORLD_SIZE",
        "GROUP_RANK",
        "GROUP_WORLD_SIZE",
        "ROLE_RANK",
        "ROLE_NAME",
    }
    | {"ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS", "PYTHONHOME"}
)
TORCHRUN_PREFIXES = ("TORCHELASTIC_", "TORCH_NCCL_", "PET_")


@dataclass(frozen=True, slots=True)
class ServerSpec:
    """One server to start.

    ``python`` is the interpreter of the engine's environment; ``weight_transfer`` False starts
    without our plugin's backend; ``cpu_threads`` 0 leaves threads to the engine (a GPU machine, or
    a host of its own). With a ``run_key`` it takes weights from nobody without. ``api_key`` is
    asked of everybody; ``admin_key`` (SGLang) of who pauses it or sends weights.
    """

    python: str
    model: str
    log_path: str
    engine: Literal["vllm", "sglang"] = "vllm"
    port: int = 0
    host: str = "127.0.0.1"
    max_model_len: int = 256
    dtype: str = "bfloat16"
    max_num_seqs: int = 64
    tensor_parallel: int = 1
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
        """Base URL of the server."""
        return f"http://{self.host}:{self.port}"

    @property
    def shares_cores(self) -> bool:
        """Whether it runs on a CPU that others need too: few threads, few processes, no
        spinning."""
        return self.cpu and self.cpu_threads > 0


def without_torchrun(base: Mapping[str, str]) -> dict[str, str]:
    """``base`` without torchrun's variables: an engine would take them for its own rank and
    hang."""
    return {
        k: v
        for k, v in base.items()
        if k not in TORCHRUN_NAMES and not k.startswith(TORCHRUN_PREFIXES)
    }


def few_threads(spec: ServerSpec) -> dict[str, str]:
    """Variables that keep a server which shares cores from spinning on those that the trainer's
    ranks need."""
    out = {
        "OMP_NUM_THREADS": str(spec.cpu_threads),
        "OMP_WAIT_POLICY": "PASSIVE",
        "KMP_BLOCKTIME": "0",
    }
    return out | {"TOKENIZERS_PARALLELISM": "false"}
