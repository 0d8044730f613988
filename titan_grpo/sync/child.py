"""A process beside a rank that is started again when it ends: rank 0's sync process (process.py)
and another trainer host's (host.py)."""

import logging
import os
import subprocess
import threading
import time
from typing import TYPE_CHECKING, ClassVar, Protocol

from titan_grpo.config import WeightSync
from titan_grpo.subprocesses import helper_environment, start_module, wait_process
from titan_grpo.sync.pipe import Pipe

if TYPE_CHECKING:
    import socket

logger = logging.getLogger(__name__)

RESTART_S = 10.0
"""Least time between two starts of the process, but for the first two, in seconds."""

END_S = 2.0
"""Seconds for the process to end after its work."""

Launched = tuple["subprocess.Popen[bytes]", "socket.socket"]


class Launch(Protocol):
    """Start the process, which loads its modules and waits."""

    def __call__(self, config: WeightSync) -> Launched:
        """Raises OSError."""


def launch(config: WeightSync, module: str) -> Launched:
    """See Launch."""
    cuda = {} if config.transport == "nccl" else {"CUDA_VISIBLE_DEVICES": ""}
    parent = "--parent", str(os.getpid())
    return start_module(module, *parent, env=helper_environment(os.environ) | cuda)


class Child:
    """One process at a time; what it posts are calls of this object's methods."""

    launch: ClassVar[Launch]
    NAME: ClassVar[str]

    def __init__(self, config: WeightSync) -> None:
        """Starts nothing: see ``_run``."""
        self._config = config
        self.lock = threading.RLock()
        """Of what a restart hands over, and of the pipe that is there: never held over a wait."""
        self._ending = threading.Event()
        self._starts: list[float] = []
        self._begun = False

    @property
    def pid(self) -> int:
        """Of the process that runs now."""
        return self._process.pid

    def post(self, method: str, *arguments: object) -> None:
        """Call a method of the process's own object. Any thread; never waits."""
        with self.lock:
            self._pipe.post(method, *arguments)

    def _begin(self) -> None:
        """Under the lock: hand over what there is."""
        raise NotImplementedError

    def _ended(self, text: str) -> None:
        """The process has ended, and is started again."""
        raise NotImplementedError

    def _run(self, launched: Launched) -> None:
        """Have a process go on, and a thread perform what it posts until its end."""
        process, sock = launched
        self._starts = [*self._starts[-1:], time.monotonic()]
        with self.lock:
            self._process, self._pipe = process, Pipe(sock, self)
            self._pipe.start()
            if self._begun:
                self._begin()
        self._thread = threading.Thread(
            target=self._receive, args=(self._pipe,), name=self.NAME, daemon=True
        )
        self._thread.start()

    def _receive(self, pipe: Pipe) -> None:
        """Thread: the process that runs now, to its end; then the next one."""
        try:
            pipe.receive()
        except Exception:  # top of a thread: it would go on and nobody listen
            logger.exception("what the %s said could not be performed", self.NAME)
            self._process.kill()
        try:
            status = wait_process(self._process, END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            status = wait_process(self._process, END_S)
        pipe.close()
        if self._ending.is_set():
            return
        self._ended(f"the {self.NAME} ended with exit code {status}: it is started again")
        while not self._ending.wait(self._rest_s()):
            try:
                self._run(self.launch(self._config))
            except OSError as error:
                logger.warning("the %s cannot be started: %s", self.NAME, error)
                continue
            return

    def _rest_s(self) -> float:
        return max(0.0, self._starts[0] + RESTART_S - time.monotonic()) * (len(self._starts) > 1)

    def _end(self, within_s: float) -> None:
        """Have the process end; it is killed after ``within_s`` seconds."""
        self._ending.set()
        self.post("end")
        try:
            if not self._begun:
                self._process.kill()
            wait_process(self._process, within_s)
        except subprocess.TimeoutExpired:
            # What it left paused is its pause guard's.
            self._process.kill()
        self._thread.join(END_S)
