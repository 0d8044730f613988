"""Handle of the pause guard (pause_guard_main), the process that resumes paused servers when the
trainer no longer can.

``observe`` writes one short line when a pause begins and one when it is over; both ``observe`` and
``renew`` write more during a slow commit or connection. Neither waits, not even for the start of
the process: lanes call them inside their commits.
"""

import logging
import os
import socket
import subprocess
import threading
import time
from pathlib import Path
from typing import IO, Any

import msgspec

from titan_grpo.config import WeightSync
from titan_grpo.protocol import lane
from titan_grpo.protocol.lane import LaneEvent, Point
from titan_grpo.protocol.marks import mark_bytes
from titan_grpo.protocol.pause_guard import Deadlines
from titan_grpo.subprocesses import ENDING, helper_environment, start_module, wait_process
from titan_grpo.sync.link import LinkOptions, answer_s

logger = logging.getLogger(__name__)

OPENING = (Point.GREET, Point.PAUSE, Point.LOAD, Point.LABEL, Point.RESUME)
"""Points after which a server may stay paused if its lane stops."""

CLOSING = (Point.CONNECTED, Point.RESUMED, Point.HELD)
"""Points after which it does not."""

RENEW_S = 1.0
"""Seconds for which a lane's line is not repeated; most commits are over by then."""

CLOSE_S = 5.0
"""Seconds to wait for the end of an idle guard."""

RESTART_S = 10.0
"""Least seconds between two restarts of the process."""

STUCK_S = 30.0
"""If its full socket takes nothing for so many seconds, the process is stuck, and is replaced. Not
at once: the lines of some hundred servers fill the socket while it loads."""


def transfer_in_load_s(config: WeightSync, nbytes: int) -> float:
    """Return how long the transfer of ``nbytes`` in a server's load call may take, in seconds; 0 if
    staged."""
    return config.transfer_s(nbytes) if config.apply == "streamed" else 0.0


def deadlines_of(
    config: WeightSync, nbytes: int, manifest_bytes: int, forwarded: bool
) -> Deadlines:
    """Return how long a lane may be silent in a commit of ``nbytes``, and while it connects and
    sends a manifest of ``manifest_bytes``. ``forwarded``: rank 0 makes its calls, and only protocol
    points renew the lease."""
    call_s, transfer_s = config.commit_deadline_s, transfer_in_load_s(config, nbytes)
    if forwarded:
        pause_s = RENEW_S + lane.step_s(lane.Phase.LOADING, call_s, transfer_s)
    else:
        # One call, a ping or a report before the next one, and the rest after a failure.
        answers_s = 2 * answer_s(call_s)
        pause_s = RENEW_S + call_s + transfer_s + answers_s + config.backoff_max_s
    if forwarded or config.apply == "streamed":
        # The whole connection: rank 0's calls do not renew, and a stock server's one call for its
        # parameters' checksums may take longer than a call's deadline.
        waits_s = 3 * config.connect_deadline_s + config.moving_s(manifest_bytes)
        greet_s = waits_s + lane.step_s(lane.Phase.CONNECTING, call_s)
    else:
        # One call, then a wait without calls: for the receiver's answer and the communicator, or
        # for the manifest and the first mark of its memory.
        mark_s = config.moving_s(mark_bytes(nbytes, config.bucket_bytes))
        before_s = config.connect_deadline_s + config.moving_s(manifest_bytes)
        first_s = before_s + config.progress_deadline_s + mark_s
        greet_s = RENEW_S + call_s + max(2 * config.connect_deadline_s, first_s)
    return Deadlines(pause_s, greet_s + 2 * config.backoff_max_s)  # with the rest after a failure


