"""Common base of the sync processes of rank 0 (process.py) and of another trainer host (host.py): a
process beside a rank, restarted when it ends or stands still, with a pipe to the rank."""

import logging
import os
import socket
import subprocess
import threading
import time
from typing import ClassVar

import torch

from titan_grpo.config import WeightSync
from titan_grpo.subprocesses import (
    ENDING,
    exit_with_parent,
    helper_environment,
    how_ended,
    is_stopped,
    start_module,
    wait_process,
    write_stacks,
)
from titan_grpo.unix_rpc import SILENT_S, Pipe

logger = logging.getLogger(__name__)

RESTART_S = 10.0
"""Least seconds from a start of the process, also one that fails, to the next but one."""

END_S = 2.0
"""Seconds for the process to end after its work."""

Launched = tuple["subprocess.Popen[bytes]", socket.socket]

NICE = 10
"""Niceness of the process: training comes first if cores are few (scripts/bench_lanes.py)."""


class Child:
    """The rank's end: one process at a time, which calls this object's methods over the pipe."""

    MODULE: ClassVar[str]
    NAME: ClassVar[str]

    def __init__(self, config: WeightSync) -> None:
        """Start nothing: see ``_run``."""
        self._config = config
        self.lock = threading.RLock()
        """Guards the pipe and the state that a restart hands over. Never held over a wait."""
        self._ending = threading.Event()
        self._starts: list[float] = []
        self._begun = False

    @classmethod
    def launch(cls, config: WeightSync) -> Launched:
        """Start a process, which loads its modules and waits. Raises OSError."""
        cuda = {} if config.transport == "nccl" else {"CUDA_VISIBLE_DEVICES": ""}
        # A signal to the trainer's process group ends the trainer, whose end ends this process.
        # Until then the lanes finish their commits.
        env = helper_environment(os.environ) | cuda
        return start_module(cls.MODULE, env=env, ignored=ENDING)

    @property
    def pid(self) -> int:
        return self._process.pid

    def post(self, method: str, *arguments: object) -> None:
        """Have the process call a method of its Performer. Any thread; never waits."""
        with self.lock:
            self._pipe.post(method, *arguments)

    def _begin(self) -> None:
        """Hand the state over to a new process. Called under the lock."""
        raise NotImplementedError

    def _ended(self, text: str) -> None:
        """Report that the process ended and is restarted."""
        raise NotImplementedError

    def _run(self, launched: Launched) -> None:
        """Attach to the first process, and start the thread that performs its calls."""
        self._starts = [time.monotonic()]
        self._attach(launched)
        self._thread = threading.Thread(target=self._receive, name=self.NAME, daemon=True)
        self._thread.start()

    def _attach(self, launched: Launched) -> None:
        """Hand the state over to a process, in place of the one before. Kills it and raises
        RuntimeError if the system has no thread left."""
        process, sock = launched
        pipe = Pipe(sock, self)
        try:
            pipe.start()
        except RuntimeError:
            _kill(process)  # without a pipe nothing else ends it
            raise
        with self.lock:
            self._process, self._pipe = process, pipe
            if self._ending.is_set():
                process.kill()  # _end() may have posted to the one before: nothing else ends this
            elif self._begun:
                self._begin()

    def _receive(self) -> None:
        """Thread: perform a process's calls until it ends, then start the next one."""
        while True:
            how = self._perform()
            if self._ending.is_set():
                return
            self._ended(f"the {self.NAME} {how}: it is started again")
            while not self._ending.wait(self._rest_s()):
                # First: a start that fails counts too, or this loop would not rest.
                self._starts = [self._starts[-1], time.monotonic()]
                try:
                    self._attach(self.launch(self._config))
                    break
                # The system has no process, memory, descriptor or (RuntimeError) thread left.
                except (OSError, RuntimeError) as error:
                    logger.warning("the %s cannot be started now: %s", self.NAME, error)
            else:
                return

    def _perform(self) -> str:
        """Perform the process's calls until it ends; return how it ended."""
        pipe, process, how = self._pipe, self._process, ""

        def kill(seconds: float) -> None:
            nonlocal how
            how = f"has given no sign for {seconds:g} s and was killed"
            if not is_stopped(process.pid):
                write_stacks(process)
            process.kill()

        try:
            # It may take long to load its modules. Then its reading thread never waits for long.
            pipe.receive(max(SILENT_S, self._config.startup_deadline_s), SILENT_S, kill)
        except Exception:  # top of a thread: end the process, whose calls have no reader now
            logger.exception("what the %s said could not be performed", self.NAME)
            process.kill()
        try:
            status = wait_process(process, END_S)
        except subprocess.TimeoutExpired:
            # Its pipe is closed but it still runs: two processes must not have lanes to one server.
            status = _kill(process)
        pipe.close()  # ends the pipe's sending thread, which waits without a deadline
        return how or f"ended with {how_ended(status)}"

    def _rest_s(self) -> float:
        return max(0.0, self._starts[0] + RESTART_S - time.monotonic()) * (len(self._starts) > 1)

    def _end(self, within_s: float) -> None:
        """Have the process end; kill it after ``within_s`` seconds."""
        self._ending.set()
        if self._begun:
            self.post("end")
        else:
            self._process.kill()
        try:
            wait_process(self._process, within_s)
        except subprocess.TimeoutExpired:
            # The pause guard recovers servers that it left paused.
            self._process.kill()
        self._thread.join(END_S)


def _kill(process: "subprocess.Popen[bytes]") -> int:
    """Kill a process, and wait until it is gone; return its exit code."""
    process.kill()
    # no deadline: the kernel ends it; no other may start before
    return process.wait()


# In the process.


class Performer:
    """The process's end: performs the rank's calls, one after the other."""

    def __init__(self, sock: socket.socket) -> None:
        self._pipe = Pipe(sock, self)

    def run(self) -> None:
        """Perform calls until the rank ends."""
        self._pipe.start()
        self._pipe.receive()

    def exit(self) -> None:
        """End the process, after the rank has been sent why."""
        self._pipe.close(END_S)
        logging.shutdown()
        os._exit(0)


def perform(sock: socket.socket, parent: int, make: type[Performer]) -> None:
    """Run a sync process until ``parent`` ends."""
    exit_with_parent(parent)
    logging.basicConfig(level=logging.WARNING, format="titan_grpo sync %(process)d: %(message)s")
    torch.set_num_threads(1)
    os.nice(NICE)
    make(sock).run()
    # The rank is gone. Skip the interpreter's shutdown: lanes may still wait for their servers.
    os._exit(1)
