"""``rollout.servers = ["launch"]``: rank 0 starts the servers on its own host and stops them at the end."""

from collections.abc import Sequence
from pathlib import Path

from titan_grpo.config import LAUNCH, Rollout
from titan_grpo.engines.launch import Server, ServerSpec


class Launcher:
    """The servers of one run: started here, or only named in the configuration."""

    def __init__(self, rollout: Rollout, model_dir: str, run_dir: Path, cpu: bool, max_model_len: int) -> None:
        self._servers: list[Server] = []
        self._urls = list(rollout.servers)
        self._specs: list[ServerSpec] = []
        if rollout.servers == [LAUNCH]:
            self._specs = [
                ServerSpec(
                    python=rollout.launch_python,
                    model=model_dir,
                    log_path=str(run_dir / f"server{index}.log"),
                    max_model_len=max_model_len,
                    max_num_seqs=rollout.max_concurrent_requests,
                    cpu=cpu,
                    args=tuple(rollout.launch_args),
                )
                for index in range(rollout.launch_count)
            ]

    def start(self, deadline_s: float) -> Sequence[str]:
        """URLs of all servers; those launched here are healthy. Raises ServerUnreachable with the log's end."""
        if self._specs:
            self._servers = [Server(spec) for spec in self._specs]
            for server in self._servers:
                server.wait_healthy(deadline_s)
            self._urls = [server.url for server in self._servers]
        return self._urls

    def stop(self) -> None:
        """Stop what was started. Idempotent."""
        for server in self._servers:
            server.stop()
        self._servers = []
