"""HTTP/1.1 to one server from an asyncio loop: h11 over asyncio's streams.

A completion is a request of its own, and rank 0's host pays for each: httpx takes three times the
processor time of this (docs/measurements.md).
"""

import asyncio
import ssl
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import h11
import httpx

READ_BYTES = 64 << 10

KEEPALIVE_S = 1.0
"""Idle connections are dropped after this. uvicorn (so vLLM) closes them after 5 s, which is
httpx's default too: a request that meets the closing connection fails with a read error although
nothing is wrong."""

BROKEN = (OSError, EOFError, h11.ProtocolError)
"""What a connection raises that cannot be made, breaks, or carries no HTTP; a deadline that passes
is an OSError too."""

Headers = list[tuple[str, str]]


class Exchange:
    """One connection, and the answer to the request that it carries."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._http = h11.Connection(h11.CLIENT)
        self.status = 0
        """HTTP status code of the answer."""

    async def begin(self, method: str, target: bytes, headers: Headers, body: bytes) -> None:
        """Send a request, and wait for the head of its answer."""
        if self._http.our_state is h11.DONE:
            self._http.start_next_cycle()
        request = h11.Request(method=method, target=target, headers=headers)
        events = request, h11.Data(data=body), h11.EndOfMessage()
        self._writer.write(b"".join(self._http.send(event) or b"" for event in events))
        # no deadline: the driver's, which all of a call is within
        await self._writer.drain()
        while not isinstance(event := await self._event(), h11.Response):
            pass  # "100 Continue" and its like
        self.status = event.status_code

    async def chunks(self) -> AsyncIterator[bytes]:
        """The body, as it comes."""
        while isinstance(event := await self._event(), h11.Data):
            yield bytes(event.data)

    async def _event(self) -> object:
        """The next event of h11."""
        while (event := self._http.next_event()) is h11.NEED_DATA:
            # no deadline: the driver's, which all of a call is within
            data = await self._reader.read(READ_BYTES)
            if not data and self._http.their_state is h11.SEND_RESPONSE:
                raise EOFError("the server closed the connection without an answer")
            self._http.receive_data(data)
        return event

    @property
    def reusable(self) -> bool:
        """Whether another request may follow: the answer was read to its end, and no end of the
        connection is known. uvicorn closes a connection on which a handler raised, without saying
        so in its answer."""
        ended = self._http.our_state is h11.DONE and self._http.their_state is h11.DONE
        closed = self._reader.at_eof() or self._http.trailing_data != (b"", False)
        return ended and not closed and not httpx.codes.is_server_error(self.status)

    async def close(self) -> None:
        """At once: the server sees that nothing is waited for."""
        self._writer.transport.abort()
        with suppress(OSError):
            # no deadline: an aborted connection is closed in the loop's next round
            await self._writer.wait_closed()


class Connections:
    """Connections to one server, at most ``most``; each carries one request at a time."""

    def __init__(self, base_url: str, tls: ssl.SSLContext, most: int) -> None:
        """``tls``: used if the URL is https."""
        url = httpx.URL(base_url)
        self._tls = tls if url.scheme == "https" else None
        self._host, self._port = url.host, url.port or (443 if self._tls else 80)
        self._name = url.netloc.decode()
        self._path = url.raw_path.partition(b"?")[0].decode().rstrip("/")
        self._room = asyncio.Semaphore(most)
        self._idle: deque[tuple[float, Exchange]] = deque()
        """With the time since when, in that order. The newest is used first, so that what stays
        idle is at the left."""
        self._closed = False

    @asynccontextmanager
    async def ask(
        self, method: str, target: str, headers: Headers, body: bytes
    ) -> AsyncIterator[Exchange]:
        """The answer to one request, once there is room. An answer that is left before its end
        closes its connection. Raises BROKEN."""
        headers = [("Host", self._name), ("Accept-Encoding", "identity"), *headers]
        if body or method != "GET":
            headers.append(("Content-Length", str(len(body))))
        # no deadline: the driver's, which all of a call is within; a call that ends makes room
        async with self._room:
            await self._close_idle(asyncio.get_running_loop().time() - KEEPALIVE_S)
            exchange = await self._connection()
            try:
                await exchange.begin(method, f"{self._path}{target}".encode(), headers, body)
                yield exchange
            finally:
                if exchange.reusable and not self._closed:
                    self._idle.append((asyncio.get_running_loop().time(), exchange))
                else:
                    await exchange.close()

    async def _connection(self) -> Exchange:
        while self._idle:
            exchange = self._idle.pop()[1]
            if exchange.reusable:
                return exchange
            await exchange.close()
        # no deadline: the driver's, which all of a call is within
        reader, writer = await asyncio.open_connection(self._host, self._port, ssl=self._tls)
        return Exchange(reader, writer)

    async def _close_idle(self, since: float) -> None:
        while self._idle and self._idle[0][0] <= since:
            await self._idle.popleft()[1].close()

    async def close(self) -> None:
        """Close what is idle, and the others when their requests are over."""
        self._closed = True
        await self._close_idle(asyncio.get_running_loop().time())