class PauseGuard:
    """Starts the process and forwards lane events to it. One per run."""

    def __init__(self, link: LinkOptions, log: Path, deadlines: Deadlines) -> None:
        """``log``: file that the process appends to."""
        config = link.config
        access = {
            "bind_host": link.bind_host,
            "run_key": link.run_key.hex() if link.run_key is not None else "",
            "call_s": config.commit_deadline_s,
            "join_s": config.connect_deadline_s,
            "started_s": link.started_s,
        }
        self._first = {"op": "start", "deadlines": deadlines, "access": access}
        self._log = log
        self._lock = threading.Lock()
        self._servers: dict[str, dict[str, Any]] = {}
        self._open: dict[str, tuple[LaneEvent, float]] = {}
        """Server -> its last event, and the time of its last line (monotonic clock)."""
        self._sock: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._killed: list[subprocess.Popen[bytes]] = []
        self._out = bytearray()
        self._taken_s = 0.0
        """When the socket last took bytes (monotonic clock)."""
        self._restarted_s = -RESTART_S
        self._closed = False
        with self._lock:
            self._start()

    @property
    def pid(self) -> int | None:
        """Process id; None if it could never be started."""
        return self._process.pid if self._process is not None else None

    def know(self, url: str, api_key: str, admin_key: str = "") -> None:
        """Send the keys of a server's control plane. Call it before the server's lane starts."""
        message = {"op": "server", "url": url, "key": api_key, "admin_key": admin_key}
        with self._lock:
            self._servers[url] = message
            self._write(message)

    def observe(self, event: LaneEvent) -> None:
        """Observer of all lanes. Any thread; never waits, never raises."""
        if event.point not in OPENING + CLOSING:
            return
        with self._lock:
            before = self._open.get(event.url)
            if event.point in CLOSING:
                if self._open.pop(event.url, None) is not None:
                    self._write(_line(event))
            elif before is not None and _same_lease(before[0], event) and not _due(before):
                # Each line costs the guard's process as much as this one, and lanes wait for each
                # other here. The next line says this event.
                self._open[event.url] = event, before[1]
            else:
                self._open[event.url] = event, time.monotonic()
                self._write(_line(event))

    def renew(self, url: str) -> None:
        """Renew the lease of a server's commit or connection, if one is open: a call to it begins,
        or its connection makes progress. Any thread; never waits, never raises."""
        # Looks without the lock first: nearly always nothing is due, and each call comes here.
        if not _due(self._open.get(url)):
            return
        with self._lock:
            if (opened := self._open.get(url)) is not None and _due(opened):
                self._open[url] = opened[0], time.monotonic()
                self._write(_line(opened[0]))

    def close(self) -> None:
        """End the process; it continues alone if a server was left paused. Call it after the lanes
        have ended. Idempotent."""
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
                "process %s goes on: it recovers servers that were left paused: %s",
                self.pid,
                sorted(self._open),
            )

    # Under the lock.

    def _write(self, message: dict[str, Any]) -> None:
        if self._closed:
            return
        self._out += _encoded(message)
        if not self._flush():
            self._restart()

    def _flush(self) -> bool:
        """Send what the socket takes; return whether the process is there and reads."""
        if self._sock is None:
            return False
        try:
            del self._out[: self._sock.send(self._out)]
        except BlockingIOError:
            return time.monotonic() < self._taken_s + STUCK_S
        except OSError:
            return False
        self._taken_s = time.monotonic()
        return True

    def _restart(self) -> None:
        if self._restarted_s + RESTART_S > time.monotonic():
            # Without a socket drop the lines: _start() writes the open ones anew.
            if self._sock is None:
                self._out.clear()
            return
        if self._process is not None:
            self._process.kill()
            self._killed.append(self._process)
            logger.warning("process %s, the pause guard, ended or hung: starting another", self.pid)
        self._restarted_s = time.monotonic()
        self._drop()
        self._start()

    def _start(self) -> None:
        try:
            with self._opened_log() as log:
                # A session of its own: torchrun and terminals signal the trainer's. Schedulers
                # signal every process of a job; this one must continue.
                self._process, self._sock = start_module(
                    "titan_grpo.sync.pause_guard_main",
                    env=helper_environment(os.environ),
                    outputs=(subprocess.DEVNULL, log),
                    new_session=True,
                    ignored=ENDING,
                )
        except OSError as error:
            logger.warning("no pause guard: servers stay paused if this trainer dies: %s", error)
            return
        # A blocking send would stop a lane inside its commit.
        self._sock.setblocking(False)
        # A new process needs all of it: configuration, keys, and the events that are open.
        lines = [self._first, *self._servers.values(), *(_line(e) for e, _ in self._open.values())]
        self._out = bytearray(b"".join(map(_encoded, lines)))
        self._taken_s = time.monotonic()
        self._flush()

    def _opened_log(self) -> IO[bytes]:
        try:
            return open(self._log, "ab")
        # The folder is gone, full or read-only: better no log than no guard.
        except OSError as error:
            logger.warning("the pause guard has no log: %s", error)
            return open(os.devnull, "ab")

    def _drop(self) -> None:
        if self._sock is not None:
            self._sock.close()
            self._sock = None


def _due(opened: tuple[LaneEvent, float] | None) -> bool:
    """Return whether an open event's line is to be repeated."""
    return opened is not None and time.monotonic() >= opened[1] + RENEW_S


def _same_lease(before: LaneEvent, event: LaneEvent) -> bool:
    """Return whether two opening events in a row are of one commit."""
    return before.epoch == event.epoch and Point.GREET not in (before.point, event.point)


def _line(event: LaneEvent) -> dict[str, Any]:
    return {"op": "event", "event": event}


def _encoded(message: dict[str, Any]) -> bytes:
    return msgspec.json.encode(message) + b"\n"
