"""A real HTTP proxy in front of one server, scripted to fail: what a network and a load balancer do
to control calls.

::

    with Proxy(("127.0.0.1", 8000)) as proxy:
        proxy.script(Act.LOSE, "/resume")          # the answer to the next /resume is lost
        lane talks to proxy.url

One thread per connection, one connection to the server per request. Answers of one piece only,
which is what control calls have."""

import http.client
import json
import socket
import struct
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self
from urllib.parse import urlsplit

from titan_grpo.errors import ServerUnreachable

HELD_S = 600.0
"""Longest silence of a request that is never answered, in seconds; the caller's own deadline ends
it."""

POLL_S = 0.02
"""How soon a proxy that is shut has stopped listening."""

HOST = "127.0.0.1"
HOP = frozenset({"connection", "keep-alive", "transfer-encoding", "host", "content-length"})
"""Headers that belong to one connection."""

Headers = list[tuple[str, str]]


class Act(Enum):
    """What happens to one request."""

    FAIL = "answer 500, the server never sees it"
    LOSE = "the server does it, the caller never hears of it"
    RESET = "the connection is reset, the server never sees it"
    SILENCE = "no answer, the server never sees it"
    TWICE = "the server gets it twice, the caller the first answer"
    REWRITE = "the server gets another value in its JSON body"


@dataclass(frozen=True, slots=True)
class Rule:
    """``act`` strikes ``path``; for REWRITE, ``change`` replaces values in the innermost object
    that has the keys."""

    act: Act
    path: str
    change: Mapping[str, Any] = field(default_factory=dict)


def address_of(url: str) -> tuple[str, int]:
    """Host and port of a server."""
    parts = urlsplit(url)
    assert parts.hostname is not None
    assert parts.port is not None
    return parts.hostname, parts.port


class Proxy:
    """Forwards to ``target`` whatever no rule strikes. A context manager; any thread may script
    it."""

    upstream_s = 60.0
    """Deadline of the server's answer, in seconds."""

    def __init__(self, target: tuple[str, int]) -> None:
        self._lock = threading.Lock()
        self._target = target
        self._rules: list[Rule] = []
        self._struck: list[tuple[str, Act]] = []
        self._granted: list[str] = []
        self._ended = False
        self._listener: _Listener | None = _Listener(self, 0)
        self.port = self._listener.server_port
        self.url = f"http://{HOST}:{self.port}"

    def script(self, act: Act, path: str, change: Mapping[str, Any] | None = None) -> None:
        """Strike the next request for ``path``; several rules for one path strike one request each,
        in order."""
        with self._lock:
            self._rules.append(Rule(act, path, change or {}))

    def clear(self) -> None:
        """Forget the rules that have not struck."""
        with self._lock:
            self._rules = []

    @property
    def struck(self) -> list[tuple[str, Act]]:
        """(path, act) of every rule that has struck, in order."""
        with self._lock:
            return list(self._struck)

    @property
    def granted(self) -> list[str]:
        """Paths of the requests that the server has answered with 200, in order."""
        with self._lock:
            return list(self._granted)

    def aim(self, target: tuple[str, int]) -> None:
        """From the next request on, another server answers under the same URL."""
        with self._lock:
            self._target, listener = target, self._listener
        if listener is not None:
            listener.cut()

    def shut(self) -> None:
        """Refuse connections, and cut those that are open, until ``open``. Idempotent."""
        with self._lock:
            listener, self._listener = self._listener, None
        if listener is not None:
            listener.shutdown()
            listener.server_close()
            listener.cut()

    def open(self) -> None:
        """Take connections again, on the same port. Idempotent."""
        with self._lock:
            if self._listener is None and not self._ended:
                self._listener = _Listener(self, self.port)

    def close(self) -> None:
        """End everything. Idempotent."""
        with self._lock:
            self._ended = True
        self.shut()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def take_rule(self, path: str) -> Rule | None:
        """The one that strikes a request for ``path``, which has struck then."""
        with self._lock:
            for rule in self._rules:
                if rule.path == path:
                    self._rules.remove(rule)
                    self._struck.append((path, rule.act))
                    return rule
        return None

    def forward(
        self, method: str, target: str, headers: Headers, body: bytes
    ) -> tuple[int, Headers, bytes]:
        with self._lock:
            host, port = self._target
        upstream = http.client.HTTPConnection(host, port, timeout=self.upstream_s)
        try:
            upstream.request(method, target, body or None, dict(headers))
            response = upstream.getresponse()
            content = response.read()
            if response.status == http.client.OK:
                with self._lock:
                    self._granted.append(target.partition("?")[0])
            return response.status, response.getheaders(), content
        finally:
            upstream.close()


class _Listener(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64

    def __init__(self, proxy: Proxy, port: int) -> None:
        self.proxy = proxy
        self._open: set[socket.socket] = set()
        try:
            super().__init__((HOST, port), _Handler)
        except OSError as error:
            raise ServerUnreachable(
                f"the proxy's port {HOST}:{port} must be free, it is not: {error}"
            ) from error
        threading.Thread(target=self.serve_forever, args=(POLL_S,), daemon=True).start()

    def cut(self) -> None:
        """Every connection that is open."""
        for connection in tuple(self._open):
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def process_request(self, request: Any, client_address: Any) -> None:
        # On the thread that accepts: once that has ended, ``cut`` knows every connection.
        self._open.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        # No farewell before it is closed: one that does not linger would be no reset.
        self._open.discard(request)
        self.close_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        # Either end went away in the middle: what a proxy is there to show.
        if not isinstance(sys.exception(), OSError | http.client.HTTPException | ValueError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Listener

    def do_POST(self) -> None:
        proxy, body = self.server.proxy, self.rfile.read(int(self.headers["Content-Length"] or 0))
        rule = proxy.take_rule(self.path.partition("?")[0])
        act = rule.act if rule is not None else None
        if rule is not None and act is Act.REWRITE:
            body = _rewritten(body, rule.change)
        if act is Act.FAIL:
            self._answer(500, [("Content-Type", "application/json")], b'{"error": "planted"}')
            return
        # These three answer nothing, and end the connection.
        self.close_connection = act in (Act.RESET, Act.SILENCE, Act.LOSE)
        if act is Act.RESET:
            # no lingering: the kernel sends a reset instead of a farewell
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        elif act is Act.SILENCE:
            self.connection.settimeout(HELD_S)
            self.connection.recv(1)
        else:
            try:
                asked = self.command, self.path, _kept(self.headers.items()), body
                answer = proxy.forward(*asked)
                if act is Act.TWICE:
                    proxy.forward(*asked)
            except OSError as error:
                answer = 502, [], f"the server is not there: {error}".encode()
            if act is not Act.LOSE:
                self._answer(*answer)

    do_GET = do_POST

    def _answer(self, status: int, headers: Headers, body: bytes) -> None:
        self.send_response_only(status)
        for name, value in (*_kept(headers), ("Content-Length", str(len(body)))):
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)


def _kept(headers: Any) -> Headers:
    return [(name, value) for name, value in headers if name.lower() not in HOP]


def _rewritten(body: bytes, change: Mapping[str, Any]) -> bytes:
    content = json.loads(body)
    _replace(content, change)
    return json.dumps(content).encode()


def _replace(value: Any, change: Mapping[str, Any]) -> None:
    if isinstance(value, dict):
        for key in value.keys() & change.keys():
            value[key] = change[key]
        for inner in value.values():
            _replace(inner, change)
