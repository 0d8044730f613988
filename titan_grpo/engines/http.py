"""HTTP calls as data, and the two drivers that execute them: blocking, and in asyncio.

Only this module turns HTTP errors into the package's."""

import asyncio
import functools
import io
import os
import socket
import ssl
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from http import HTTPStatus
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from typing import Any, Generic, Protocol, TypeVar, cast
from urllib.parse import quote, urlencode, urlsplit, urlunsplit

import msgspec

from titan_grpo.config.rollout import PORTS
from titan_grpo.engines.connections import BROKEN, KEEPALIVE_S, Connections, Exchange
from titan_grpo.errors import (
    NOT_JSON,
    ConfigError,
    PeerError,
    ServerRefused,
    ServerUnfit,
    ServerUnreachable,
)
from titan_grpo.subprocesses import readable

T = TypeVar("T")

BODY_CHARS = 300

SLOWEST_BODY = 1 << 20
"""Bytes in a second of the slowest body, of a request or an answer, that a call waits for past its
deadline."""

NOT_RECOMPUTED = (
    'older weights would go on in it, so nothing is committed; weight_sync.kv_after_update = "keep"'
    " allows that"
)
"""End of a refusal of ``drop_kv``."""

CA_VARIABLES = ("SSL_CERT_FILE", "SSL_CERT_DIR")
"""Environment variables with the certificate authorities for https, in place of the public ones."""

PATH_CHARACTERS = "/%:@!$&'()*+,;=~"
"""Characters of a base path that are sent as they are (RFC 3986), and the sign of those that the
user has quoted."""


UNREADABLE = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)
"""Exceptions of a parser that expects another form: a number in place of an object, say."""


class HttpRefused(ServerRefused):
    """A non-2xx answer, or an error in the middle of an answer. ``status``: HTTP status code; 502
    too for a 2xx answer without the JSON that the call needs (a proxy's page)."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class KeyRefused(HttpRefused, ServerUnfit):
    """Answer 401 or 403: the key is missing or wrong."""


class TlsFailed(ServerUnreachable):
    """No https with this server: its certificate is not trusted, or it speaks plain HTTP."""


@dataclass(frozen=True, slots=True)
class Call(Generic[T]):
    """One HTTP request and the pure function that turns its 2xx answer into a value.

    ``parse`` gets the decoded JSON body, or ``None`` for an empty or non-JSON one, and raises
    ServerRefused (through ``want``) if the answer has another form. Call ``read`` instead of it:
    what ``parse`` does not foresee is the server's fault too. ``timeout_s``: the deadline in
    seconds, without the time for a large body (SLOWEST_BODY). ``admin``: send the admin key, if
    there is one. ``key_from``: settings that name the variables with the key.
    """

    method: str
    path: str
    timeout_s: float
    parse: Callable[[Any], T]
    params: Mapping[str, str] = field(default_factory=dict)
    json: Any = None
    admin: bool = False
    key_from: str = (
        "rollout.api_key_env (and rollout.admin_key_env for an SGLang with an admin key)"
    )

    def read(self, answer: Any) -> T:
        """Return the value of an answer. Raises ServerRefused if it has another form."""
        try:
            return self.parse(answer)
        except UNREADABLE as error:
            # Without the answer, which may have the server's keys.
            raise ServerRefused(
                f"{self.path} must answer in the form of its engine ({error!r:.200}): another"
                " server or another version of it?"
            ) from error


def want(
    answer: Any, key: str, kind: type | tuple[type, ...], path: str, secret: bool = False
) -> Any:
    """Return ``answer[key]``. Raises ServerRefused if it is missing or not of type ``kind``.
    ``secret``: the error must not show the answer, which contains the server's keys."""
    if isinstance(answer, Mapping) and key in answer and isinstance(answer[key], kind):
        return answer[key]
    got = "" if secret else f", got {str(answer)[:200]!r}"
    raise ServerRefused(
        f"{path} must answer with {key!r}{got}: another server or another version of it?"
    )


def ignore(_answer: Any) -> None:
    """Parse nothing: for calls whose status code is the whole answer."""


class Sink(Protocol):
    """Consumer of a streamed answer."""

    def take(self, chunk: bytes) -> bool:
        """Take the next bytes of the body; return whether they are of the answer, and not only keep
        the connection open. Raises ServerRefused if they are invalid."""

    @property
    def whole(self) -> bool:
        """Whether the answer is complete."""


