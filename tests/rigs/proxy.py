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
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from titan_grpo.errors import ServerUnreachable

UPSTREAM_S = 60.0
"""Deadline of the server's answer, in seconds."""

HELD_S = 600.0
"""Longest silence of a request that is never answered, in seconds; the caller's own deadline ends
it."""

HEAD_LIMIT = 64 << 10
HOP = frozenset({"connection", "keep-alive", "transfer-encoding", "host", "content-length"})
"""Headers that belong to one connection."""


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


@dataclass(frozen=True, slots=True)
class Request:
    """One request as it was read. ``path`` is without the query."""

    method: str
    target: str
    headers: tuple[tuple[str, str], ...]
    body: bytes

    @property
    def path(self) -> str:
        """The target without its query."""
        return self.target.partition("?")[0]


class Proxy:
    """Forwards to ``target`` whatever no rule strikes. A context manager; any thread may script
    it."""

    def __init__(self, target: tuple[str, int], host: str = "127.0.0.1") -> None:
        self._lock = threading.Lock()
        self._target = target
        self._host = host
        self._rules: list[Rule] = []
        self._struck: list[tuple[str, Act]] = []
        self._granted: list[str] = []
        self._open: set[socket.socket] = set()
        self._ended = threading.Event()
        self._listener: socket.socket | None = _listen(host, 0)
        self.port = int(self._listener.getsockname()[1])
        self.url = f"http://{host}:{self.port}"
        self._accept(self._listener)

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
            self._target = target
            connections = list(self._open)
        for connection in connections:
            _shut(connection)

    def shut(self) -> None:
        """Refuse connections, and cut those that are open, until ``open``. Idempotent."""
        with self._lock:
            listener, self._listener = self._listener, None
            connections = list(self._open)
        if listener is not None:
            _shut(listener)
            listener.close()
        for connection in connections:
            _shut(connection)

    def open(self) -> None:
        """Take connections again, on the same port. Idempotent."""
        with self._lock:
            if self._listener is not None or self._ended.is_set():
                return
            self._listener = _listen(self._host, self.port)
            listener = self._listener
        self._accept(listener)

    def close(self) -> None:
        """End everything. Idempotent."""
        self._ended.set()
        self.shut()

    def __enter__(self) -> "Proxy":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _accept(self, listener: socket.socket) -> None:
        threading.Thread(
            target=self._accept_loop, args=(listener,), name=f"proxy {self.port}", daemon=True
        ).start()

    def _accept_loop(self, listener: socket.socket) -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return  # shut
            with self._lock:
                taken = self._listener is listener
                if taken:
                    self._open.add(connection)
            if taken:
                threading.Thread(
                    target=self._serve, args=(connection,), name=f"proxy {self.port}", daemon=True
                ).start()
            else:
                connection.close()

    def _serve(self, connection: socket.socket) -> None:
        try:
            with connection, connection.makefile("rb") as reader:
                while (request := _read(reader)) is not None and self._handle(connection, request):
                    pass
        except (OSError, http.client.HTTPException, ValueError):
            pass  # either end went away in the middle: what a proxy is there to show
        finally:
            with self._lock:
                self._open.discard(connection)

    def _rule(self, path: str) -> Rule | None:
        with self._lock:
            for rule in self._rules:
                if rule.path == path:
                    self._rules.remove(rule)
                    self._struck.append((path, rule.act))
                    return rule
        return None

    def _handle(self, connection: socket.socket, request: Request) -> bool:
        """Whether the connection goes on."""
        rule = self._rule(request.path)
        act = rule.act if rule is not None else None
        if rule is not None and act is Act.REWRITE:
            request = _rewritten(request, rule.change)
        if act is Act.FAIL:
            connection.sendall(
                _answer(500, (("Content-Type", "application/json"),), b'{"error": "planted"}')
            )
            return True
        if act is Act.RESET:
            # no lingering: the kernel sends a reset instead of a farewell
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            return False
        if act is Act.SILENCE:
            connection.settimeout(HELD_S)
            connection.recv(1)
            return False
        try:
            status, headers, body = self._forward(request)
            if act is Act.TWICE:
                self._forward(request)
        except OSError as error:
            connection.sendall(_answer(502, (), f"the server is not there: {error}".encode()))
            return False
        if act is Act.LOSE:
            return False
        connection.sendall(_answer(status, headers, body))
        return True

    def _forward(self, request: Request) -> tuple[int, tuple[tuple[str, str], ...], bytes]:
        with self._lock:
            host, port = self._target
        upstream = http.client.HTTPConnection(host, port, timeout=UPSTREAM_S)
        try:
            upstream.request(
                request.method, request.target, request.body or None, dict(request.headers)
            )
            response = upstream.getresponse()
            body = response.read()
            if response.status == http.client.OK:
                with self._lock:
                    self._granted.append(request.path)
            return response.status, tuple(response.getheaders()), body
        finally:
            upstream.close()


def _listen(host: str, port: int) -> socket.socket:
    try:
        return socket.create_server((host, port), backlog=64)
    except OSError as error:
        raise ServerUnreachable(
            f"the proxy's port {host}:{port} must be free, it is not: {error}"
        ) from error


def _shut(end: socket.socket) -> None:
    with suppress(OSError):
        end.shutdown(socket.SHUT_RDWR)


def _read(reader: Any) -> Request | None:
    """The next request of a connection; None at its end."""
    line = reader.readline(HEAD_LIMIT)
    if not line.strip():
        return None
    method, target, _ = line.decode("latin-1").split(" ", 2)
    headers = []
    while (line := reader.readline(HEAD_LIMIT).decode("latin-1").strip()) != "":
        name, _, value = line.partition(":")
        headers.append((name.strip(), value.strip()))
    length = next((int(value) for name, value in headers if name.lower() == "content-length"), 0)
    kept = tuple((name, value) for name, value in headers if name.lower() not in HOP)
    return Request(method, target, kept, reader.read(length) if length else b"")


def _answer(status: int, headers: tuple[tuple[str, str], ...], body: bytes) -> bytes:
    reason = http.client.responses.get(status, "unknown")
    lines = [f"HTTP/1.1 {status} {reason}"]
    lines += [f"{name}: {value}" for name, value in headers if name.lower() not in HOP]
    return "\r\n".join([*lines, f"Content-Length: {len(body)}", "", ""]).encode("latin-1") + body


def _rewritten(request: Request, change: Mapping[str, Any]) -> Request:
    body = json.loads(request.body)
    _replace(body, change)
    return Request(request.method, request.target, request.headers, json.dumps(body).encode())


def _replace(value: Any, change: Mapping[str, Any]) -> None:
    if isinstance(value, dict):
        for key in value.keys() & change.keys():
            value[key] = change[key]
        for inner in value.values():
            _replace(inner, change)
