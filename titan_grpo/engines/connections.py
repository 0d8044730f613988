"""HTTP/1.1 to one server from an asyncio loop: h11 over asyncio's streams.

Rank 0's host makes one request per completion: httpx takes three times the processor time of this
(docs/measurements.md).
"""

import asyncio
import ssl
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import h11

from titan_grpo.config.rollout import PORTS

READ_BYTES = 64 << 10

KEEPALIVE_S = 1.0
"""Seconds until an idle connection is closed. uvicorn (so vLLM) closes it after 5 s: a request sent
at that moment would fail with a read error on a healthy server."""

BROKEN = (OSError, EOFError, h11.ProtocolError)
"""Exceptions of a connection that cannot be made, breaks, or carries no HTTP. A timeout is an
OSError too."""

Headers = list[tuple[str, str]]


class Exchange:
    """One connection, and the answer to its current request."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._http = h11.Connection(h11.CLIENT)
        self.status = 0
        """HTTP status code of the answer."""
        self.length = 0
        """Bytes of the answer's body; 0 if it does not say."""

    async def begin(self, method: str, target: bytes, headers: Headers, body: bytes) -> None:
        """Send a request, and wait for the answer's head."""
        if self._http.our_state is h11.DONE:
            self._http.start_next_cycle()
        request = h11.Request(method=method, target=target, headers=headers)
        events = request, h11.Data(data=body), h11.EndOfMessage()
        self._writer.write(b"".join(self._http.send(event) or b"" for event in events))
        # no deadline: the driver's holds for the whole call
        await self._writer.drain()
        while not isinstance(event := await self._event(), h11.Response):
            pass  # informational, such as "100 Continue"
        self.status = event.status_code
        self.length = int(dict(event.headers).get(b"content-length", 0))

    async def chunks(self) -> AsyncIterator[bytes]:
        """Yield the body as it arrives."""
        while isinstance(event := await self._event(), h11.Data):
            yield bytes(event.data)

    async def _event(self) -> object:
        while (event := self._http.next_event()) is h11.NEED_DATA:
            # no deadline: the driver's holds for the whole call
            data = await self._reader.read(READ_BYTES)
            if not data and self._http.their_state is h11.SEND_RESPONSE:
                raise EOFError("the server closed the connection without an answer")
            self._http.receive_data(data)
        return event

    @property
    def reusable(self) -> bool:
        """Whether another request may follow: the answer was read to its end, and the connection is
        not known to be closed. After a server error it is not reusable: uvicorn closes a connection
        on which a handler raised, without saying so in its answer."""
        ended = self._http.our_state is h11.DONE and self._http.their_state is h11.DONE
        closed = self._reader.at_eof() or self._http.trailing_data != (b"", False)
        return ended and not closed and self.status < 500

    async def close(self) -> None:
        """Abort the connection, so that the server cancels the request."""
        self._writer.transport.abort()
        with suppress(OSError):
            # no deadline: an aborted connection is closed in the loop's next round
            await self._writer.wait_closed()


class Connections:
    """Pool of at most ``most`` connections to one server; each carries one request at a time."""

    def __init__(self, host: str, port: int, tls: ssl.SSLContext | None, most: int) -> None:
        """``tls``: for https; None for http."""
        self._tls = tls
        self._host, self._port = host, port
        name = f"[{host}]" if ":" in host else host.encode("idna").decode()
        self._name = name if port == PORTS["https" if tls else "http"] else f"{name}:{port}"
        self.room = asyncio.Semaphore(most)
        """Hold it for each ``ask``, outside of the request's deadline."""
        self._idle: deque[tuple[float, Exchange]] = deque()
        """Idle connections and the times of their release, oldest left. The newest is used first,
        so that those at the left expire."""
        self._closed = False

    @asynccontextmanager
    async def ask(
        self, method: str, target: str, headers: Headers, body: bytes
    ) -> AsyncIterator[Exchange]:
        """Send a request on a free connection and yield the answer. Leaving the context before the
        answer's end closes the connection. Needs ``room``. Raises BROKEN."""
        headers = [("Host", self._name), ("Accept-Encoding", "identity"), *headers]
        if body or method != "GET":
            headers.append(("Content-Length", str(len(body))))
        await self._close_idle(asyncio.get_running_loop().time() - KEEPALIVE_S)
        exchange = await self._connection()
        try:
            await exchange.begin(method, target.encode(), headers, body)
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
        # no deadline: the driver's holds for the whole call
        reader, writer = await asyncio.open_connection(self._host, self._port, ssl=self._tls)
        return Exchange(reader, writer)

    async def _close_idle(self, since: float) -> None:
        while self._idle and self._idle[0][0] <= since:
            await self._idle.popleft()[1].close()

    async def close(self) -> None:
        """Close idle connections now, the others when their requests end."""
        self._closed = True
        await self._close_idle(asyncio.get_running_loop().time())
