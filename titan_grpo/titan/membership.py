"""What changes the servers of a running trainer: commands over a Unix socket, and the servers file.

The trainer's main thread waits for neither."""

import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from titan_grpo.config.rollout import server_url, two_names
from titan_grpo.errors import (
    ConfigError,
    DataError,
    PeerError,
    ServerRefused,
    ServerUnreachable,
)
from titan_grpo.observe import terminal
from titan_grpo.sync.server_set import ServerSet
from titan_grpo.titan.server_urls import ServersFile
from titan_grpo.unix_rpc import Handler, Server, call, listens

LOOK_S = 1.0
"""How often the servers file is checked, in seconds."""

CHANGE_S = 20.0
"""Seconds to wait for a removal before answering "still in progress"."""

STOP_S = 5.0
"""Seconds that the end waits for the file's thread."""


NAME = "control.sock"

ANSWER_S = 30.0
"""Seconds that a command waits for its answer: the trainer answers well before."""


@contextmanager
def _address(folder: Path) -> Iterator[str]:
    """A short path to the socket: the kernel takes 107 bytes, and run directories are longer."""
    fd = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{fd}/{NAME}"
    finally:
        os.close(fd)


def ask(folder: Path, request: Mapping[str, Any], timeout_s: float = ANSWER_S) -> dict[str, Any]:
    """The answer of the trainer that runs in ``folder`` on this host. ServerUnreachable without
    one, ServerRefused with its refusal."""
    try:
        with _address(folder) as address:
            return call(address, request, timeout_s)
    except (OSError, ServerUnreachable) as error:
        raise ServerUnreachable(
            f"no trainer runs in {folder} on this host, or it does not answer ({error}): name the"
            " run's job.dump_folder with --run, on the host of its rank 0"
        ) from error


class ControlSocket:
    """The socket in the run's directory, from construction to ``close``. ServerRefused where a
    live trainer has one."""

    def __init__(self, folder: Path, handler: Handler) -> None:
        self._path = folder / NAME
        with _address(folder) as address:
            if listens(address):
                raise ServerRefused(
                    f"{self._path} belongs to a live trainer: two runs cannot share a directory"
                )
            self._path.unlink(missing_ok=True)  # of a trainer that was killed
            self._server = Server(address, handler, concurrent=True)
        self._inode = self._path.stat().st_ino
        self._server.start()

    def close(self) -> None:
        """Stop listening and remove the socket. Idempotent."""
        self._server.close()
        with suppress(OSError):
            # the file may be a successor's by now
            if self._path.stat().st_ino == self._inode:
                self._path.unlink()


class Membership:
    """Runs from construction to ``close``."""

    def __init__(
        self,
        servers: ServerSet,
        run_dir: Path,
        in_flight: Callable[[], Mapping[str, int]],
        file: ServersFile | None = None,
    ) -> None:
        """``in_flight``: requests by server, for the list. ``file``: the watched servers file,
        whose content at the start is in ``servers``. A socket that cannot be opened costs the
        commands only."""
        self._servers, self._in_flight, self._file = servers, in_flight, file
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="servers file", daemon=True)
        if file is not None:
            self._thread.start()
        self._socket: ControlSocket | None = None
        try:
            self._socket = ControlSocket(run_dir, self._answer)
        except (PeerError, OSError) as error:
            terminal.print_status(f"titan-grpo servers will not reach this run: {error}")

    def close(self) -> None:
        """No more changes. Bounded; idempotent."""
        self._stopping.set()
        if self._socket is not None:
            self._socket.close()
        if self._thread.is_alive():
            self._thread.join(STOP_S)

    def _answer(self, request: Mapping[str, Any]) -> Mapping[str, Any]:
        what = request.get("do")
        if what == "list":
            return {"servers": self._servers.lines(self._in_flight())}
        if what not in ("add", "remove"):
            raise DataError(f"a request must be one of add, remove, list, got {what!r}")
        try:
            url = server_url(str(request.get("url", "")))
        except ConfigError as error:
            raise DataError(str(error)) from error
        if what == "add" and (both := two_names([*self._servers.urls, url])):
            raise DataError(f"{both} are one server: it is in the run already")
        if what == "add":
            later = "" if self._servers.add(url) else " when its last lane has ended"
            text = f"{url} was added: it gets the newest version before its first rollout{later}"
        elif self._servers.remove(url, CHANGE_S):
            text = f"{url} was removed: it takes no more rollouts and no more versions"
        else:
            text = f"{url} is leaving: what its lane has begun is finished first"
        return {"text": text}

    def _follow(self) -> None:
        assert self._file is not None
        complaint = ""
        while not self._stopping.wait(LOOK_S):
            try:
                urls = self._file.changed()
                if urls is not None:
                    complaint = ""
                    self._servers.listed(urls)
            except ConfigError as error:
                if str(error) != complaint:
                    complaint = str(error)
                    terminal.print_status(
                        f"servers: {complaint}; the last good list stays in force"
                    )
            except ServerRefused as error:
                terminal.print_status(f"servers: {self._file!r} is not followed: {error}")
