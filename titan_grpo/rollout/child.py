"""Transport to a rollout process as a child of this one, which is replaced when it is killed."""

import os
import socket
import subprocess
import threading
from collections.abc import Sequence
from contextlib import suppress

from titan_grpo.rollout import messages
from titan_grpo.rollout.messages import OnMessage, RolloutSpec, RolloutStopped, SessionLost
from titan_grpo.subprocesses import (
    ENDING,
    helper_environment,
    how_ended,
    is_stopped,
    start_module,
    wait_process,
    write_stacks,
)
from titan_grpo.unix_rpc import SILENT_S, Pipe


class LocalTransport:
    """Transport to ``rollout.worker`` as a child process. The child ends when this process does,
    even by SIGKILL: the socket between them closes.

    A child that is killed, for want of memory, say, or by a fault in a library of the task, is
    replaced (SessionLost). One that has loaded, and whose loop stands still for ``task_timeout_s``,
    is killed and replaced: a call of the task blocks the loop, or holds the interpreter in C code,
    and nothing in that process can end it. One that is stopped is waited for.
    """

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._starting = threading.Lock()
        """Held while a process starts. None starts after ``close``."""
        self._closing = False

    def start(self, spec: RolloutSpec, on_message: OnMessage) -> None:
        self._deliver, self._patience_s = on_message, spec.task_timeout_s
        self._begin(spec, ())

    def _begin(self, spec: RolloutSpec, first: Sequence[messages.ToWorker]) -> None:
        """Start a process, and the thread that receives from it. Raises OSError."""
        with self._starting:
            if self._closing:
                return
            # No GPU is visible to the rollout process.
            process, sock = start_module(
                "titan_grpo.rollout.worker",
                env=helper_environment(os.environ) | {"CUDA_VISIBLE_DEVICES": ""},
            )
            self._process, self._socket = process, sock
            # A second descriptor, for the shutdown in close(): a process that a task forked may
            # keep the child's end open, so that the child's exit alone would not end the thread.
            self._pipe = Pipe(sock.dup(), self)
            self._pipe.post("begin", spec)
            for message in first:
                self.send(message)
            self._loaded = self._failed = False
            self._thread = threading.Thread(
                target=self._receive,
                args=(process, self._pipe, sock),
                name="rollout-receive",
                daemon=True,
            )
            try:
                self._pipe.start()
                self._thread.start()
            except RuntimeError as error:  # this host has no thread left now
                self._process = None
                process.kill()
                wait_process(process, 5.0)
                raise OSError(f"no thread for the rollout process's pipe: {error}") from error

    def send(self, message: messages.ToWorker, within_s: float | None = None) -> None:
        self._pipe.post("take", message)

    def close(self, deadline_s: float) -> None:
        """Stop the process (kill it past the deadline) and its threads."""
        with self._starting:
            self._closing = True
        if self._process is None:
            return
        self.send(messages.Stop())
        try:
            wait_process(self._process, deadline_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            # A process in an uninterruptible wait of the kernel outlives the kill for a while.
            with suppress(subprocess.TimeoutExpired):
                wait_process(self._process, 5.0)
        with suppress(OSError):  # its thread may have closed it
            self._socket.shutdown(socket.SHUT_RDWR)
        self._thread.join(5.0)
        self._process = None

    def on_message(self, message: messages.FromWorker) -> None:
        """Deliver a message: the child calls this."""
        self._loaded = True
        self._failed |= isinstance(message, messages.Failed)
        self._deliver(message)

    def _receive(self, process: "subprocess.Popen[bytes]", pipe: Pipe, sock: socket.socket) -> None:
        killed, stood_s = False, 0.0

        def silent(seconds: float) -> None:
            nonlocal stood_s
            if process.poll() is None:
                if self._may_go_on(process, seconds):
                    return
                stood_s = seconds
                process.kill()
            # A process that a task forked may have the child's end of the connection too.
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

        try:
            pipe.receive(SILENT_S, SILENT_S, silent)
        except Exception as error:  # noqa: BLE001 - top of a thread: next_batch raises it
            text = f"the rollout process sent something unreadable: {error!r}"
        else:
            text, killed = _end_of(process)
        if stood_s:
            silence = f"the rollout process has given no sign for {stood_s:g} s"
            text = f"{silence} (rollout.task_timeout_s is over) and was killed"
        pipe.close(5.0)
        sock.close()
        if killed and not (self._failed or self._closing):
            try:
                self._deliver(SessionLost(self._begin, text, killed=True))
                return
            except OSError as error:
                text += f", and cannot be started again: {error}"
        self._deliver(RolloutStopped(f"{text}; its last output is above"))

    def _may_go_on(self, process: "subprocess.Popen[bytes]", seconds: float) -> bool:
        """Say why a process gives no sign. Return whether to wait for it."""
        stopped = is_stopped(process.pid)
        if stopped:
            why = "it is stopped, by a debugger maybe"
        elif not self._loaded:
            why = "it loads the task"
        else:
            why = "a coroutine of the task blocks its loop, or C code holds its interpreter"
        text = f"the rollout process has given no sign for {seconds:g} s: {why}"
        self._deliver(messages.Event(text, {}))
        if stopped or not self._loaded:
            return True
        write_stacks(process)
        return seconds < self._patience_s


def _end_of(process: "subprocess.Popen[bytes]") -> tuple[str, bool]:
    """Return in words how a process ended, and whether it was killed, by a signal other than those
    that end a run."""
    try:
        status = wait_process(process, 5.0)
    except subprocess.TimeoutExpired:
        return "the rollout process closed its connection and still runs", False
    text = f"the rollout process ended with {how_ended(status)}"
    return text, status < 0 and -status not in ENDING
