"""The engine's handle of its receiver process: starts it for an epoch, asks it with a deadline, ends it."""

import logging
import os
import socket
import subprocess
import sys
import time
from dataclasses import asdict
from typing import Any

from titan_grpo.errors import PeerError
from titan_grpo.protocol.wire import PROBE, Applied, Commit, Hello, Holding
from titan_grpo.receive.channel import Channel

ANSWER_S = 5.0
"""How long the engine waits for one answer of its receiver, in seconds. The engine stands still meanwhile."""

KILL_S = 5.0
"""How long the engine waits for a killed receiver to be reaped, in seconds."""

LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")

log = logging.getLogger("titan_grpo.receive")


def receiver_environment(environ: dict[str, str]) -> dict[str, str]:
    """The engine's environment without a launcher's variables and preloads, and with one thread for torch. Pure."""
    dropped = (*LAUNCHER_VARIABLES, "LD_PRELOAD", "OMP_NUM_THREADS")
    kept = {k: v for k, v in environ.items() if k not in dropped and not k.startswith("TORCHELASTIC_")}
    # C++ stack traces of every lost connection would fill the server's log
    return kept | {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}


class ReceiverProcess:
    """One running receiver process and the channel to it."""

    def __init__(self, first: dict[str, Any]) -> None:
        """Start it and hand it its first message; returns at once."""
        ours, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-m", "titan_grpo.receive.process", "--fd", str(theirs.fileno())]
            self._process = subprocess.Popen(
                [*command, "--parent", str(os.getpid())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env=receiver_environment(dict(os.environ)),
            )
        self._channel = Channel(ours)
        self._sent = 0
        self._channel.send(first, ANSWER_S)

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def poll(self) -> int | None:
        """Its exit status, None while it runs."""
        return self._process.poll()

    def ask(self, message: dict[str, Any], timeout_s: float = ANSWER_S) -> dict[str, Any]:
        """One request; PeerError if it is gone, does not answer within ``timeout_s``, or refuses."""
        self._sent += 1
        self._channel.send({"id": self._sent, **message}, ANSWER_S)
        while (answer := self._channel.receive(timeout_s)) is not None:
            if answer["id"] != self._sent:
                continue  # the late answer to a request that was given up
            if not answer["ok"]:
                raise PeerError(str(answer["error"]))
            return answer
        raise PeerError(f"the receiver process ended (exit status {self._wait()}); the next hello starts another")

    def kill(self) -> None:
        """End it at once; whatever it held of the epoch goes with it."""
        self._channel.close()
        self._process.kill()
        self._wait()

    def _wait(self) -> int | None:
        try:
            return self._process.wait(KILL_S)
        except subprocess.TimeoutExpired:
            log.warning("receiver process %d was killed but is not gone after %s s", self.pid, KILL_S)
            return None


class ReceiverClient:
    """Keeps the fence and what the engine holds across receiver processes; owns at most one that serves an epoch."""

    def __init__(self, package: str) -> None:
        """``package``: name and version that the lane is told. Starts nothing."""
        self._package = package
        self._serving: ReceiverProcess | None = None
        self._answering: ReceiverProcess | None = None
        self._deadline = 0.0
        self.holding = Holding()

    def hello(self, hello: Hello, problem: str) -> str:
        """Serve a newer epoch; a probe or an older one is only answered. Why it was refused, or empty.

        ``problem``: why commits of this engine can not work; the lane is told on joining.
        """
        refusal = "" if hello.transport == PROBE else self.holding.refuses_hello(hello)
        if refusal or hello.transport == PROBE:
            self._drop_answering()
            self._answering = ReceiverProcess(self._first("answer", hello, refusal or problem))
            return refusal
        self.holding = self.holding.admitted(hello)
        self._drop_serving()
        self._serving = ReceiverProcess(self._first("serve", hello, problem))
        return ""

    def lend(self, commit: Commit) -> dict[str, Any]:
        """``{"image": address, "manifest": JSON, "streamed": bool}``; PeerError if that version is not here and wanted.

        Streamed: the image is the window, and ``take`` follows.
        """
        if refusal := self.holding.refuses_commit(commit):
            raise PeerError(refusal)
        if self._serving is None:
            raise PeerError("no receiver serves this engine: send a hello first")
        answer = self._serving.ask({"op": "lend", "commit": commit.to_dict()})
        self._deadline = time.monotonic() + float(answer["timeout_s"])
        return {key: answer[key] for key in ("image", "manifest", "streamed")}

    def take(self, consumed: int) -> int:
        """See Window.take; waits until the deadline of the whole transfer, which began with ``lend``."""
        if self._serving is None:
            raise PeerError("no receiver serves this engine")
        left = max(0.0, self._deadline - time.monotonic())
        # the receiver answers by the deadline, unless it hangs
        answer = self._serving.ask({"op": "take", "consumed": consumed, "wait_s": left}, left + ANSWER_S)
        return int(answer["filled"])

    def applied(self, report: Applied) -> None:
        """Tell the lane how a commit ended; returns when the lane's store has it. PeerError if it can not be told."""
        if self._serving is None:
            raise PeerError("no receiver serves this engine")
        self._serving.ask({"op": "applied", "applied": report.to_dict()})

    @property
    def pid(self) -> int | None:
        """Process id of the receiver that serves the epoch in force, None if there is none."""
        return self._serving.pid if self._serving is not None else None

    def close(self) -> None:
        """End every process."""
        self._drop_serving()
        self._drop_answering()

    def _first(self, op: str, hello: Hello, problem: str) -> dict[str, Any]:
        h = asdict(self.holding)
        held = {key: h[key] for key in ("run", "version", "fingerprint", "intact")}
        return {"op": op, "hello": hello.to_dict(), "held": held | {"problem": problem, "package": self._package}}

    def _drop_serving(self) -> None:
        if self._serving is not None:
            self._serving.kill()
            self._serving = None

    def _drop_answering(self) -> None:
        if self._answering is not None:
            self._answering.kill()
            self._answering = None
