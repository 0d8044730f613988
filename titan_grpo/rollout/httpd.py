"""Small HTTP server with a key, for pushed groups, agents and the rollout service. A thread per
connection reads the requests, calls ``answer``, and writes the replies."""

import gzip
import hmac
import io
import json
import select
import socket
import socketserver
import sys
import threading
import zlib
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler
from typing import Any
from urllib.parse import urlsplit

from titan_grpo.config.rollout import ADDRESS, host_and_port
from titan_grpo.errors import ConfigError

END_S = 5.0
"""Seconds that ``close`` waits for the accepting thread."""

SPENT_S = 0.1
"""Back-off after accept() fails (EMFILE), in seconds."""

READ_S = 30.0
"""Timeout of a read or write on a connection, in seconds."""

MAX_BYTES = 256 << 20
"""Maximum size of a request's body, in bytes, before and after gunzip."""

DROPPED_BYTES = 64 << 10
"""Bytes that are read at a time of a body that is dropped."""

RETRY_AFTER_S = 1


@dataclass(frozen=True, slots=True)
class Request:
    """A request. ``body``: unpacked if it came gzipped; empty for a GET. ``key``: bearer key of the
    ``Authorization`` header; empty without one. ``headers``: names in lower case. ``gone``: whether
    the client has closed the connection; until the reply."""

    method: str
    path: str
    body: bytes = b""
    key: str = field(default="", repr=False)
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    gone: Callable[[], bool] = field(default=lambda: False, repr=False)


@dataclass(frozen=True, slots=True)
class Reply:
    """Answer to a request: a JSON object, or raw bytes with content type ``kind``."""

    status: int
    body: Mapping[str, Any] | bytes
    retry_after_s: int | None = None
    kind: str = "text/event-stream"


class HttpServer(socketserver.ThreadingMixIn, socketserver.TCPServer):
    """HTTP server that listens at ``host:port`` (port 0: any) from construction to ``close``, with
    a thread for each connection, in which ``answer`` runs.

    Its loop blocks in accept(); socketserver's own one polls twice a second for its end.
    """

    # Not HTTPServer: it looks its own name up in the DNS, without a deadline.
    request_queue_size = 64
    allow_reuse_address = True
    daemon_threads = True
    block_on_close = False  # a silent client must not delay the end of the run

    def __init__(
        self,
        address: str,
        key: str,
        answer: Callable[[Request], Reply],
        what: str,
        admits: Callable[[Request], bool] = lambda _: True,
    ) -> None:
        """With a ``key``, every request needs ``Authorization: Bearer KEY``. ``admits``, called
        before the body is read: whether the request may have one. If not, the body is read and
        dropped, and ``answer`` gets the request without it. Raises ConfigError, its text beginning
        with ``what``, if the address cannot be bound."""
        self.key, self.answer, self.admits = key, answer, admits
        if (place := host_and_port(address)) is None:
            raise ConfigError(f"{what} must be {ADDRESS}, got {address!r:.200}")
        host = place[0]
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            super().__init__(place, _Handler)
        except (OSError, TypeError) as error:  # TypeError: a host that has no encoding
            raise ConfigError(
                f"{what} must be an address of this host with a free port, got {address!r}: {error}"
            ) from error
        self.address = f"{f'[{host}]' if ':' in host else host}:{self.server_address[1]}"
        self.closing = threading.Event()
        self._loop = threading.Thread(target=self._serve, name="http", daemon=True)
        self._loop.start()

    def close(self) -> None:
        """Stop listening, within END_S, and refuse further requests on open connections. Does not
        wait for requests under way. Idempotent."""
        self.closing.set()
        with suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)  # ends the loop's accept
        self._loop.join(END_S)
        self.server_close()

    def _serve(self) -> None:
        while not self.closing.is_set():
            try:
                connection, address = self.get_request()
            except OSError:
                self.closing.wait(SPENT_S)
                continue
            try:
                self.process_request(connection, address)
            except RuntimeError:  # cannot start a thread
                self.shutdown_request(connection)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore lost connections; print other errors."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(request, client_address)


