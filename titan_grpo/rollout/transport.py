"""The worker transport: carries messages between the trainer's rank 0 and what makes its rollouts.
Here the interface, and the transport to a child process; remote.py has the one to a service."""

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
class SessionLost:
    """The remote lost our session (restart or lease expiry). Unanswered messages are lost; send the
    state again.

    ``resync`` opens a new session there with a spec and its first messages. Messages that are sent
    after ``resync`` belong to the new session, so call it under the lock under which you send.
    Never blocks.
    """

    resync: Callable[[RolloutSpec, Sequence[messages.ToWorker]], None]


Message = messages.FromWorker | SessionLost | TitanGrpoError
"""What a transport delivers. After an error nothing follows."""

OnMessage = Callable[[Message], None]
"""Called by a thread of the transport, in the order of sending; must not block."""


class WorkerTransport(Protocol):
    """Carries messages both ways, in order and each of them once. Used by one client."""

    def start(self, spec: RolloutSpec, on_message: OnMessage, timeout_s: float) -> None:
        """Begin. ``on_message`` gets ``Ready``, or an error. ``timeout_s``: deadline of this
        call."""

    def send(self, message: messages.ToWorker, within_s: float | None = None) -> None:
        """Any thread; never blocks. A message that could not be delivered within ``within_s``
        seconds may be left out."""

    def close(self, deadline_s: float) -> None:
        """Abort and end the remote, within the deadline. Idempotent; raises nothing. Errors may be
        delivered meanwhile."""


class LocalTransport:
    """Starts ``rollout.worker`` as a child and exchanges pickled messages over a socket pair. The
    child ends with this process, however that dies: its end of the socket closes."""

    def __init__(self) -> None:
        self._out: queue.SimpleQueue[messages.ToWorker | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int | None:
        """Of the child; None while there is none."""
        return None if self._process is None else self._process.pid

    def start(self, spec: RolloutSpec, on_message: OnMessage, timeout_s: float) -> None:
        """Start the process, which loads task and tokenizer."""
        self._on_message = on_message
        # The rollout process has no business on a GPU.
        self._process, self._socket = start_module(
            "titan_grpo.rollout.worker",
            env=helper_environment(os.environ) | {"CUDA_VISIBLE_DEVICES": ""},
        )
        # A second descriptor: the socket can then be shut down while threads sit in the connection.
        self._connection: Connection[Any, Any] = Connection(os.dup(self._socket.fileno()))
        self._connection.send(spec)
        for name, target in (("send", self._send_loop), ("receive", self._receive_loop)):
            thread = threading.Thread(target=target, name=f"rollout-{name}", daemon=True)
            thread.start()
            self._threads.append(thread)

    def send(self, message: messages.ToWorker, within_s: float | None = None) -> None:
        """As WorkerTransport.send; delivery takes no time here."""
        self._out.put(message)

    def close(self, deadline_s: float) -> None:
        """Stop the process (killed past the deadline) and the threads."""
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
        # no deadline: close() puts None into the queue; the thread is a daemon
        while (message := self._out.get()) is not None:
            try:
                self._connection.send(message)
            except OSError:
                return  # The process is gone; the receiving thread reports it.

    def _receive_loop(self) -> None:
        try:
            while True:
                # no deadline: ends with the process, whose end closes the socket
                self._on_message(self._connection.recv())
        except (EOFError, OSError):
            self._on_message(
                RolloutStopped(
                    f"the rollout process ended with {self._exit_status()}; its last output is"
                    " above"
                )
            )
        except Exception as error:  # noqa: BLE001 - top of a thread: next_batch raises it
            self._on_message(
                RolloutStopped(f"the rollout process sent something unreadable: {error!r}")
            )

    def _exit_status(self) -> str:
        process = self._process
        if process is None:
            return "its client"
        with suppress(subprocess.TimeoutExpired):
            return f"exit code {wait_process(process, 5.0)}"
        return "its connection closed while it still runs"
