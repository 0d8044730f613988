"""Rank 0's handle of the process that looks after paused servers when this one can not
(sync.pause_guard_main).

The lanes' watch writes one short line when a pause begins and one when it is over, and never waits:
neither for the process nor for its start."""

import json
import logging
import os
import socket
import subprocess
import threading
import time
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from titan_grpo.config import WeightSync
from titan_grpo.protocol.lane_events import LaneEvent, Point
from titan_grpo.protocol.pause_guard import Deadlines
from titan_grpo.subprocesses import helper_environment, start_module, wait_process

if TYPE_CHECKING:
    from titan_grpo.sync.link import LinkOptions

logger = logging.getLogger(__name__)

OPENING = (Point.GREET, Point.PAUSE)
"""From these on a server may stay paused if its lane stops."""

CLOSING = (Point.CONNECTED, Point.RESUMED, Point.HELD)
"""From these on it does not."""

CLOSE_S = 5.0
"""How long the end waits for a process with nothing to do, in seconds."""

RESTART_S = 10.0
"""Least time between two restarts of the process, in seconds."""

STUCK_BYTES = 1 << 16
"""With as much unread behind a full socket buffer the process is held for stuck, and replaced."""


def terms_of(config: WeightSync) -> Deadlines:
    """How long a lane of this configuration may take: three calls of a commit and, streamed, the
    transfer within it."""
    transfer_s = config.lane_deadline_s if config.apply == "streamed" else 0.0
    pause_s = 3 * config.commit_deadline_s + transfer_s
    # hello, joined, communicator, manifest, the look at label and pause; then the rest after a
    # failure
    greet_s = (
        3 * config.connect_deadline_s + 3 * config.commit_deadline_s + 2 * config.backoff_max_s
    )
    return Deadlines(pause_s, greet_s)


class PauseGuard:
    """Starts the process, and tells it what the lanes do. ``watch`` is a lane_events.Observer for all lanes
    of a run.

    ``restarts``: how often the process had to be replaced; ``late``: lines that its full socket did
    not take at once.
    """

    def __init__(
        self,
        config: WeightSync,
        link: "LinkOptions",
        log: Path | None = None,
        terms: Deadlines | None = None,
    ) -> None:
        """``log``: the file that the process appends to; None: this process's stderr. ``terms``:
        None: terms_of(config)."""
        run_key = link.run_key.hex() if link.run_key is not None else ""
        deadlines = {"call_s": config.commit_deadline_s, "join_s": config.connect_deadline_s}
        access = {"bind_host": link.bind_host, "run_key": run_key, **deadlines}
        self._terms: dict[str, Any] = {
            "op": "terms",
            "terms": asdict(terms or terms_of(config)),
            "access": access,
        }
        self._log = log
        self._lock = threading.Lock()
        self._keys: dict[str, tuple[str, str]] = {}
        self._open: dict[str, LaneEvent] = {}
        self._sock: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._killed: list[subprocess.Popen[bytes]] = []
        self._out = b""
        self._restarted_s = -RESTART_S
        self._closed = False
        self.restarts = self.late = 0
        with self._lock:
            self._start()

    def __repr__(self) -> str:
        return f"<PauseGuard {self.pid}, {len(self._open)} open, {self.restarts} restarts>"

    @property
    def pid(self) -> int | None:
        """Process id; None if it could not be started."""
        return self._process.pid if self._process is not None else None

    def know(self, url: str, api_key: str, admin_key: str = "") -> None:
        """With which keys a server's control plane is called. Before its lane starts."""
        with self._lock:
            self._keys[url] = (api_key, admin_key)
            self._write(_known(url, api_key, admin_key))

    def watch(self, passing: LaneEvent) -> None:
        """A lane is at a point. Any thread; never waits, never raises."""
        if passing.point in OPENING:
            with self._lock:
                self._open[passing.url] = passing
                self._write(_line(passing))
        elif passing.point in CLOSING and passing.url in self._open:
            with self._lock:
                del self._open[passing.url]
                self._write(_line(passing))

    def close(self) -> None:
        """After the lanes have ended. The process ends at once, or goes on alone if a server was
        left paused. Idempotent."""
        with self._lock:
            if self._closed or self._process is None:
                return
            self._write({"op": "end"})
            self._closed = True
            self._drop()
        for killed in self._killed:
            killed.poll()
        try:
            wait_process(self._process, CLOSE_S)
        except subprocess.TimeoutExpired:
            logger.warning(
                "process %s still looks after servers that were left paused: %s",
                self.pid,
                sorted(self._open),
            )

    # Under the lock.

    def _write(self, message: dict[str, Any]) -> None:
        if self._closed:
            return
        self._out += json.dumps(message).encode() + b"\n"
        if not self._flush() or len(self._out) > STUCK_BYTES:
            self._restart()

    def _flush(self) -> bool:
        """Whether the process is there."""
        if self._sock is None:
            return False
        try:
            self._out = self._out[self._sock.send(self._out) :]
        except BlockingIOError:
            self.late += 1
            if self.late == 1:
                logger.warning(
                    "process %s does not read: it learns late what the lanes do", self.pid
                )
        except OSError:
            return False
        return True

    def _restart(self) -> None:
        if self._restarted_s + RESTART_S > time.monotonic():
            # what is open is written when it starts
            self._out = self._out if self._sock is not None else b""
            return
        if self._process is not None:
            self._process.kill()
            self._killed.append(self._process)
            logger.warning(
                "process %s, which looks after paused servers, ended or hung: starting another",
                self.pid,
            )
        self._restarted_s = time.monotonic()
        self.restarts += 1
        self._drop()
        self._start()

    def _start(self) -> None:
        try:
            with open(self._log or os.devnull, "ab") as log:
                # A session of its own: torchrun and terminals signal the trainer's.
                self._process, self._sock = start_module(
                    "titan_grpo.sync.pause_guard_main",
                    *("--parent", str(os.getpid())),
                    env=helper_environment(os.environ),
                    stdout=subprocess.DEVNULL,
                    stderr=log if self._log is not None else None,
                    new_session=True,
                )
        except OSError as error:
            logger.warning("no process looks after paused servers if this one dies: %s", error)
            return
        # a blocking send would make a lane, inside its commit, wait for this process
        self._sock.setblocking(False)
        known = [_known(url, *keys) for url, keys in self._keys.items()]
        messages = [self._terms, *known, *map(_line, self._open.values())]
        self._out = b"".join(json.dumps(message).encode() + b"\n" for message in messages)
        self._flush()

    def _drop(self) -> None:
        if self._sock is not None:
            with suppress(OSError):
                self._sock.close()
            self._sock = None


def _known(url: str, api_key: str, admin_key: str) -> dict[str, Any]:
    return {"op": "know", "url": url, "key": api_key, "admin_key": admin_key}


def _line(passing: LaneEvent) -> dict[str, Any]:
    return {"op": "pass", **asdict(passing), "point": passing.point.value}
