"""What changes the servers of a running trainer: commands over a Unix socket, and the servers file.

The trainer's main thread waits for neither."""

import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from titan_grpo.config_rollout import server_url
from titan_grpo.errors import ConfigError, DataError, PeerError, ServerRefused
from titan_grpo.observe import terminal
from titan_grpo.sync.server_set import ServerSet
from titan_grpo.titan.control_socket import ControlSocket
from titan_grpo.titan.server_urls import ServersFile

LOOK_S = 1.0
"""How often the servers file is checked, in seconds."""

CHANGE_S = 20.0
"""Seconds to wait for a removal before answering "still in progress"."""

STOP_S = 5.0
"""Seconds that the end waits for the file's thread."""


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
