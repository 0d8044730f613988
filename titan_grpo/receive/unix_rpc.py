"""JSON lines over one end of a socket pair, between an engine and its receiver process.

A door into one process of a server: its HTTP process knocks, the process that holds the model
answers.

For engines whose HTTP routes reach the model's process only while generation stands still. The door
is a Unix socket in the abstract namespace (nothing to clean up), its name is a secret of the
server's processes, and only the same user is let in."""

import json
import logging
import os
import socket
import struct
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from titan_grpo.errors import PeerError

READ_BYTES = 1 << 16


class Channel:
    """Sends and receives one JSON object per line. One thread reads; any thread writes."""

    def __init__(self, sock: socket.socket) -> None:
        """Takes the socket over."""
        self._sock = sock
        self._rest = bytearray()
        self._write_lock = threading.Lock()

    def send(self, message: dict[str, Any], timeout_s: float) -> None:
        """Write one message; PeerError if the other end is gone or does not read within
        ``timeout_s`` seconds."""
        data = json.dumps(message).encode() + b"\n"
        try:
            with self._write_lock:
                self._sock.settimeout(timeout_s)
                self._sock.sendall(data)
        except OSError as error:
            raise PeerError(
                f"the other end of the receiver's channel is gone or stuck: {error}"
            ) from error

    def receive(self, timeout_s: float | None) -> dict[str, Any] | None:
        """The next message, or None at the end of the stream. PeerError past ``timeout_s`` seconds.

        Without a timeout only the other process's end (which closes the stream) ends the wait.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while (cut := self._rest.find(b"\n")) < 0:
            chunk = self._read(deadline)
            if not chunk:
                return None
            self._rest += chunk
        line, self._rest = bytes(self._rest[:cut]), self._rest[cut + 1 :]
        message = json.loads(line)
        if not isinstance(message, dict):
            raise PeerError(
                f"a message of the receiver's channel must be an object, got {line[:80]!r}"
            )
        return message

    def _read(self, deadline: float | None) -> bytes:
        try:
            self._sock.settimeout(
                None if deadline is None else max(1e-3, deadline - time.monotonic())
            )
            # no deadline: settimeout in the line above; without a deadline it ends with the other
            # process, whose end closes the stream
            return self._sock.recv(READ_BYTES)
        except TimeoutError as error:
            raise PeerError("no answer on the receiver's channel before the deadline") from error
        except ConnectionError:
            return b""

    def close(self) -> None:
        """Close this end; the other end reads the end of the stream."""
        self._sock.close()


GREET_S = 5.0
"""How long whoever was let in may take to say what it wants, and to take the answer, in seconds."""

CREDENTIALS = struct.Struct("3i")
"""pid, uid, gid of the other end, as SO_PEERCRED gives them."""

Handler = Callable[[dict[str, Any]], dict[str, Any]]

log = logging.getLogger("titan_grpo.receive")


def address(name: str) -> str:
    """The socket's address of a door called ``name``."""
    return f"\0titan_grpo/{name}"


class Door(threading.Thread):
    """Answers one knock after the other, for as long as its process lives.

    One thread for all of them, which never ends: a receiver process dies with the thread that
    started it.
    """

    def __init__(self, name: str, handler: Handler) -> None:
        """Listens when this returns. OSError if another process has a door of that name."""
        super().__init__(name="titan_grpo door", daemon=True)
        self._handler = handler
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.bind(address(name))
        self._socket.listen(8)

    def run(self) -> None:
        """Serve until the process ends or ``close``."""
        while True:
            try:
                # no deadline: close(), which shuts the socket down, or the end of the process: the
                # thread is a daemon
                guest, _ = self._socket.accept()
            except OSError:
                return  # closed
            try:
                self._serve(guest)
            except PeerError as error:
                log.warning("a knock came to nothing: %s", error)
            except Exception:  # noqa: BLE001 - top of a thread: without it no trainer could ever join again
                log.error("a knock could not be answered\n%s", traceback.format_exc())
            finally:
                guest.close()

    def _serve(self, guest: socket.socket) -> None:
        _, uid, _ = CREDENTIALS.unpack(
            guest.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size)
        )
        if uid != os.getuid():
            raise PeerError(f"it came from user {uid}, and only user {os.getuid()} is let in")
        channel = Channel(guest)
        message = channel.receive(GREET_S)
        if message is not None:
            channel.send(self._handler(message), GREET_S)

    def close(self) -> None:
        """Stop listening. Idempotent."""
        with suppress(OSError):
            self._socket.shutdown(
                socket.SHUT_RDWR
            )  # a thread in accept does not notice a close alone
        self._socket.close()


def knock(name: str, message: dict[str, Any], timeout_s: float) -> dict[str, Any]:
    """Ask who is behind the door. PeerError if nobody is, or no answer comes within ``timeout_s``
    seconds."""
    with socket.socket(socket.AF_UNIX) as guest:
        guest.settimeout(timeout_s)
        try:
            guest.connect(address(name))
        except OSError as error:
            raise PeerError(
                f"the model's process has no open door ({error}): is it still loading?"
            ) from error
        channel = Channel(guest)
        channel.send(message, timeout_s)
        answer = channel.receive(timeout_s)
    if answer is None:
        raise PeerError("the model's process closed its door without an answer: see its log")
    return answer
