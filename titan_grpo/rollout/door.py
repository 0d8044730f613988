"""The HTTP door of the rollout process: environments push groups here. Threads that parse; the loop decides (ingest.py)."""

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as LateError

from titan_grpo.errors import DataError
from titan_grpo.rollout.httpd import RETRY_AFTER_S, HttpServer, Reply, Request
from titan_grpo.rollout.ingest import SCHEMA, Incoming, parse

DECIDE_S = 10.0
"""How long the loop may take to decide, in seconds."""


class Door:
    """Listens from construction to ``close`` at ``host:port`` (port 0: any); ``take`` and ``status`` run in ``loop``.

    With a ``key`` every request needs ``Authorization: Bearer KEY``. Raises ConfigError where the address can not be bound.
    """

    def __init__(
        self,
        address: str,
        key: str,
        loop: asyncio.AbstractEventLoop,
        take: Callable[[list[Incoming]], Reply],
        status: Callable[[], Reply],
    ) -> None:
        self._loop, self._take, self._status = loop, take, status
        self._server = HttpServer(address, key, self._answer, "rollout.push_address")
        self.address = self._server.address

    def close(self) -> None:
        """Take no further request. Idempotent."""
        self._server.close()

    def _answer(self, request: Request) -> Reply:
        """Reply to one request, in a connection's thread."""
        method, path = request.method, request.path
        if (method, path) == ("GET", "/schema"):
            return Reply(200, SCHEMA)
        if (method, path) == ("GET", "/status"):
            return self._decided(self._status)
        if (method, path) != ("POST", "/groups"):
            return Reply(404, {"error": f"there is GET /schema, GET /status and POST /groups, got {method} {path}"})
        try:
            incoming = parse(request.body)
        except DataError as error:
            return Reply(400, {"error": str(error)})
        return self._decided(lambda: self._take(incoming))

    def _decided(self, decide: Callable[[], Reply]) -> Reply:
        future: Future[Reply] = Future()

        def run() -> None:
            # Not after the sender was told that nothing was decided.
            if future.set_running_or_notify_cancel():
                future.set_result(decide())

        try:
            self._loop.call_soon_threadsafe(run)
            return future.result(DECIDE_S)
        except (LateError, RuntimeError):  # the loop is busy, or closed
            future.cancel()
            return Reply(503, {"error": "the rollout process does not answer; the run may be ending"}, RETRY_AFTER_S)
