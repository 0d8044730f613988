"""The way between the trainer's rank 0 and what makes its rollouts: a child process, or a service
elsewhere. The seam.

The rollout process as a child of this one, with pickled messages over a socket pair."""

import os
import queue
import socket
import subprocess
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, Protocol

from titan_grpo.errors import TitanGrpoError
from titan_grpo.rollout import messages
from titan_grpo.rollout.spec import RolloutSpec
from titan_grpo.subprocesses import helper_environment, start_module, wait_process


class RolloutStopped(TitanGrpoError):
    """The rollout process ended, or stopped delivering: no further batch can come."""


@dataclass(frozen=True, slots=True)
class Forgotten:
    """The far end was restarted, or let go of us: it knows nothing, and what was sent and not
    answered is lost.

    ``tell`` opens a new session there: its spec, and the messages that come first in it. Whatever
    is sent after ``tell`` belongs to the new session, so whoever calls it holds the lock under
    which it sends. Never blocks.
    """

    tell: Callable[[RolloutSpec, Sequence[messages.ToWorker]], None]


Heard = messages.FromWorker | Forgotten | TitanGrpoError
"""What comes from a link. An error says that nothing will come any more."""

Hear = Callable[[Heard], None]
"""Called by a thread of the link, with one message after the other in the order in which they were
sent; must not block."""


class Link(Protocol):
    """Carries messages both ways, in order and each of them once. Used by one client."""

    def start(self, spec: RolloutSpec, hear: Hear, timeout_s: float) -> None:
        """Begin. What becomes of it is heard: ``Ready``, or an error. ``timeout_s``: deadline of
        what is done in this call."""

    def send(self, message: messages.ToWorker, within_s: float | None = None) -> None:
        """Any thread; never blocks. A message that is still on its way after ``within_s`` seconds
        need not be delivered."""

    def close(self, deadline_s: float) -> None:
        """Have the far end abort everything and end; within the deadline. Idempotent; raises
        nothing. Errors may be heard."""


class LocalLink:
    """Starts ``rollout.worker`` and talks to it. It ends with this process, whatever that dies
    of."""

    def __init__(self) -> None:
        self._out: queue.SimpleQueue[messages.ToWorker | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int | None:
        """Of the child; None while there is none."""
        return None if self._process is None else self._process.pid

    def start(self, spec: RolloutSpec, hear: Hear, timeout_s: float) -> None:
        """Start the process, which loads task and tokenizer."""
        self._hear = hear
        # The rollout process has no business on a GPU.
        self._process, self._socket = start_module(
            "titan_grpo.rollout.worker",
            env=helper_environment(os.environ) | {"CUDA_VISIBLE_DEVICES": ""},
        )
        # A second descriptor: the socket can then be shut down while threads sit in the connection.
        self._connection: Connection[Any, Any] = Connection(os.dup(self._socket.fileno()))
        self._connection.send(spec)
        for target in (self._send_loop, self._receive_loop):
            thread = threading.Thread(
                target=target, name=f"rollout-{target.__name__.strip('_')}", daemon=True
            )
            thread.start()
            self._threads.append(thread)

    def send(self, message: messages.ToWorker, within_s: float | None = None) -> None:
        """As Link.send: nothing is on its way for long here."""
        self._out.put(message)

    def close(self, deadline_s: float) -> None:
        """Stop the process (killed past the deadline) and the threads. Idempotent; raises
        nothing."""
        self._out.put(messages.Stop())
        self._out.put(None)
        if self._process is None:
            return
        try:
            wait_process(self._process, deadline_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            wait_process(self._process, 5.0)
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(5.0)
        self._connection.close()
        self._socket.close()
        self._process = None

    def _send_loop(self) -> None:
        # no deadline: close() of its owner puts None into the queue; the thread is a daemon
        while (message := self._out.get()) is not None:
            try:
                self._connection.send(message)
            except OSError:
                return  # The process is gone; the receiving thread reports it.

    def _receive_loop(self) -> None:
        try:
            while True:
                # no deadline: ends with the other process, whose end closes the stream
                self._hear(self._connection.recv())
        except (EOFError, OSError):
            self._hear(
                RolloutStopped(
                    f"the rollout process ended with {self._exit_status()}; its last output is"
                    " above"
                )
            )
        except Exception as error:  # noqa: BLE001 - top of a thread: latched, and raised by next_batch
            self._hear(RolloutStopped(f"the rollout process sent something unreadable: {error!r}"))

    def _exit_status(self) -> str:
        process = self._process
        if process is None:
            return "its client"
        with suppress(subprocess.TimeoutExpired):
            return f"exit code {wait_process(process, 5.0)}"
        return "its connection closed while it still runs"
