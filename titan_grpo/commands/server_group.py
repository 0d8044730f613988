"""Start several servers for a command, wait for them with progress, and stop them together."""

import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Literal

from titan_grpo.engines.launch import Server, ServerSpec
from titan_grpo.observe.waiting import waiting
from titan_grpo.runkey import Key

STARTUP_S = 300.0
Engine = Literal["vllm", "sglang"]


class ServerGroup:
    """A context manager; ``urls`` are valid once ``wait_healthy`` returned."""

    def __init__(
        self, pythons: Mapping[Engine, str], model: str, log_dir: Path, count: int, run_key: Key
    ) -> None:
        """``count`` servers of each engine; ``pythons``: its interpreter; ``run_key``: what their
        trainer must have."""
        self._specs = [
            ServerSpec(
                python=python,
                model=model,
                log_path=str(log_dir / f"{engine}{index}.log"),
                engine=engine,
                run_key=run_key,
            )
            for engine, python in pythons.items()
            for index in range(count)
        ]
        self.servers: list[Server] = []
        self._stack = ExitStack()

    @property
    def urls(self) -> list[str]:
        """Base URLs, in order."""
        return [server.url for server in self.servers]

    def __enter__(self) -> "ServerGroup":
        # A server that does not start must not leave the earlier ones running.
        with ExitStack() as stack:
            for spec in self._specs:
                self.servers.append(stack.enter_context(Server(spec)))
            self._stack = stack.pop_all()
        return self

    def wait_healthy(self, say: Callable[[str], None]) -> None:
        """Until every server answers. Raises ServerUnreachable with the end of the log of one that
        does not."""
        began = time.monotonic()
        names = ", ".join(Path(spec.log_path).stem for spec in self._specs)
        say(
            f"starting {names}, about a minute on two cores; logs in"
            f" {Path(self._specs[0].log_path).parent}/*.log"
        )
        deadline_s = STARTUP_S * len(self.servers)
        for server in self.servers:
            with waiting(Path(server.spec.log_path).stem, deadline_s, say):
                server.wait_healthy(deadline_s)
            say(
                f"{server.spec.engine} at {server.url} is healthy after"
                f" {time.monotonic() - began:.0f} s"
            )

    def __exit__(self, *_: object) -> None:
        self._stack.close()
