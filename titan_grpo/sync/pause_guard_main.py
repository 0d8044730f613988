"""The pause guard: a process beside rank 0 that outlives it. No server stays paused because its
trainer died or froze in a commit.

The lanes write one line when a pause begins and one when it is over. If the trainer ends, or a
lease runs out, this process fences the lane with an epoch of its own (after which no call of the
lane can load), reads from the receiver what the engine holds, sets that label and resumes the
server (protocol.recovery.settle). protocol.pause_guard decides which servers are open and when each
is due. It is a process because a thread dies and freezes with its trainer.
"""

import logging
import os
import queue
import selectors
import socket
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import msgspec

from titan_grpo.engines.http import ServerAccess
from titan_grpo.engines.server import AUTO, ServerControl, make_control
from titan_grpo.errors import PeerError, TitanGrpoError
from titan_grpo.protocol import pause_guard
from titan_grpo.protocol.lane import LaneEvent
from titan_grpo.protocol.messages import TCP, Joined, Label
from titan_grpo.protocol.recovery import Pause, Relabel, Resume, Step, settle
from titan_grpo.runkey import Key
from titan_grpo.sync.probe import ask_receiver
from titan_grpo.sync.transports.channel import resolve_bind_host

log = logging.getLogger("titan_grpo.sync.pause_guard_main")

READ_BYTES = 1 << 16


class SupersededError(PeerError):
    """A newer run or epoch has the server."""


@dataclass(frozen=True, slots=True)
class Access:
    """How to reach servers. ``bind_host``: see weight_sync; ``call_s``: deadline of each call, in
    seconds.

    ``join_s``: timeout for the receiver's answer (includes process start). Do not retry earlier: a
    second hello kills the first receiver. ``run_key``: hexadecimal digits, empty without one.
    ``started_s``: when the run started, on this host's monotonic clock.
    """

    bind_host: str
    call_s: float
    join_s: float
    run_key: str = field(repr=False)
    started_s: float = field(default_factory=time.monotonic)


def superseded(joined: Joined, run_id: str, epoch: int) -> str:
    """Return why another epoch than ours is in force; empty if ours is. Raises PeerError for any
    other refusal. A repeated hello is refused because its own epoch is in force: that is ours."""
    if joined.ok or (joined.run_in_force, joined.epoch_in_force) == (run_id, epoch):
        return ""
    if joined.final:
        raise PeerError(joined.error)
    return joined.error


def fence(control: ServerControl, access: Access, run_id: str, epoch: int) -> Joined:
    """Open ``epoch`` on a server and close it again: no older epoch can load any more. Return the
    receiver's answer, with what the engine holds. Raises as ask_receiver.

    The engine serves one call at a time, so a load in progress has ended when this returns.
    """
    return ask_receiver(
        control.greet,
        resolve_bind_host(access.bind_host, control.url),
        access.join_s,
        Key.parse(access.run_key, "the pause guard's run key") if access.run_key else None,
        run_id=run_id,
        epoch=epoch,
        transport=TCP,
        age_s=time.monotonic() - access.started_s,
        # A lane that connects is watched too. If the server refused it for a live run, what is
        # paused there is that run's commit.
        take_over=False,
    )


def steps(control: ServerControl, joined: Joined, run_id: str) -> tuple[Step, ...]:
    """Return the steps that settle the server whose receiver answered ``joined``. Raises PeerError
    if the label shows that another server answers at its URL: one that holds no version of a run
    has no label of it."""
    shown = control.label()
    label = Label.parse(shown)
    ours = label is not None and label.run_id == run_id
    # Without our receiver (no pid) what a server holds is unknown.
    if ours and joined.held is None and joined.pid:
        raise PeerError(
            f"{control.url}: the server that was greeted holds no version of this run, and the"
            f" label there is {shown}: two servers answer at this URL; give each one of its own"
        )
    return settle(joined.held, joined.intact, shown, control.paused())


def perform(control: ServerControl, step: Step) -> None:
    """Perform one step of protocol.recovery.settle."""
    match step:
        case Pause():
            control.pause()
        case Relabel(label):
            control.relabel(label)
        case Resume():
            control.resume()


def recover(
    control: ServerControl,
    access: Access,
    due: pause_guard.Recover,
    cancelled: threading.Event,
) -> str:
    """Settle one server; return what was done, as text. Raises PeerError if it cannot be reached,
    SupersededError if a newer epoch has it."""
    if due.doubtful and not control.paused():
        return ""
    epoch = due.epoch + 1
    joined = fence(control, access, due.run_id, epoch)
    if newer := superseded(joined, due.run_id, epoch):
        raise SupersededError(newer)
    held = joined.held
    needed = steps(control, joined, due.run_id)
    for step in needed:
        if cancelled.is_set():
            return "its lane is back"
        perform(control, step)
    if left := steps(control, joined, due.run_id):
        raise PeerError(f"it took {needed} and still needs {left}")
    done = ", ".join(map(repr, needed)) or "nothing to do"
    if not joined.intact:
        return f"half loaded, it stays paused until a full sync: {done}"
    return f"holds {held or 'the weights it was started with'}: {done}"


