"""JSON lines over one end of a socket pair, between an engine and its receiver process."""

import json
import socket
import threading
import time
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
        """Write one message; PeerError if the other end is gone or does not read within ``timeout_s`` seconds."""
        data = json.dumps(message).encode() + b"\n"
        try:
            with self._write_lock:
                self._sock.settimeout(timeout_s)
                self._sock.sendall(data)
        except OSError as error:
            raise PeerError(f"the other end of the receiver's channel is gone or stuck: {error}") from error

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
            raise PeerError(f"a message of the receiver's channel must be an object, got {line[:80]!r}")
        return message

    def _read(self, deadline: float | None) -> bytes:
        try:
            self._sock.settimeout(None if deadline is None else max(1e-3, deadline - time.monotonic()))
            return self._sock.recv(READ_BYTES)
        except TimeoutError as error:
            raise PeerError("no answer on the receiver's channel before the deadline") from error
        except ConnectionError:
            return b""

    def close(self) -> None:
        """Close this end; the other end reads the end of the stream."""
        self._sock.close()
