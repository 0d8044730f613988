"""A real Atropos API server in a process of its own, and what an environment does with it."""

import os
import signal
import subprocess
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from tests.rigs.sockets import free_port
from tests.rigs.trainer_handle import wait_until
from titan_grpo.engines.http import Call, HttpRefused, SyncDriver
from titan_grpo.errors import PeerError, ServerUnreachable
from titan_grpo.subprocesses import Guarded

START_S = 120.0
END_S = 60.0


def until(condition: Callable[[], bool], what: str) -> None:
    """Look again and again at something that says nothing by itself. Raises ServerUnreachable past
    the deadline."""
    if not wait_until(condition, START_S):
        raise ServerUnreachable(f"not within {START_S:g} s: {what}")


class AtroposApi:
    """Runs from construction to ``stop``; a context manager. ``python`` is of an environment with
    atroposlib."""

    def __init__(self, python: str) -> None:
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        self._driver = SyncDriver(self.url)
        self._command = [python, "-m", "uvicorn", "atroposlib.api:app"]
        self._command += ["--host", "127.0.0.1", "--port", str(port)]
        self._process: Guarded | None = None
        self.start()

    def start(self) -> None:
        """Start it, with nothing in it, and wait until it answers."""
        self._process = Guarded(self._command, os.environ, END_S, stdout=subprocess.DEVNULL)
        until(self._answers, f"{self.url} answers")

    def stop(self) -> None:
        """Kill it. Idempotent."""
        if self._process is not None:
            self._process.signal(signal.SIGKILL)
            self._process.stop()

    def restart(self) -> None:
        """The same address, with nothing in it."""
        self.stop()
        self.start()

    def ask(self, method: str, path: str, body: Any = None) -> Any:
        """One call's JSON. Raises PeerError as the driver does."""
        return self._driver.run(Call(method, path, END_S, lambda answer: answer, json=body))

    def reset(self) -> None:
        """Throw away what it holds; it answers 500 where it holds nothing."""
        with suppress(HttpRefused):
            self.ask("GET", "/reset_data")

    def environment(self, group_size: int) -> int:
        """Register one, which works once a trainer took its first batch; its number."""
        body = {"max_token_length": 64, "desired_name": "test"}
        body |= {"weight": 1.0, "group_size": group_size}
        answers: list[Mapping[str, Any]] = []

        def registered() -> bool:
            answers.append(self.ask("POST", "/register-env", body))
            return bool(answers[-1]["status"] == "success")

        until(registered, "a trainer takes batches")
        return int(answers[-1]["env_id"])

    def post(self, *groups: Mapping[str, Any]) -> None:
        """Scored groups, as an environment posts them."""
        for group in groups:
            self.ask("POST", "/scored_data", group)

    def _answers(self) -> bool:
        try:
            return bool(self.ask("GET", "/") == {"message": "AtroposLib API"})
        except PeerError:
            return False

    def __enter__(self) -> "AtroposApi":
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()
        self._driver.close()
