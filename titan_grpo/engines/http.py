"""HTTP as data: what to ask, and how to read the answer. Whoever owns a connection executes a Call
(drivers.py).

Executing Calls over httpx, blocking and in asyncio. The only place where HTTP errors become
ours."""

import asyncio
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Generic, Protocol, TypeVar
from urllib.parse import urlsplit, urlunsplit

import httpx

from titan_grpo.errors import ServerRefused, ServerUnreachable

T = TypeVar("T")


class HttpRefused(ServerRefused):
    """A non-2xx answer, or an error in the middle of one. ``status`` is its HTTP status code."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True, slots=True)
class Call(Generic[T]):
    """One HTTP request and the pure function that turns its 2xx answer into a value.

    ``parse`` gets the decoded JSON body, or ``None`` for an empty or non-JSON one, and raises
    ServerRefused (through ``want``) where the answer has not the promised form. ``timeout_s`` is
    the deadline in seconds. ``admin``: it goes with the admin key, if there is one.
    """

    method: str
    path: str
    timeout_s: float
    parse: Callable[[Any], T]
    params: Mapping[str, str] = field(default_factory=dict)
    json: Any = None
    admin: bool = False


def want(answer: Any, key: str, kind: type | tuple[type, ...], path: str) -> Any:
    """``answer[key]`` if it has the type ``kind``, else ServerRefused with the path, the key and
    what was there."""
    value = answer.get(key) if isinstance(answer, Mapping) else None
    if isinstance(answer, Mapping) and key in answer and isinstance(value, kind):
        return value
    raise ServerRefused(
        f"{path} must answer with {key!r}, got {str(answer)[:200]!r}: another server or another"
        " version of it?"
    )


def ignore(_answer: Any) -> None:
    """Parse step of calls whose status code says everything."""


__all__ = ["AsyncDriver", "HttpRefused", "Sink", "SyncDriver", "public_url"]
BODY_CHARS = 300

KEEPALIVE_S = 1.0
"""Idle connections are dropped after this. uvicorn (so vLLM) closes them after 5 s, which is
httpx's default too: a request that meets the closing connection fails with a read error although
nothing is wrong (met in practice on a busy host)."""


class Sink(Protocol):
    """Who takes a streamed answer."""

    def take(self, chunk: bytes) -> None:
        """The next bytes of its body; raises for what it can not be."""

    def end(self) -> None:
        """The body ended; raises likewise."""

    @property
    def whole(self) -> bool:
        """Whether nothing of the answer is missing."""


def public_url(url: str) -> str:
    """The URL without user, password, query and fragment, for messages and logs."""
    parts = urlsplit(url)
    return urlunsplit(
        (parts.scheme, parts.netloc.rpartition("@")[2], parts.path.rstrip("/"), "", "")
    )


class _Keys:
    """Which key a call goes with. A server with an admin key takes that one alone for admin calls,
    and refuses it elsewhere."""

    def __init__(self, api_key: str, admin_key: str) -> None:
        self._api_key, self._admin_key = api_key, admin_key

    def request(self, call: Call[Any], timeout_s: float | None = None) -> dict[str, Any]:
        """Arguments of httpx for a call; without a deadline of its own where the loop keeps it."""
        key = self._admin_key if call.admin and self._admin_key else self._api_key
        return {
            "method": call.method,
            "url": call.path,
            "params": dict(call.params),
            "json": call.json,
            "timeout": timeout_s,
            "headers": {"Authorization": f"Bearer {key}"} if key else {},
        }


def _limits(connections: int) -> httpx.Limits:
    return httpx.Limits(
        max_connections=connections,
        max_keepalive_connections=connections,
        keepalive_expiry=KEEPALIVE_S,
    )


def _finish(call: Call[T], url: str, response: httpx.Response) -> T:
    _succeeded(call, url, response)
    return call.parse(_decode(response))


def _succeeded(call: Call[Any], url: str, response: httpx.Response) -> None:
    if not response.is_success:
        body = response.text[:BODY_CHARS]
        raise HttpRefused(
            f"{url}: {call.method} {call.path} was refused with {response.status_code}: {body}",
            response.status_code,
        )


def _decode(response: httpx.Response) -> Any:
    try:
        return response.json()
    except (json.JSONDecodeError, UnicodeDecodeError):
        return None


def _unreachable(
    call: Call[Any], url: str, error: Exception, began: bool = False
) -> ServerUnreachable:
    cause = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    if began:
        return ServerUnreachable(
            f"{url}: {call.method} {call.path} broke off, or was silent for {call.timeout_s:g} s"
            f" ({cause})"
        )
    return ServerUnreachable(
        f"{url}: {call.method} {call.path} got no answer within {call.timeout_s:g} s ({cause})"
    )


class SyncDriver:
    """Calls to one server from a thread that may block. Not for sharing between threads.

    The deadline is per network operation (connect, send, wait for bytes), which for one-piece
    answers is the whole call. Proxy settings of the environment are not used: servers are addressed
    directly.
    """

    def __init__(self, base_url: str, api_key: str = "", admin_key: str = "") -> None:
        """``admin_key``: what calls with ``admin`` go with; empty: ``api_key`` as for all
        others."""
        self.url = public_url(base_url)
        self._base_url, self._keys = base_url, _Keys(api_key, admin_key)
        self._client = self._connect()

    def _connect(self) -> httpx.Client:
        return httpx.Client(base_url=self._base_url, limits=_limits(4), trust_env=False)

    def run(self, call: Call[T]) -> T:
        """Execute. Raises ServerUnreachable (no answer), HttpRefused (not 2xx), ServerRefused
        (unreadable answer)."""
        try:
            response = self._client.request(**self._keys.request(call, call.timeout_s))
        except httpx.HTTPError as error:
            raise _unreachable(call, self.url, error) from error
        if response.is_server_error:
            # uvicorn closes a connection on which a handler raised, without saying so in its
            # answer: the next request on it would fail with a read error although the server is
            # there
            self._client.close()
            self._client = self._connect()
        return _finish(call, self.url, response)

    def close(self) -> None:
        """Close the connections. Idempotent."""
        self._client.close()

    def __enter__(self) -> "SyncDriver":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class AsyncDriver:
    """Calls to one server from an asyncio loop, many at once (at most ``max_connections`` in
    flight, the others wait)."""

    def __init__(
        self, base_url: str, api_key: str = "", max_connections: int = 64, admin_key: str = ""
    ) -> None:
        """``admin_key``: as for SyncDriver."""
        self.url = public_url(base_url)
        self._keys = _Keys(api_key, admin_key)
        self._client = httpx.AsyncClient(
            base_url=base_url, limits=_limits(max_connections), trust_env=False
        )

    async def run(self, call: Call[T]) -> T:
        """Execute within ``call.timeout_s`` in all. Raises as SyncDriver.run does; cancelling it
        drops the connection, which makes the engine abort the request."""
        try:
            async with asyncio.timeout(call.timeout_s):
                response = await self._client.request(**self._keys.request(call))
        except (httpx.HTTPError, TimeoutError) as error:
            raise _unreachable(call, self.url, error) from error
        return _finish(call, self.url, response)

    async def stream(self, call: Call[Any], sink: Sink) -> None:
        """Execute, and hand the body of a 2xx answer to ``sink`` as it comes.

        ``call.timeout_s`` bounds the time to the first byte and each silence after it, not the
        whole. Raises as ``run`` does, ServerUnreachable too where the body ends before the sink has
        all; once it has, nothing is wrong any more.
        """
        began, clock = False, asyncio.get_running_loop().time
        try:
            async with (
                asyncio.timeout(call.timeout_s) as silence,
                self._client.stream(**self._keys.request(call)) as response,
            ):
                if not response.is_success:
                    await response.aread()
                    _succeeded(call, self.url, response)
                async for chunk in response.aiter_bytes():
                    began = True
                    silence.reschedule(clock() + call.timeout_s)
                    sink.take(chunk)
            sink.end()
        except (httpx.HTTPError, TimeoutError) as error:
            if not sink.whole:
                raise _unreachable(call, self.url, error, began) from error
        if not sink.whole:
            raise _unreachable(call, self.url, EOFError("the answer has no end"), began)

    async def close(self) -> None:
        """Close the connections. Idempotent."""
        await self._client.aclose()