def public_url(url: str) -> str:
    """Return the URL without user, password, query and fragment, for messages and logs."""
    parts = urlsplit(url)
    host = parts.netloc.rpartition("@")[2]
    return urlunsplit((parts.scheme, host, parts.path.rstrip("/"), "", ""))


@functools.cache
def _tls(ca_file: str | None, ca_path: str | None) -> ssl.SSLContext:
    """Return one context for all clients: reading the authorities takes tens of milliseconds."""
    if ca_file is None and ca_path is None:
        import httpx  # only here: the import takes longer than all else of this module

        return httpx.create_ssl_context(trust_env=False)
    try:
        return ssl.create_default_context(cafile=ca_file, capath=ca_path)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(
            f"{' and '.join(CA_VARIABLES)} must name certificate authorities in PEM format, got"
            f" {ca_file!r} and {ca_path!r}: {error}"
        ) from error


class _Driver:
    """Common part of both drivers. Servers are addressed directly: the environment's proxy settings
    are ignored."""

    def __init__(self, base_url: str, api_key: str, admin_key: str) -> None:
        self.url, at = public_url(base_url), urlsplit(base_url)
        self._api_key, self._admin_key = api_key, admin_key
        # Not None: http.client would look for a port in an IPv6 address.
        self._host, self._port = at.hostname or "", at.port or PORTS[at.scheme]
        self._path = quote(at.path.rstrip("/"), safe=PATH_CHARACTERS)
        # An empty variable is one that a container's definition leaves out.
        authorities = [os.environ.get(name) or None for name in CA_VARIABLES]
        self._tls = _tls(*authorities) if at.scheme == "https" else None

    def _request(self, call: Call[Any]) -> tuple[str, dict[str, str], bytes | None, float]:
        """Return the call's target, headers, body, and deadline in seconds."""
        target = self._path + call.path + (f"?{urlencode(call.params)}" if call.params else "")
        # A server with an admin key accepts only it for admin calls, and refuses it elsewhere.
        key = self._admin_key if call.admin and self._admin_key else self._api_key
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        if call.json is None:
            return target, headers, None, call.timeout_s
        headers["Content-Type"] = "application/json"
        body = msgspec.json.encode(call.json)
        return target, headers, body, call.timeout_s + _body_s(len(body))

    def _check(self, call: Call[Any], status: int, body: bytes) -> None:
        if not 200 <= status < 300:
            kind = KeyRefused if status in (401, 403) else HttpRefused
            text = " ".join(body.decode(errors="replace")[:BODY_CHARS].split())
            if status == 401:
                text += f"; set {call.key_from} to the variable with its key, and export that"
            raise kind(
                f"{self.url}: {call.method} {call.path} was refused with {status}: {text}", status
            )

    def _value(self, call: Call[T], status: int, body: bytes) -> T:
        self._check(call, status, body)
        try:
            answer = msgspec.json.decode(body)
        except NOT_JSON:
            with suppress(PeerError):
                return call.read(None)
            raise HttpRefused(
                f"{self.url}: {call.method} {call.path} was answered with {status} and no JSON: by"
                " a proxy whose server is away, or by another server or another version of it?",
                HTTPStatus.BAD_GATEWAY,
            ) from None
        with self._named():
            return call.read(answer)

    @contextmanager
    def _named(self) -> Iterator[None]:
        """Name the server in the refusal of its answer."""
        try:
            yield
        except ServerRefused as refusal:
            refusal.args = (f"{self.url}: {refusal}",)
            raise

    def _unreachable(
        self, call: Call[Any], error: Exception, began: bool = False
    ) -> ServerUnreachable:
        said = " ".join(str(error).split())
        cause = f"{type(error).__name__}: {said}" if said else type(error).__name__
        what = "broke off" if began else "failed"
        if isinstance(error, TimeoutError):
            what = "was silent for" if began else "got no answer within"
            what += f" {call.timeout_s:g} s"
        kind = TlsFailed if isinstance(error, ssl.SSLError) else ServerUnreachable
        return kind(f"{self.url}: {call.method} {call.path} {what} ({cause})")


