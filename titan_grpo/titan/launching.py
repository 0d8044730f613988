"""The servers that a run starts with; with ``rollout.servers = ["launch"]`` rank 0 starts them on its own host."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from titan_grpo.config import LAUNCH, Rollout
from titan_grpo.engines.launch import Server, ServerSpec
from titan_grpo.runkey import Key
from titan_grpo.titan.sources import Known, known_servers


class Launcher:
    """The servers of one run: started here, or only named in the configuration."""

    def __init__(
        self, rollout: Rollout, model_dir: str, run_dir: Path, cpu: bool, max_model_len: int, run_key: Key | None = None
    ) -> None:
        """``run_key``: the configured one. Launched servers get a new one if there is none; ``run_key`` says which counts."""
        self._servers: list[Server] = []
        self._rollout = rollout
        self._specs: list[ServerSpec] = []
        self.run_key = run_key
        if rollout.servers == [LAUNCH]:
            self.run_key = run_key or Key.generate()
            shared = ServerSpec(
                python=rollout.launch_python,
                model=model_dir,
                log_path="",
                max_model_len=max_model_len,
                max_num_seqs=rollout.max_concurrent_requests,
                cpu=cpu,
                args=tuple(rollout.launch_args),
                run_key=self.run_key,
            )
            self._specs = [
                replace(_of_engine(shared, engine, rollout), log_path=str(run_dir / f"{engine}{index}.log"))
                for engine in rollout.launch_engines
                for index in range(rollout.launch_count)
            ]

    def start(self, deadline_s: float, environ: Mapping[str, str]) -> Known:
        """URLs of all servers; those launched here are healthy, and ask for the keys that the configuration names.

        Raises ServerUnreachable with the log's end, ConfigError for a servers file or a host list that can not be read.
        """
        if self._specs:
            names = (self._rollout.api_key_env, self._rollout.admin_key_env)
            api_key, admin_key = (environ.get(name, "") if name else "" for name in names)
            for spec in self._specs:
                self._servers.append(Server(replace(spec, api_key=api_key, admin_key=admin_key)))
            for server in self._servers:
                server.wait_healthy(deadline_s)
        return known_servers(self._rollout, environ, tuple(server.url for server in self._servers))

    def stop(self) -> None:
        """Stop what was started. Idempotent."""
        for server in self._servers:
            server.stop()
        self._servers = []


def _of_engine(spec: ServerSpec, engine: str, rollout: Rollout) -> ServerSpec:
    if engine == "sglang":
        args = tuple(rollout.launch_sglang_args)
        return replace(spec, engine="sglang", python=rollout.launch_sglang_python, args=args)
    return spec
