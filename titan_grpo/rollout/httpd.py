"""Serving sockets without looking at a clock: socketserver's own loop wakes twice a second to see
whether it shall end.

A small HTTP server with a key: threads that read requests, hand them over, and write the answers as
JSON."""

import hmac
import json
import socket
import socketserver
import sys
import threading
import zlib
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from titan_grpo.errors import ConfigError

END_S = 5.0
"""How long ``end`` waits for the loop, in seconds; it has nothing to finish but the start of one
connection's thread."""


SPENT_S = 0.1
"""Rest after a connection could not be taken, in seconds: the process has no descriptor left, which
may pass."""


class Serving(socketserver.ThreadingMixIn, socketserver.TCPServer):
    """A stream server that sleeps until somebody connects, with a thread for each connection.

    Put it before another server class: ``class MyServer(Serving, http.server.HTTPServer)``.
    """

    daemon_threads = True
    block_on_close = False  # a caller that says nothing must not hold up the end of the run

    def begin(self, name: str) -> None:
        """Serve in a thread called ``name``, until ``end``."""
        self._ending = threading.Event()
        self._loop = threading.Thread(target=self._serve, name=name, daemon=True)
        self._loop.start()

    def end(self) -> None:
        """Stop listening, at once. Requests under way are not waited for. Idempotent; bounded."""
        self._ending.set()
        with suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)  # ends the loop's accept
        self._loop.join(END_S)
        self.server_close()

    def _serve(self) -> None:
        while not self._ending.is_set():
            try:
                connection, address = self.get_request()
            except OSError:
                self._ending.wait(SPENT_S)
                continue
            try:
                self.process_request(connection, address)
            except RuntimeError:  # no thread is left
                self.shutdown_request(connection)


READ_S = 30.0
"""How long a connection may stay silent, in seconds."""

MAX_BYTES = 256 << 20
"""Longest body of a request."""

RETRY_AFTER_S = 1


@dataclass(frozen=True, slots=True)
class Request:
    """What somebody asked; ``body`` is empty for a GET, and unpacked where it came gzipped."""

    method: str
    path: str
    query: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""


@dataclass(frozen=True, slots=True)
class Reply:
    """What they are told."""

    status: int
    body: Mapping[str, Any]
    retry_after_s: int | None = None


class HttpServer:
    """Listens from construction to ``close`` at ``host:port`` (port 0: any). ``answer`` runs in the
    connections' threads.

    With a ``key`` every request needs ``Authorization: Bearer KEY``. Raises ConfigError, which
    begins with ``what``, where the address can not be bound.
    """

    def __init__(
        self, address: str, key: str, answer: Callable[[Request], Reply], what: str
    ) -> None:
        self.key, self.answer = key, answer
        self._closed = threading.Event()
        host, _, port = address.rpartition(":")
        host = host.strip("[]")
        try:
            self._server = _Server(host, int(port), self)
        except (OSError, ValueError, OverflowError) as error:
            raise ConfigError(
                f"{what} must be an address of this host, got {address!r}: {error}"
            ) from error
        self.address = f"{f'[{host}]' if ':' in host else host}:{self._server.server_address[1]}"
        self._server.begin("http")

    @property
    def closed(self) -> bool:
        """Whether requests are only refused."""
        return self._closed.is_set()

    def close(self) -> None:
        """Take no further request, also not over connections that are open. Idempotent."""
        self._closed.set()
        self._server.end()


class _TooLarge(Exception):
    pass


class _Server(
    Serving
):  # not HTTPServer, which asks for its own name in the DNS, without a deadline
    request_queue_size = 64
    allow_reuse_address = True

    def __init__(self, host: str, port: int, owner: HttpServer) -> None:
        self.owner = owner
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        super().__init__((host, port), _Handler)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients may go away; anything else is a bug of ours, and shown."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = READ_S
    # head and body in one packet: the second of two small ones would wait for the first one's ACK
    wbufsize = -1
    disable_nagle_algorithm = True
    server: _Server

    def do_GET(self) -> None:
        """Questions."""
        self._reply("GET")

    def do_POST(self) -> None:
        """Everything else."""
        self._reply("POST")

    def log_message(self, format: str, *args: Any) -> None:
        """Quiet: what is refused is told to the one who asked."""

    def _reply(self, method: str) -> None:
        owner = self.server.owner
        if owner.closed:
            return self._write(Reply(503, {"error": "this server is ending"}, RETRY_AFTER_S), False)
        given = self.headers.get("Authorization", "")
        if owner.key and not hmac.compare_digest(given.encode(), f"Bearer {owner.key}".encode()):
            return self._write(
                Reply(401, {"error": "a request needs the header Authorization: Bearer KEY"}), False
            )
        if "Origin" in self.headers:
            # A web page that somebody looks at on this host reaches loopback too.
            return self._write(Reply(403, {"error": "requests of web pages are refused"}), False)
        try:
            body = self._body() if method == "POST" else b""
        except _TooLarge:
            return self._write(
                Reply(413, {"error": f"a body must not be larger than {MAX_BYTES} bytes"}), False
            )
        except (ValueError, zlib.error) as error:
            return self._write(Reply(400, {"error": f"the body can not be read: {error}"}), False)
        parts = urlsplit(self.path)
        return self._write(
            owner.answer(Request(method, parts.path, dict(parse_qsl(parts.query)), body)), True
        )

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