class SyncDriver(_Driver):
    """Blocking calls to one server.

    The deadline holds for each of: connect, send, the whole answer. A large request or answer (a
    group of long completions from a rollout service) may take longer, a second per MiB. The
    standard library's client carries them: a third of httpx's processor time
    (docs/measurements.md), in calls that are part of each pause.
    """

    def __init__(
        self,
        base_url: str,
        api_key: str = "",
        admin_key: str = "",
        *,
        calling: Callable[[], object] = lambda: None,
    ) -> None:
        """``admin_key``: for calls with ``admin``; if empty, they use ``api_key`` too.
        ``calling``: callback before each request. Raises ConfigError if SSL_CERT_FILE or
        SSL_CERT_DIR is unusable."""
        super().__init__(base_url, api_key, admin_key)
        self._calling = calling
        self._idle: list[tuple[float, HTTPConnection]] = []
        """Idle connections and the times of their release. One, unless two threads call."""

    def run(self, call: Call[T]) -> T:
        """Execute a call. Raises ServerUnreachable (no answer), HttpRefused (not 2xx, or no JSON),
        ServerRefused (unreadable answer)."""
        response, body = self._answer(call)
        return self._value(call, response.status, body)

    def header(self, call: Call[Any], name: str) -> str:
        """Return a header of the answer, of any status; empty without it. Raises
        ServerUnreachable."""
        return self._answer(call)[0].headers.get(name, "")

    def _answer(self, call: Call[Any]) -> tuple[HTTPResponse, bytes]:
        self._calling()
        target, headers, body, within_s = self._request(call)
        connection, reusable = self._connection(call.timeout_s), False
        try:
            if connection.sock is None:
                connection.connect()
            connection.sock.settimeout(within_s)
            connection.request(call.method, target, body, headers)
            # Again: the server may have the end of the body still to read.
            answer = functools.partial(_Response, within_s)
            cast(Any, connection).response_class = answer
            response = connection.getresponse()
            content = _body(response)
            # Not after a server error: uvicorn closes a connection on which a handler raised,
            # without saying so in its answer.
            reusable = not response.will_close and response.status < 500
        except (OSError, HTTPException) as error:
            raise self._unreachable(call, error) from error
        finally:
            if reusable:
                self._idle.append((time.monotonic(), connection))
            else:
                connection.close()
        return response, content

    def _connection(self, timeout_s: float) -> HTTPConnection:
        """Return an idle connection that the server has not closed, else a new one that is still
        to be opened."""
        # Not "while self._idle": another thread may take the last one in between.
        with suppress(IndexError):
            while True:
                since, connection = self._idle.pop()
                kept = time.monotonic() - since < KEEPALIVE_S
                # An idle connection has nothing to read but its end.
                if kept and not readable(0.0, connection.sock.fileno()):
                    return connection
                connection.close()
        if self._tls is not None:
            tls = self._tls
            return HTTPSConnection(self._host, self._port, timeout=timeout_s, context=tls)
        return HTTPConnection(self._host, self._port, timeout=timeout_s)

    def close(self) -> None:
        """Close the connections. Idempotent."""
        with suppress(IndexError):
            while True:
                self._idle.pop()[1].close()

    def __enter__(self) -> "SyncDriver":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _body_s(nbytes: int) -> float:
    """Return how long a body may take, in seconds. A peer may claim more bytes than a float has."""
    return min(nbytes, sys.maxsize) / SLOWEST_BODY


class _Until(io.RawIOBase):
    """What comes through a connection until ``deadline`` (monotonic clock), each byte within
    ``longest_s`` seconds."""

    def __init__(self, sock: socket.socket, longest_s: float) -> None:
        self._sock, self._longest_s, self._late = sock, longest_s, False
        self.deadline = time.monotonic() + longest_s
        self._raw = sock.makefile("rb", buffering=0)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        # Before each read: the socket's own timeout begins anew with every byte, and a server that
        # sends few at a time could hold a lane for ever.
        left_s = self.deadline - time.monotonic()
        if left_s <= 0 and self._late:
            raise TimeoutError("timed out")
        # One look past the deadline: all may have come while this process stood still.
        self._late = left_s <= 0
        # Zero would mean not to wait, with another error.
        self._sock.settimeout(max(min(left_s, self._longest_s), 1e-3))
        return self._raw.readinto(buffer)

    def close(self) -> None:
        self._raw.close()
        super().close()


