"""Communication over Unix sockets: a pipe for calls between two processes of one program, a channel
of JSON lines, and requests to a server.

A pipe joins a rank and its sync process, and rank 0 and its rollout process; a channel joins an
engine and its receiver process. A server runs in SGLang's schedulers, which SGLang's own HTTP
routes reach only while generation is idle, and in a running trainer (``titan-grpo servers``). It
serves only the same user and root.
"""

import itertools
import json
import logging
import os
import queue
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from math import inf
from multiprocessing.connection import Connection
from operator import attrgetter
from typing import Any

from titan_grpo.errors import (
    CROSSING,
    NOT_JSON,
    DataError,
    PeerError,
    ServerRefused,
    ServerUnreachable,
    TitanGrpoError,
    kind_of,
)

BATCH = 256
"""Most calls in one message."""

ANSWERED = "<answered>"
"""Method name of a message with the result of an ``ask``."""

SIGN = "<sign>"
"""Method name of a message whose arrival says that its sender reads. Its argument: whether the
sender wants one back."""

SILENT_S = 60.0
"""Seconds without a message after which a process beside a rank is asked for a sign."""

PIECES = 10
"""Pieces of a wait for a sign."""

READ_BYTES = 1 << 16

GREET_S = 5.0
"""Seconds to wait for a client's request, and for it to take the answer."""

REST_S = 1.0
"""Back-off after accept() fails (EMFILE), in seconds."""

CREDENTIALS = struct.Struct("3i")
"""SO_PEERCRED: pid, uid and gid of the other end."""

Handler = Callable[[dict[str, Any]], Mapping[str, Any]]
"""Function that answers one request. Its PeerError or DataError becomes the client's refusal."""

log = logging.getLogger(__name__)

_Call = tuple[str, tuple[Any, ...]]


class Pipe:
    """One end of a pipe between two processes: ordered calls of the other end's methods, of any
    size. They are pickled: both ends belong to one program and one user."""

    def __init__(
        self,
        sock: socket.socket,
        target: object,
        sign: Callable[[Callable[[], None]], object] = lambda give: give(),
    ) -> None:
        """Take the socket over; send nothing before ``start``. ``target``: object whose methods the
        other end calls, one after the other; they must not block. ``sign``: called when the other
        end asks for a sign, with the function that gives it: where another thread than the
        receiving one does the work, have that one call it."""
        self._connection: Connection[Any, Any] = Connection(sock.detach())
        self._target, self._sign = target, sign
        self._out: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._numbers = itertools.count()
        self._asked: dict[int, Future[Any]] = {}

    def post(self, method: str, *arguments: Any) -> None:
        """Queue a call of ``method``, or ``attribute.method``, of the other end's target. Never
        waits; for any thread."""
        self._out.put((method, arguments))

    def ask(self, method: str, *arguments: Any) -> Any:
        """Call ``request`` of the other end's target, and wait for the result. For any thread but
        the receiving one, which would wait for itself."""
        number, future = next(self._numbers), Future[Any]()
        self._asked[number] = future  # first: the answer may arrive before post() returns
        self.post("request", number, method, *arguments)
        # no deadline: the call has one at the other end; if that process ends, this one ends too
        return future.result()

    def _answered(self, number: int, value: Any, error: TitanGrpoError | None) -> None:
        future = self._asked.pop(number)
        if error is None:
            future.set_result(value)
        else:
            future.set_exception(error)

    def answer(self, number: int, work: Callable[[], Any]) -> None:
        """Post the result of ``work`` for the other end's ``ask`` (a thread's main function)."""
        value, error = None, None
        try:
            value = work()
        except Exception as raised:  # noqa: BLE001 - top of a thread: `ask` must not hang
            text = str(raised) if isinstance(raised, TitanGrpoError) else repr(raised)
            error = CROSSING[kind_of(raised)](text)
        self.post(ANSWERED, number, value, error)

    def start(self) -> None:
        """Start the sending thread, which runs until ``close`` or the other end's end."""
        self._thread = threading.Thread(target=self._send_all, name="pipe", daemon=True)
        self._thread.start()

    def close(self, within_s: float = 0.0) -> None:
        """Stop sending after the calls posted so far; wait up to ``within_s`` seconds for that."""
        self._out.put(None)
        self._thread.join(within_s)

    def _send_all(self) -> None:
        calls: list[_Call | None] = []
        try:
            while None not in calls:
                # no deadline: close() puts None into the queue; the thread is a daemon
                calls = [self._out.get()]
                while not self._out.empty() and len(calls) < BATCH:
                    # no deadline: only this thread takes from the queue
                    calls.append(self._out.get())
                self._connection.send([call for call in calls if call is not None])
        except OSError:
            pass  # the other end is gone: the receiving thread handles that
        except Exception:  # top of a thread: a call cannot be pickled (a task's payload, say)
            log.exception("a pipe ends, since a call over it cannot be pickled")
            # End both receiving threads: otherwise both ends wait for calls that never come.
            with socket.socket(fileno=os.dup(self._connection.fileno())) as both:
                both.shutdown(socket.SHUT_RDWR)

    def receive(
        self,
        first_s: float = inf,
        silent_s: float = inf,
        on_silence: Callable[[float], object] = float,
    ) -> None:
        """Perform the other end's calls on this thread, until the other end closes.

        If that end sends nothing for ``silent_s`` seconds, or ``first_s`` before its first message,
        it is asked for a sign. If it gives none for as long again, its process or the thread that
        gives signs there stands still: ``on_silence`` is called, with the seconds since its last
        message, and again after each further such time.
        """
        poll, patience_s, silence_s = select.poll(), first_s, 0.0
        poll.register(self._connection, select.POLLIN)
        while True:
            if patience_s < inf and not self._gives_sign(poll, patience_s):
                silence_s += 2 * patience_s
                on_silence(silence_s)
                continue
            try:
                # no deadline: a message is there; or it ends with the other process, whose end
                # closes the socket
                calls = self._connection.recv()
            except (EOFError, OSError):
                return
            patience_s, silence_s = silent_s, 0.0
            for method, arguments in calls:
                if method == ANSWERED:
                    self._answered(*arguments)
                elif method != SIGN:
                    attrgetter(method)(self._target)(*arguments)
                elif arguments[0]:
                    self._sign(partial(self.post, SIGN, False))

    def _gives_sign(self, poll: select.poll, patience_s: float) -> bool:
        if poll.poll(1e3 * patience_s):
            return True
        self.post(SIGN, True)
        # In pieces: if this process has stood still as well (a suspended job), one of them is over
        # and the other end has the time of the others.
        return any(poll.poll(1e3 * patience_s / PIECES) for _ in range(PIECES))


