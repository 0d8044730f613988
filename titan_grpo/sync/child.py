"""What the sync processes of rank 0 (process.py) and of another trainer host (host.py) have in
common: each is beside a rank, is started again when it ends, and has a pipe to the rank."""

import logging
import os
import signal
import socket
import subprocess
import threading
import time
from typing import ClassVar

import torch

from titan_grpo.config import WeightSync
from titan_grpo.subprocesses import exit_with_parent, helper_environment, start_module, wait_process
from titan_grpo.unix_rpc import Pipe

logger = logging.getLogger(__name__)

RESTART_S = 10.0
"""Least time between two starts of the process, but for the first two, in seconds."""

END_S = 2.0
"""Seconds for the process to end after its work."""

Launched = tuple["subprocess.Popen[bytes]", socket.socket]

NICE = 10
"""The process gives way to training where cores are few (scripts/bench_lanes.py)."""


class Child:
    """One process at a time; what it posts are calls of this object's methods."""

    MODULE: ClassVar[str]
    NAME: ClassVar[str]

    def __init__(self, config: WeightSync) -> None:
        """Starts nothing: see ``_run``."""
        self._config = config
        self.lock = threading.RLock()
        """Of what a restart hands over, and of the pipe that is there: never held over a wait."""
        self._ending = threading.Event()
        self._starts: list[float] = []
        self._begun = False

    @classmethod
    def launch(cls, config: WeightSync) -> Launched:
        """Start the process, which loads its modules and waits. Raises OSError."""
        cuda = {} if config.transport == "nccl" else {"CUDA_VISIBLE_DEVICES": ""}
        return start_module(cls.MODULE, env=helper_environment(os.environ) | cuda)

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
        except Exception:  # top of a thread: the process would post to no one
            logger.exception("what the %s said could not be performed", self.NAME)
            self._process.kill()
        try:
            status = wait_process(self._process, END_S)
        except subprocess.TimeoutExpired:
            # Its end of the pipe is closed and it runs: the next one must not meet it at a server.
            self._process.kill()
            status = wait_process(self._process, END_S)
        pipe.close()  # ends its sending thread, which would wait for ever
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


# In the process.


class Performer:
    """Performs what the rank posts that started the process, one call after the other."""

    def __init__(self, sock: socket.socket) -> None:
        self._pipe = Pipe(sock, self)

    def run(self) -> None:
        """Until the rank ends."""
        self._pipe.start()
        self._pipe.receive()

    def exit(self) -> None:
        """End the process."""
        self._pipe.close()
        logging.shutdown()
        os._exit(0)


def perform(sock: socket.socket, parent: int, make: type[Performer]) -> None:
    """Be a sync process until ``parent`` ends."""
    exit_with_parent(parent)
    # A signal to the trainer's group ends the trainer, and the end of that ends this process: until
    # then its lanes finish their commits.
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    logging.basicConfig(level=logging.WARNING, format="titan_grpo sync %(process)d: %(message)s")
    torch.set_num_threads(1)
    os.nice(NICE)
    make(sock).run()
    # The rank is gone. Lanes may wait for their servers: sys.exit would join their threads.
    os._exit(1)