class _Response(HTTPResponse):
    """An answer that must be whole within ``within_s`` seconds, but for SLOWEST_BODY."""

    def __init__(self, within_s: float, sock: socket.socket, *args: Any, **kwargs: Any) -> None:
        super().__init__(sock, *args, **kwargs)
        self.fp.close()
        self._until = _Until(sock, within_s)
        self.fp = io.BufferedReader(self._until)

    def begin(self) -> None:
        super().begin()
        self._until.deadline += _body_s(self.length or 0)


def _body(response: HTTPResponse) -> bytes:
    """Read the body of an answer. Raises HTTPException for a length that no body has."""
    try:
        return response.read()
    except (MemoryError, OverflowError, ValueError) as error:
        raise HTTPException(f"the length of its body cannot be: {error!r}") from error


@dataclass(frozen=True, slots=True)
class ServerAccess:
    """Address and keys of a server. ``admin_key``: empty if the API key serves for all calls (vLLM
    has no other).

    ``deadline_s``: of each call; ``load_deadline_s``: of the load, if it waits for a transfer too;
    both in seconds. ``calling``: callback before each request, on its thread; must not block.
    """

    url: str
    deadline_s: float
    load_deadline_s: float | None = None
    api_key: str = field(default="", repr=False)
    admin_key: str = field(default="", repr=False)
    calling: Callable[[], object] = field(default=lambda: None, repr=False, kw_only=True)

    def driver(self) -> SyncDriver:
        """Return a driver with connections of its own."""
        return SyncDriver(self.url, self.api_key, self.admin_key, calling=self.calling)


class AsyncDriver(_Driver):
    """Concurrent calls to one server from an asyncio loop. At most ``max_connections`` are in
    flight; further calls wait for those, which is no time of their own deadline. No call is an
    admin's."""

    def __init__(self, base_url: str, api_key: str = "", max_connections: int = 64) -> None:
        super().__init__(base_url, api_key, "")
        self._connections = Connections(self._host, self._port, self._tls, max_connections)

    async def run(self, call: Call[T]) -> T:
        """Execute a call within ``call.timeout_s`` in total, but for a large request or answer, as
        SyncDriver does. Raises as its ``run`` does.
        Cancelling it closes the connection, so that the engine aborts the request."""
        within_s, asked = self._ask(call)
        parts, clock = list[bytes](), asyncio.get_running_loop().time
        try:
            # no deadline: each call that ends makes room, and its time or its silences are bounded
            async with self._connections.room, asyncio.timeout(within_s) as left, asked as answer:
                until = (left.when() or 0.0) + _body_s(answer.length)
                async for chunk in answer.chunks():
                    parts.append(chunk)
                    left.reschedule(min(until, clock() + within_s))
        except BROKEN as error:
            raise self._unreachable(call, error) from error
        return self._value(call, answer.status, b"".join(parts))

    def _ask(self, call: Call[Any]) -> tuple[float, AbstractAsyncContextManager[Exchange]]:
        """Return the call's deadline in seconds, and the call, which is still to be entered."""
        target, headers, body, within_s = self._request(call)
        ask = self._connections.ask(call.method, target, list(headers.items()), body or b"")
        return within_s, ask

    async def stream(self, call: Call[Any], sink: Sink) -> None:
        """Execute a call, and hand the body of a 2xx answer to ``sink`` as it comes.

        ``call.timeout_s`` bounds the time to the answer's first byte and each silence after it, not
        the whole. Raises as ``run`` does, and ServerUnreachable if the body ends before the sink is
        whole. Connection errors after that are ignored.
        """
        began, clock = False, asyncio.get_running_loop().time
        within_s, asked = self._ask(call)
        try:
            # no deadline: as in ``run``
            async with (
                self._connections.room,
                asyncio.timeout(within_s) as silence,
                asked as answer,
            ):
                if not 200 <= answer.status < 300:
                    body = b"".join([chunk async for chunk in answer.chunks()])
                    self._check(call, answer.status, body)
                async for chunk in answer.chunks():
                    with self._named():
                        if not sink.take(chunk):
                            continue
                    began = True
                    silence.reschedule(clock() + call.timeout_s)
        except BROKEN as error:
            if not sink.whole:
                raise self._unreachable(call, error, began) from error
        if not sink.whole:
            raise self._unreachable(call, EOFError("the answer has no end"), began)

    async def close(self) -> None:
        """Close the connections. Idempotent."""
        await self._connections.close()
