"""Servers come and go while training runs: the thread on rank 0 that drives protocol/members.py.

::

    control socket --Add, Remove--.                       .--join(url): a lane starts
    servers file ---Listed--------+--> [queue] --members--+
    lane that ends --Ended--------'                       `--leave(url): in a thread of its own, waits for the lane

The trainer's main thread waits for none of this. What the thread does by itself is quick: only the
end of a lane takes time, since a commit that has begun is finished first (a server must not stay
paused)."""

import logging
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from titan_grpo.errors import ConfigError, DataError, PeerError, ServerRefused, TitanGrpoError
from titan_grpo.observe import terminal
from titan_grpo.protocol import members
from titan_grpo.titan.control_socket import ControlSocket
from titan_grpo.titan.server_urls import ServersFile, server_url

logger = logging.getLogger(__name__)

LOOK_S = 1.0
"""How often the servers file is looked at, in seconds."""

TELL_S = 20.0
"""How long a command waits for a change to be over before it is told that it is under way, in
seconds."""

STOP_S = 5.0
"""How long the end waits for each of the two threads, in seconds."""

Line = Mapping[str, Any]
"""What ``titan-grpo servers list`` shows of one server."""


@dataclass(frozen=True, slots=True)
class Hands:
    """What the thread does with its decisions."""

    join: Callable[[str], None]
    """Start a lane; does not wait for the server."""

    leave: Callable[[str], None]
    """End the lane; returns when it has ended, or is given up. May take as long as a commit."""

    lines: Callable[[], Sequence[Line]]
    """The servers as they are now."""

    failed: Callable[[str], None]
    """Says at the next step boundary what went wrong."""


@dataclass(frozen=True, slots=True)
class _Job:
    event: members.Event
    told: "Future[str] | None" = None


class MemberThread:
    """Owns the table. Built with the servers that the run starts with; ``close`` ends everything it
    started."""

    def __init__(
        self, first: members.Members, hands: Hands, run_dir: Path, file: ServersFile | None = None
    ) -> None:
        """``file``: looked at again and again; its content at the start is in ``first``."""
        self._table = first
        self._hands = hands
        self._run_dir = run_dir
        self._file = file
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._leaving: dict[str, Future[str]] = {}
        self._stopping = threading.Event()
        self._socket: ControlSocket | None = None
        self._threads = [threading.Thread(target=self._loop, name="members", daemon=True)]
        if file is not None:
            self._threads.append(
                threading.Thread(target=self._look_loop, name="servers file", daemon=True)
            )

    def __repr__(self) -> str:
        return f"<MemberThread {self._table!r}>"

    @property
    def urls(self) -> list[str]:
        """Servers that have a lane and are not leaving."""
        return sorted(self._table.present)

    def start(self) -> None:
        """Start the threads and open the door. A door that can not be opened is said, and costs the
        commands only."""
        for thread in self._threads:
            thread.start()
        try:
            self._socket = ControlSocket(self._run_dir, self._answer)
        except (PeerError, OSError) as error:
            terminal.print_status(f"titan-grpo servers will not reach this run: {error}")

    def close(self) -> None:
        """No more changes. Bounded; idempotent. Lanes are left to whoever owns them."""
        self._stopping.set()
        if self._socket is not None:
            self._socket.close()
        self._jobs.put(None)
        for thread in self._threads:
            if thread.is_alive():
                thread.join(STOP_S)

    # The control socket's threads.

    def _answer(self, request: Mapping[str, Any]) -> Mapping[str, Any]:
        what = request.get("do")
        if what == "list":
            return {"servers": list(self._hands.lines())}
        if what not in ("add", "remove"):
            raise DataError(f"a request must be one of add, remove, list, got {what!r}")
        try:
            url = server_url(str(request.get("url", "")))
        except ConfigError as error:
            raise DataError(str(error)) from error
        told: Future[str] = Future()
        self._jobs.put(_Job(members.Add(url) if what == "add" else members.Remove(url), told))
        try:
            return {"text": told.result(TELL_S)}
        except TimeoutError:
            return {"text": f"{url} is on its way: what its lane has begun is finished first"}

    # The servers file's thread.

    def _look_loop(self) -> None:
        assert self._file is not None
        complaint = ""
        while not self._stopping.wait(LOOK_S):
            try:
                urls = self._file.changed()
            except ConfigError as error:
                if str(error) != complaint:
                    complaint = str(error)
                    terminal.print_status(
                        f"servers: {complaint}; the last good list stays in force"
                    )
                continue
            if urls is not None:
                complaint = ""
                self._jobs.put(_Job(members.Listed(frozenset(urls))))

    # The thread.

    def _loop(self) -> None:
        try:
            # no deadline: close() of its owner puts None into the queue; the thread is a daemon
            while (job := self._jobs.get()) is not None:
                self._take(job)
        except Exception as error:  # top of a thread: commands would get no answer
            logger.exception("the members thread ended")
            self._hands.failed(f"servers can not be added or removed any more: {error!r}")
        finally:
            self._dismiss()

    def _dismiss(self) -> None:
        """Whoever still waits for an answer gets one."""
        gone = ServerRefused("the run is ending")
        for told in self._leaving.values():
            told.set_exception(gone)
        self._leaving = {}
        while True:
            try:
                job = self._jobs.get_nowait()
            except queue.Empty:
                return
            if job is not None and job.told is not None:
                job.told.set_exception(gone)

    def _take(self, job: _Job) -> None:
        self._table, actions = members.step(self._table, job.event)
        for action in actions:
            match action:
                case members.Join(url):
                    self._join(url)
                case members.Leave(url):
                    threading.Thread(
                        target=self._see_off, args=(url,), name=f"see off {url}", daemon=True
                    ).start()
                case members.Refuse(reason):
                    self._refuse(job, reason)
                    return
        self._tell(job)

    def _join(self, url: str) -> None:
        try:
            self._hands.join(url)
        except TitanGrpoError as error:
            self._hands.failed(f"{url} could not join: {error}")

    def _see_off(self, url: str) -> None:
        try:
            self._hands.leave(url)
        except Exception as error:  # top of a thread: the table waits for its word
            logger.exception("seeing off %s", url)
            self._hands.failed(f"{url} left, and its lane with an error: {error!r}")
        self._jobs.put(_Job(members.Ended(url)))

    def _refuse(self, job: _Job, reason: str) -> None:
        if job.told is not None:
            job.told.set_exception(ServerRefused(reason))
        else:
            terminal.print_status(f"servers: {self._file!r} is not followed: {reason}")

    def _tell(self, job: _Job) -> None:
        match job.event:
            case members.Add(url) if job.told is not None:
                later = " when its last lane has ended" if url in self._table.leaving else ""
                job.told.set_result(
                    f"{url} was added: it gets the newest version before its first rollout{later}"
                )
            case members.Remove(url) if job.told is not None:
                if url in self._table.leaving:
                    self._leaving[url] = job.told
                else:
                    job.told.set_result(f"{url} will not join")
            case members.Ended(url) if url in self._leaving:
                self._leaving.pop(url).set_result(
                    f"{url} was removed: it takes no more rollouts and no more versions"
                )