class _TooLarge(Exception):
    pass


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = READ_S
    # Head and body in one packet: the second of two small ones could wait for the first one's ACK.
    wbufsize = -1
    disable_nagle_algorithm = True
    # Plain text instead of HTML for the errors that the standard library answers itself.
    error_content_type, error_message_format = "text/plain", "%(message)s\n"
    server: HttpServer

    def do_GET(self) -> None:
        self._reply("GET")

    def do_POST(self) -> None:
        self._reply("POST")

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: the reply names the error."""

    def _reply(self, method: str) -> None:
        if refusal := self._refusal():
            return self._write(refusal, keep=False)
        scheme, _, key = self.headers.get("Authorization", "").partition(" ")
        key = key.strip() if scheme.lower() == "bearer" else ""
        headers = {name.lower(): value for name, value in self.headers.items()}
        try:
            path = urlsplit(self.path).path
            request = Request(method, path, b"", key, headers, self._gone)
            if method == "POST":
                request = replace(request, body=self._body(self.server.admits(request)))
        except _TooLarge:
            text = f"a body must not be larger than {MAX_BYTES} bytes"
            return self._write(Reply(413, {"error": text}), keep=False)
        except ValueError as error:
            text = f"the request cannot be read: {error}"
            return self._write(Reply(400, {"error": text}), keep=False)
        return self._write(self.server.answer(request), keep=True)

    def _gone(self) -> bool:
        if (descriptor := self.connection.fileno()) < 0:  # this server ended it
            return True
        # Not recv: the bytes of a next request may come before the end of the connection.
        poll = select.poll()
        poll.register(descriptor, select.POLLRDHUP)
        return bool(poll.poll(0))

    def _refusal(self) -> Reply | None:
        if self.server.closing.is_set():
            return Reply(503, {"error": "this server is ending"}, RETRY_AFTER_S)
        given = self.headers.get("Authorization", "")
        key = self.server.key
        if key and not hmac.compare_digest(given.encode(), f"Bearer {key}".encode()):
            return Reply(401, {"error": "a request needs the header Authorization: Bearer KEY"})
        if "Origin" in self.headers:
            # A web page in a browser on this host can reach loopback addresses too.
            return Reply(403, {"error": "requests of web pages are refused"})
        return None

    def _body(self, kept: bool) -> bytes:
        """Read the body. Return it, unpacked, if it is ``kept``."""
        if "Transfer-Encoding" in self.headers:
            raise ValueError("a request needs the header Content-Length, and no chunks")
        # Without both headers the body is empty (RFC 9112, 6.3), as from curl -X POST.
        length = int(self.headers.get("Content-Length", 0))
        if length > MAX_BYTES:
            raise _TooLarge
        self.wfile.flush()  # "100 Continue", for which a client may wait (curl: a second)
        if not kept:
            # Not left unread: the end of the connection could overtake the answer.
            while length > 0 and (some := self.rfile.read(min(length, DROPPED_BYTES))):
                length -= len(some)
            return b""
        body = self.rfile.read(max(length, 0))
        if self.headers.get("Content-Encoding", "identity").lower() != "gzip":
            return body
        try:
            plain = gzip.GzipFile(fileobj=io.BytesIO(body)).read(MAX_BYTES + 1)
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise ValueError(f"the body is no whole gzip stream: {error}") from error
        if len(plain) > MAX_BYTES:
            raise _TooLarge
        return plain

    def _write(self, reply: Reply, keep: bool) -> None:
        kind = reply.kind if isinstance(reply.body, bytes) else "application/json"
        data = reply.body if isinstance(reply.body, bytes) else json.dumps(reply.body).encode()
        self.send_response(reply.status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        if reply.retry_after_s is not None:
            self.send_header("Retry-After", str(reply.retry_after_s))
        if not keep:
            # Close: the unread rest of this request would be parsed as the next one.
            self.send_header("Connection", "close")
            self.close_connection = True
        self.end_headers()
        self.wfile.write(data)
