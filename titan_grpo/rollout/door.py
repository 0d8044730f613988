"""The HTTP door of the rollout process: environments push groups here. Threads that parse; the loop decides (ingest.py)."""

import asyncio
import hmac
import json
import zlib
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as LateError
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

from titan_grpo.errors import ConfigError, DataError
from titan_grpo.rollout.ingest import MAX_BYTES, RETRY_AFTER_S, SCHEMA, Incoming, Reply, parse
from titan_grpo.rollout.serving import Serving

READ_S = 30.0
"""How long a connection may stay silent, in seconds."""

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
        self.key, self._loop, self._take, self._status = key, loop, take, status
        host, _, port = address.rpartition(":")
        try:
            self._server = _Server((host, int(port)), self)
        except (OSError, ValueError, OverflowError) as error:
            raise ConfigError(f"rollout.push_address must be an address of this host, got {address!r}: {error}") from error
        self.address = f"{host}:{self._server.server_address[1]}"
        self._server.begin("door")

    def close(self) -> None:
        """Take no further request. Idempotent."""
        self._server.end()

    def answer(self, method: str, path: str, body: Callable[[], bytes]) -> Reply:
        """Reply to one request, in a connection's thread."""
        if (method, path) == ("GET", "/schema"):
            return Reply(200, SCHEMA)
        if (method, path) == ("GET", "/status"):
            return self._decided(self._status)
        if (method, path) != ("POST", "/groups"):
            return Reply(404, {"error": f"there is GET /schema, GET /status and POST /groups, got {method} {path}"})
        try:
            incoming = parse(body())
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


class _TooLarge(Exception):
    pass


class _Server(Serving, HTTPServer):
    request_queue_size = 64

    def __init__(self, address: tuple[str, int], door: Door) -> None:
        self.door = door
        super().__init__(address, _Handler)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = READ_S
    server: _Server

    def do_GET(self) -> None:
        """Schema and status."""
        self._reply("GET")

    def do_POST(self) -> None:
        """Groups."""
        self._reply("POST")

    def log_message(self, format: str, *args: Any) -> None:
        """Quiet: what is refused is told to the one who asked, and counted."""

    def _reply(self, method: str) -> None:
        door = self.server.door
        given = self.headers.get("Authorization", "")
        if door.key and not hmac.compare_digest(given.encode(), f"Bearer {door.key}".encode()):
            return self._write(Reply(401, {"error": "a request needs the header Authorization: Bearer KEY"}), False)
        try:
            body = self._body() if method == "POST" else b""
        except _TooLarge:
            return self._write(Reply(413, {"error": f"a body must not be larger than {MAX_BYTES} bytes"}), False)
        except (ValueError, zlib.error) as error:
            return self._write(Reply(400, {"error": f"the body can not be read: {error}"}), False)
        return self._write(door.answer(method, self.path, lambda: body), True)

    def _body(self) -> bytes:
        if "Content-Length" not in self.headers:
            raise ValueError("a request needs the header Content-Length")
        length = int(self.headers["Content-Length"])
        if length > MAX_BYTES:
            raise _TooLarge
        body = self.rfile.read(max(length, 0))
        if self.headers.get("Content-Encoding", "identity").lower() != "gzip":
            return body
        gunzip = zlib.decompressobj(wbits=31)
        plain = gunzip.decompress(body, MAX_BYTES)
        if gunzip.unconsumed_tail:
            raise _TooLarge
        if not gunzip.eof:
            raise ValueError("the gzip stream is torn")
        return plain

    def _write(self, reply: Reply, keep: bool) -> None:
        data = json.dumps(reply.body).encode()
        self.send_response(reply.status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        if reply.retry_after_s is not None:
            self.send_header("Retry-After", str(reply.retry_after_s))
        if not keep:
            # What was not read of the request would be taken for the next one.
            self.send_header("Connection", "close")
            self.close_connection = True
        self.end_headers()
        self.wfile.write(data)