def abstract_address(name: str) -> str:
    """Return an address without a file: it disappears with the socket."""
    return f"\0titan_grpo/{name}"


class Channel:
    """Channel of JSON objects, one per line. One thread reads; any thread writes."""

    def __init__(self, sock: socket.socket) -> None:
        """Take the socket over."""
        # The reader and the writers have different timeouts: do not use the socket's own.
        sock.setblocking(False)
        self._sock = sock
        self._rest = bytearray()
        self._write_lock = threading.Lock()

    def send(self, message: Mapping[str, Any], timeout_s: float) -> None:
        """Write one message. Raises PeerError if the other end is gone, or does not read within
        ``timeout_s`` seconds. A message that was written in part is the last one."""
        data = memoryview(json.dumps(message).encode() + b"\n")
        try:
            with self._write_lock:
                deadline, left = time.monotonic() + timeout_s, data
                try:
                    while left:
                        self._wait(select.POLLOUT, deadline)
                        left = left[self._sock.send(left) :]
                except TimeoutError:
                    if len(left) < len(data):
                        # The next message would be the rest of this one's line.
                        self._sock.shutdown(socket.SHUT_WR)
                    raise
        except (OSError, ValueError) as error:  # a ValueError: this end is closed
            raise PeerError(f"the other end of the channel is gone or stuck: {error}") from error

    def receive(self, timeout_s: float | None) -> dict[str, Any] | None:
        """Return the next message, or None at the end of the stream. Raises PeerError after
        ``timeout_s`` seconds, DataError for a line that is no JSON object.

        Without a timeout only the end of the other process (which closes the stream) ends the wait.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while (cut := self._rest.find(b"\n")) < 0:
            # Before each read: of a line without end there is always more to read.
            if deadline is not None and time.monotonic() > deadline:
                raise PeerError("no whole message on the channel before the deadline")
            chunk = self._read(deadline)
            if not chunk:
                return None
            self._rest += chunk
        line, self._rest = bytes(self._rest[:cut]), self._rest[cut + 1 :]
        try:
            message = json.loads(line)
        except NOT_JSON as error:
            raise DataError(f"a message must be one line of JSON: {error}") from error
        if not isinstance(message, dict):
            raise DataError(f"a message must be an object, got {line[:80]!r}")
        return message

    def _read(self, deadline: float | None) -> bytes:
        try:
            self._wait(select.POLLIN, deadline)
            # no deadline: data, or the end of the stream, is ready
            return self._sock.recv(READ_BYTES)
        except TimeoutError as error:
            raise PeerError("no message on the channel before the deadline") from error
        except ConnectionError:
            return b""

    def _wait(self, event: int, deadline: float | None) -> None:
        """Wait until the socket is readable, writable or closed. Raises TimeoutError at the
        deadline."""
        poll = select.poll()
        poll.register(self._sock, event)
        left_ms = None if deadline is None else 1e3 * max(1e-3, deadline - time.monotonic())
        # no deadline: if None, the wait ends with the other process, which closes the stream
        if not poll.poll(left_ms):
            raise TimeoutError("timed out")

    def close(self) -> None:
        """Close this end; the other end reads the end of the stream."""
        self._sock.close()


class Server(threading.Thread):
    """Server of requests, one per connection, until ``close``.

    ``concurrent``: answer each on a thread of its own, for slow answers. Otherwise this one thread
    answers all: a receiver process that it starts would be killed (PR_SET_PDEATHSIG) at the end of
    a shorter-lived thread.
    """

    def __init__(self, address: str, handler: Handler, concurrent: bool = False) -> None:
        """Bind and listen; a file as ``address`` gets mode 0600. Raises OSError if the address is
        in use."""
        super().__init__(name="unix rpc", daemon=True)
        self._handler, self._concurrent = handler, concurrent
        self._closing = threading.Event()
        self._socket = socket.socket(socket.AF_UNIX)
        try:
            # Before the bind: otherwise any user could connect in between.
            os.fchmod(self._socket.fileno(), 0o600)
            self._socket.bind(address)
            self._socket.listen(64)
        except OSError:
            self._socket.close()
            raise

    def run(self) -> None:
        while not self._closing.is_set():
            try:
                # no deadline: close() shuts the socket down, and the thread is a daemon
                connection, _ = self._socket.accept()
            except OSError:
                self._closing.wait(REST_S)
                continue
            if not self._concurrent:
                self._serve(connection)
                continue
            try:
                threading.Thread(target=self._serve, args=(connection,), daemon=True).start()
            except RuntimeError:  # the process has no thread left: the client reads the end
                connection.close()

    def _serve(self, connection: socket.socket) -> None:
        with connection:
            channel = Channel(connection)
            try:
                channel.send(self._answer(connection, channel), GREET_S)
            except PeerError as error:
                log.warning("a request got no answer: %s", error)
            except Exception:  # top of a thread: it must serve the next request
                log.exception("a request could not be answered")

    def _answer(self, connection: socket.socket, channel: Channel) -> dict[str, Any]:
        try:
            raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size)
            _, user, _ = CREDENTIALS.unpack(raw)
            if user not in (0, os.getuid()):
                raise PeerError(f"user {user} may not ask, only user {os.getuid()} and root")
            request = channel.receive(GREET_S)
            if request is None:
                raise PeerError("the client closed its connection")
            return {"answer": dict(self._handler(request))}
        except (PeerError, DataError) as error:
            return {"refused": str(error)}

    def close(self) -> None:
        """Stop listening, without waiting for requests in flight. Idempotent."""
        self._closing.set()
        with suppress(OSError):
            # close() alone does not wake a thread in accept().
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


def listens(address: str) -> bool:
    """Whether a process listens at an address."""
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(GREET_S)
        try:
            probe.connect(address)
        except OSError:
            return False
    return True


def call(address: str, request: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
    """Send a request and return the answer. Raises ServerUnreachable without a server or an answer
    (``timeout_s`` seconds to send, and as many to wait), ServerRefused with its refusal."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(timeout_s)
        try:
            connection.connect(address)
        except OSError as error:
            raise ServerUnreachable(f"no process listens there: {error}") from error
        channel = Channel(connection)
        try:
            channel.send(request, timeout_s)
            reply = channel.receive(timeout_s)
        except (PeerError, DataError) as error:
            raise ServerUnreachable(str(error)) from error
    if reply is None:
        raise ServerUnreachable("the process closed the connection without an answer: see its log")
    if "answer" not in reply:
        raise ServerRefused(str(reply.get("refused", "it refused and gave no reason")))
    return dict(reply["answer"])
