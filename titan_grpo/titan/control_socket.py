"""The door of a running trainer: a unix socket in its run directory. One JSON line is asked, one is
answered.

Whoever may open the socket may change the run, so its mode is 0600: the trainer's own user and
root. Nothing listens on a network.
"""

import json
import logging
import os
import socket
import socketserver
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from titan_grpo.errors import DataError, PeerError, ServerRefused, ServerUnreachable
from titan_grpo.rollout.httpd import Serving

logger = logging.getLogger(__name__)

NAME = "control.sock"
LINE_LIMIT = 64 << 10
READ_S = 5.0
"""How long a caller may take to say what it wants, in seconds."""

ANSWER_S = 30.0
"""How long a caller waits for the answer, in seconds; the trainer answers well before."""

Answer = Callable[[Mapping[str, Any]], Mapping[str, Any]]
"""Answers one request; called in a thread of its own. Raises PeerError or DataError for a
refusal."""


@contextmanager
def _address(folder: Path) -> Iterator[str]:
    """A path to the socket that is short: the kernel takes 107 bytes, and run directories are
    longer than that."""
    fd = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{fd}/{NAME}"
    finally:
        os.close(fd)


class _Handler(socketserver.StreamRequestHandler):
    timeout = READ_S

    def handle(self) -> None:
        server = self.server
        assert isinstance(server, _Server)
        with suppress(OSError):  # the caller went away: nobody is left to be told
            self.wfile.write(json.dumps(self._answer(server.answer)).encode() + b"\n")

    def _answer(self, answer: Answer) -> Mapping[str, Any]:
        try:
            # no deadline: the connection has a timeout (the handler's)
            request = json.loads(self.rfile.readline(LINE_LIMIT))
            if not isinstance(request, dict):
                raise DataError(f"a request must be an object, got {str(request)[:100]!r}")
            return {"ok": True, **answer(request)}
        except (PeerError, DataError) as error:
            return {"ok": False, "text": str(error)}
        except (OSError, ValueError) as error:
            return {"ok": False, "text": f"a request must be one line of JSON: {error}"}


class _Server(Serving, socketserver.UnixStreamServer):
    def __init__(self, address: str, answer: Answer) -> None:
        self.answer = answer
        super().__init__(address, _Handler)

    def server_bind(self) -> None:
        # Before the bind, not after: between the two, anybody could open it.
        os.fchmod(self.socket.fileno(), 0o600)
        super().server_bind()


class ControlSocket:
    """Listens from construction to ``close``. Raises ServerRefused where the directory has one that
    answers."""

    def __init__(self, folder: Path, answer: Answer) -> None:
        self._path = folder / NAME
        with _address(folder) as address:
            self._remove_stale(address)
            try:
                self._server = _Server(address, answer)
            except OSError as error:
                raise ServerRefused(f"{self._path} cannot be made a socket: {error}") from error
        self._inode = self._path.stat().st_ino
        self._server.begin("control socket")

    def _remove_stale(self, address: str) -> None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.settimeout(READ_S)
            try:
                probe.connect(address)
            except FileNotFoundError:
                return
            except OSError:
                self._path.unlink(missing_ok=True)  # of a trainer that was killed
                return
        raise ServerRefused(
            f"{self._path} belongs to a trainer that runs: two runs cannot share a directory"
        )

    def close(self) -> None:
        """Stop listening and remove the socket. Idempotent; bounded."""
        self._server.end()
        with suppress(OSError):
            if self._path.stat().st_ino == self._inode:
                self._path.unlink()


def ask(folder: Path, request: Mapping[str, Any], timeout_s: float = ANSWER_S) -> dict[str, Any]:
    """The answer of the trainer that runs in ``folder`` on this host.

    Raises ServerUnreachable if none does or none answers within ``timeout_s`` seconds,
    ServerRefused with its refusal.
    """
    try:
        with _address(folder) as address, socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
            sock.settimeout(timeout_s)
            sock.connect(address)
            sock.sendall(json.dumps(request).encode() + b"\n")
            with sock.makefile("rb") as reader:
                # no deadline: the socket has a timeout
                answer = json.loads(reader.readline())
    except (FileNotFoundError, NotADirectoryError, ConnectionRefusedError) as error:
        raise ServerUnreachable(
            f"no trainer runs in {folder} on this host (there is no {NAME} that answers): name the"
            " run's job.dump_folder with --run, on the host of its rank 0"
        ) from error
    except (OSError, ValueError) as error:
        raise ServerUnreachable(
            f"the trainer in {folder} gave no answer within {timeout_s:g} s: {error}"
        ) from error
    if not answer.pop("ok", False):
        raise ServerRefused(str(answer.get("text", "the trainer refused, and did not say why")))
    return dict(answer)
