"""Servers without an engine, for the fault matrix: real HTTP, a real receiver process, no model."""

import json
import time
from pathlib import Path

from safetensors import safe_open

from tests.faults.instances import Launch, Process
from tests.rigs.server_handle import ServerProcess
from titan_grpo.engines import vllm
from titan_grpo.verify.server import recorded


class Engineless:
    """A ServerProcess as instances.Process."""

    def __init__(self, model: Path, folder: Path, host: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._began = time.monotonic()
        self._server = ServerProcess(
            host, args=("--shapes", shapes_of(model), "--record", str(recorded(folder).resolve()))
        )
        self.url, self.group = self._server.url, self._server.pid

    def wait_healthy(self, deadline_s: float) -> float:
        """See Process: it listens when its constructor returns."""
        self._server.run(vllm.health(deadline_s))
        return time.monotonic() - self._began

    def alive(self) -> bool:
        """See Process."""
        return self._server.alive()

    def stop(self) -> None:
        """See Process."""
        self._server.stop()


def shapes_of(model: Path) -> str:
    """JSON of HF name -> shape, for server_process --shapes."""
    with safe_open(model / "model.safetensors", "pt") as file:
        names = file.keys()  # the file is no mapping
        return json.dumps({name: file.get_slice(name).get_shape() for name in names})


def engineless_launcher(model: Path, host: str = "127.0.0.1") -> Launch:
    """Servers that take the tensors of ``model`` (a folder with model.safetensors) and nothing
    else."""

    def launch(folder: Path) -> Process:
        return Engineless(model, folder, host)

    return launch