class GuardProcess:
    """Reads the lanes' lines, steps the table, and recovers each server in a thread of its own."""

    def __init__(self, sock: socket.socket, parent: int) -> None:
        """``sock``: to the trainer's process, ``parent``."""
        self._sock, self._parent = sock, parent
        self._rest = b""
        # Until the trainer's first line, which has both.
        self._state = pause_guard.GuardState(pause_guard.Deadlines(0.0, 0.0))
        self._access = Access("", 0.0, 0.0, "")
        self._keys: dict[str, tuple[str, str]] = {}
        self._clean = False
        self._cancels: dict[str, threading.Event] = {}
        self._results: queue.SimpleQueue[pause_guard.Event] = queue.SimpleQueue()
        self._wake_read, self._wake_write = socket.socketpair()
        # A few hundred bytes fill it, and the one thread that reads it writes too.
        self._wake_write.setblocking(False)

    def run(self) -> None:
        """Run until the trainer has ended and no server is open."""
        # poll: select fails for a descriptor over 1023, as a busy trainer may pass one
        with selectors.PollSelector() as selector:
            selector.register(self._wake_read, selectors.EVENT_READ)
            selector.register(self._sock, selectors.EVENT_READ)
            # The socket alone is not enough: a child that the trainer forked holds the other end
            # open too.
            parent = _pidfd(self._parent)
            if parent >= 0:
                selector.register(parent, selectors.EVENT_READ)
            while not self._state.done:
                ended, due = self._state.ended, self._state.due
                wait_s = None if due is None else max(0.0, due - time.monotonic())
                # no deadline: the next due time, a lane's line, a result, or the trainer's end
                ready = {key.fileobj for key, _ in selector.select(wait_s)}
                if self._wake_read in ready:
                    # no deadline: something is there to be read
                    self._wake_read.recv(READ_BYTES)
                # The lanes' lines come before the tick: a pause that ended in time is not due.
                if not ended and (self._read() or parent < 0 or parent in ready):
                    for source in (self._sock, parent):
                        with suppress(KeyError, ValueError):
                            selector.unregister(source)
                    self._step(pause_guard.Ended(self._clean, time.monotonic()))
                while not self._results.empty():
                    # no deadline: the queue is not empty, and only this thread takes from it
                    self._step(self._results.get())
                self._step(pause_guard.Ticked(time.monotonic()))

    def _read(self) -> bool:
        """Take all lines that have come; return whether the stream has ended."""
        ended = False
        with suppress(BlockingIOError):
            while not ended:
                try:
                    # no deadline: MSG_DONTWAIT
                    data = self._sock.recv(READ_BYTES, socket.MSG_DONTWAIT)
                except ConnectionError:
                    data = b""
                ended = not data
                *lines, self._rest = (self._rest + data).split(b"\n")
                for line in lines:
                    self._take(msgspec.json.decode(line))
        return ended

    def _take(self, message: dict[str, Any]) -> None:
        match message["op"]:
            case "start":
                self._access = Access(**message["access"])
                deadlines = pause_guard.Deadlines(**message["deadlines"])
                self._state = pause_guard.GuardState(deadlines)
            case "server":
                self._keys[message["url"]] = (message["key"], message["admin_key"])
            case "event":
                event = msgspec.convert(message["event"], LaneEvent)
                self._step(pause_guard.LaneReported(event, time.monotonic()))
            case "end":
                self._clean = True

    def _step(self, event: pause_guard.Event) -> None:
        self._state, actions = pause_guard.step(self._state, event)
        for action in actions:
            match action:
                case pause_guard.Recover(url):
                    cancel = self._cancels[url] = threading.Event()
                    thread = threading.Thread(
                        target=self._recover, args=(action, cancel), name=url, daemon=True
                    )
                    try:
                        thread.start()
                    except RuntimeError as error:
                        # No free thread: a failed try. Raising would end the guard, and leave
                        # every open server paused.
                        log.warning("%s cannot be recovered now: %s", url, error)
                        self._end(pause_guard.Failed(url, action.number, time.monotonic()))
                case pause_guard.CancelRecovery(url):
                    self._cancels[url].set()
                case pause_guard.GiveUp(url):
                    log.error(
                        "%s did not answer in %d tries: it may be paused",
                        url,
                        self._state.deadlines.tries,
                    )

    def _recover(self, due: pause_guard.Recover, cancel: threading.Event) -> None:
        """Thread: try once to recover one server."""
        url, number = due.url, due.number
        result: type[pause_guard.Recovered | pause_guard.Failed] = pause_guard.Failed
        api_key, admin_key = self._keys.get(url, ("", ""))
        # AUTO: the server may have restarted with another engine.
        control = make_control(
            AUTO, ServerAccess(url, self._access.call_s, api_key=api_key, admin_key=admin_key)
        )
        taken = False
        try:
            if done := recover(control, self._access, due, cancel):
                log.info("%s %s", url, done)
            result = pause_guard.Recovered
        except SupersededError as newer:
            log.info("%s is left alone: %s", url, newer)
            taken = True
        except TitanGrpoError as error:
            log.warning("%s could not be recovered: %s", url, error)
        except Exception:  # top of a thread: log it, and recover the other servers
            log.exception("recovering %s ended by a bug", url)
        finally:
            control.close()
            now = time.monotonic()
            self._end(pause_guard.Superseded(url, number) if taken else result(url, number, now))

    def _end(self, result: pause_guard.Event) -> None:
        """Hand the result of a recovery to the main thread, and wake it."""
        self._results.put(result)
        with suppress(BlockingIOError):  # full: it wakes already
            self._wake_write.send(b".")


def _pidfd(pid: int) -> int:
    """Return a descriptor that becomes readable when the process ends; -1 if it has ended."""
    if os.getppid() != pid:
        return -1
    with suppress(ProcessLookupError):
        return os.pidfd_open(pid)
    return -1


def main(sock: socket.socket, parent: int) -> None:
    """Entry point of the process."""
    logging.basicConfig(
        level=logging.INFO, format="titan_grpo pause guard %(process)d %(asctime)s %(message)s"
    )
    GuardProcess(sock, parent).run()
    logging.shutdown()
    # Do not join recovery threads: a cancelled one may still wait for its server.
    os._exit(0)
