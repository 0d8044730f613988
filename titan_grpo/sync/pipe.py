"""The pipe between rank 0 and its sync process: calls of the other end's methods, in order, of any
size. Pickled: both ends are one program, and one user's."""

import itertools
import queue
import socket
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

from titan_grpo.errors import CROSSING, TitanGrpoError, kind_of

BATCH = 256
"""Most calls in one message."""

_Call = tuple[str, tuple[Any, ...]]


class Pipe:
    """One end. ``post`` never waits, whatever the other end does."""

    def __init__(self, sock: socket.socket, target: object) -> None:
        """Takes the socket over. ``target`` has the methods that the other end calls, one after the
        other; they must not block. Nothing is sent before ``start``."""
        self._connection: Connection[Any, Any] = Connection(sock.detach())
        self._target = target
        self._out: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._numbers = itertools.count()
        self._asked: dict[int, Future[Any]] = {}

    def post(self, method: str, *arguments: Any) -> None:
        """Have the other end call a method. Any thread; never waits."""
        self._out.put((method, arguments))

    def ask(self, method: str, *arguments: Any) -> Any:
        """The same, and wait for the outcome: the other end's ``request``. Any thread but the
        receiving one."""
        number, future = next(self._numbers), Future[Any]()
        self._asked[number] = future
        self.post("request", number, method, *arguments)
        # no deadline: the other end has one for what it does, and its own end ends this process
        return future.result()

    def answered(self, number: int, value: Any, error: TitanGrpoError | None) -> None:
        """The outcome of an ``ask``, as the other end posts it."""
        future = self._asked.pop(number)
        if error is None:
            future.set_result(value)
        else:
            future.set_exception(error)

    def answer(self, number: int, work: Callable[[], Any]) -> None:
        """Post the outcome of ``work`` for the other end's ``ask``. Top of a thread."""
        value, error = None, None
        try:
            value = work()
        except Exception as raised:  # noqa: BLE001 - top of a thread: `ask` must not hang
            text = str(raised) if isinstance(raised, TitanGrpoError) else repr(raised)
            error = CROSSING[kind_of(raised)](text)
        self.post("answered", number, value, error)

    def start(self) -> None:
        """Send, on a thread, until ``close`` or the other end is gone."""
        threading.Thread(target=self._send_all, name="sync pipe", daemon=True).start()

    def close(self) -> None:
        """Send what was posted, and no more. Does not wait."""
        self._out.put(None)

    def _send_all(self) -> None:
        with suppress(OSError):  # the other end is gone: the receiving thread finds out
            while True:
                # no deadline: close() puts None into the queue; the thread is a daemon
                calls = [self._out.get()]
                while not self._out.empty() and len(calls) < BATCH:
                    # no deadline: only this thread takes from the queue
                    calls.append(self._out.get())
                self._connection.send([call for call in calls if call is not None])
                if None in calls:
                    return

    def receive(self) -> None:
        """Perform what the other end posts, on this thread, until its end."""
        while True:
            try:
                # no deadline: ends with the other process, whose end closes the socket
                calls = self._connection.recv()
            except (EOFError, OSError):
                return
            for method, arguments in calls:
                getattr(self._target, method)(*arguments)
