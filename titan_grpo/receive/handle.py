"""The engine's handle of its receiver process: starts it for an epoch, asks it with a deadline,
ends it."""

import logging
import os
import subprocess
import time
from typing import Any

from titan_grpo.errors import PeerError
from titan_grpo.protocol.fence import (
    CommitRequested,
    EngineState,
    Event,
    Loaded,
    OpenEpoch,
    Refuse,
    step,
)
from titan_grpo.protocol.messages import PROBE, Applied, Commit, Hello, Message
from titan_grpo.receive.unix_rpc import Channel
from titan_grpo.runkey import EpochKeys, Key
from titan_grpo.subprocesses import helper_environment, start_module, wait_process

ANSWER_S = 5.0
"""How long the engine waits for one answer of its receiver, in seconds. The engine stands still
meanwhile."""

KILL_S = 5.0
"""How long the engine waits for a killed receiver to be reaped, in seconds."""

log = logging.getLogger("titan_grpo.receive")


class ReceiverProcess:
    """One running receiver process and the channel to it."""

    def __init__(self, first: dict[str, Any]) -> None:
        """Start it and hand it its first message; returns at once."""
        # An engine may preload an allocator of its own; the keys of the epoch come over the socket.
        self._process, ours = start_module(
            "titan_grpo.receive.receiver_main",
            *("--parent", str(os.getpid())),
            env=helper_environment(os.environ, "LD_PRELOAD"),
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
        """One request; PeerError if it is gone, does not answer within ``timeout_s``, or
        refuses."""
        self._sent += 1
        self._channel.send({"id": self._sent, **message}, ANSWER_S)
        while (answer := self._channel.receive(timeout_s)) is not None:
            if answer["id"] != self._sent:
                continue  # the late answer to a request that was given up
            if not answer["ok"]:
                raise PeerError(str(answer["error"]))
            return answer
        raise PeerError(
            f"the receiver process ended (exit status {self._wait()}); the next hello starts"
            " another"
        )

    def kill(self) -> None:
        """End it at once; whatever it held of the epoch goes with it."""
        self._channel.close()
        self._process.kill()
        self._wait()

    def _wait(self) -> int | None:
        try:
            return wait_process(self._process, KILL_S)
        except subprocess.TimeoutExpired:
            log.warning(
                "receiver process %d was killed but is not gone after %s s", self.pid, KILL_S
            )
            return None


class ReceiverHandle:
    """Keeps the fence and what the engine holds across receiver processes; owns at most one that
    serves an epoch."""

    def __init__(self, package: str, run_key: Key | None = None) -> None:
        """``package``: name and version that the lane is told. With a run key only who proves it is
        served. Starts nothing."""
        self._package, self._run_key = package, run_key
        self._serving: ReceiverProcess | None = None
        self._answering: ReceiverProcess | None = None
        self._deadline = 0.0
        self._commit: Commit | None = None
        self.state = EngineState()

    def hello(self, hello: Hello, problem: str) -> str:
        """Serve a newer epoch that proves the run key; anything else is only answered. Why it was
        refused, or empty.

        ``problem``: why commits of this engine can not work; the lane is told on joining.
        """
        probe, keys = hello.transport == PROBE, self._keys(hello.run_id, hello.epoch)
        refusal = "" if probe and not hello.proof else _unproven(hello, keys)
        if refusal:
            keys = None
        elif not probe:
            refusal = self._step(OpenEpoch(hello.run_id, hello.epoch))
        if refusal or probe:
            self.answer(hello, problem or refusal, keys if hello.proof else None)
            return refusal
        self._drop_serving()
        self._serving = ReceiverProcess(self._first("serve", hello, problem, keys))
        return ""

    def answer(self, hello: Hello, problem: str, keys: EpochKeys | None = None) -> None:
        """Only answer: say ``problem`` to whoever sent the Hello, or, if that is empty, what the
        engine holds."""
        self._drop_answering()
        self._answering = ReceiverProcess(self._first("answer", hello, problem, keys))

    def lend(self, commit: Commit) -> dict[str, Any]:
        """``{"image": address, "manifest": JSON, "streamed": bool}``; PeerError if that version is
        not here and wanted.

        Streamed: the image is the window, and ``take`` follows.
        """
        self._commit = None  # whoever has not the key is not even told
        if unproven := _unproven(commit, self._keys(commit.run_id, commit.epoch)):
            raise PeerError(unproven)
        self._commit = commit if (commit.run_id, commit.epoch) == self.state.in_force else None
        if refusal := self._step(CommitRequested(commit.run_id, commit.epoch, commit.version)):
            raise PeerError(refusal)
        if self._serving is None:
            raise PeerError("no receiver serves this engine: send a hello first")
        answer = self._serving.ask({"op": "lend", "commit": commit.to_dict()})
        self._deadline = time.monotonic() + float(answer["timeout_s"])
        return {key: answer[key] for key in ("image", "manifest", "streamed")}

    def take(self, consumed: int) -> int:
        """See Window.take; waits until the deadline of the whole transfer, which began with
        ``lend``."""
        if self._serving is None:
            raise PeerError("no receiver serves this engine")
        left = max(0.0, self._deadline - time.monotonic())
        # the receiver answers by the deadline, unless it hangs
        answer = self._serving.ask(
            {"op": "take", "consumed": consumed, "wait_s": left}, left + ANSWER_S
        )
        return int(answer["filled"])

    def applied(self, commit: Commit, report: Applied) -> None:
        """Note how a commit ended and tell the lane; returns when its store has it. PeerError if it
        can not be told."""
        if self._commit is not commit:
            # the lane in force waits for a report of the same number: it must not get this one
            raise PeerError("the commit was not one of the epoch in force: nobody is told")
        self._commit = None
        if self.state.granted is not None:
            self._step(
                Loaded(commit.run_id, commit.version, commit.fingerprint, report.ok, report.intact)
            )
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

    def _step(self, event: Event) -> str:
        """Why the fence refuses; empty if it does not."""
        self.state, actions = step(self.state, event)
        return next((action.reason for action in actions if isinstance(action, Refuse)), "")

    def _keys(self, run_id: str, epoch: int) -> EpochKeys | None:
        return EpochKeys.of(self._run_key, run_id, epoch) if self._run_key is not None else None

    def _first(self, op: str, hello: Hello, problem: str, keys: EpochKeys | None) -> dict[str, Any]:
        h = self.state
        held = {
            "run": h.run,
            "version": h.version,
            "fingerprint": h.fingerprint,
            "intact": h.intact,
        }
        held |= {"problem": problem, "package": self._package, "keyed": self._run_key is not None}
        return {
            "op": op,
            "hello": hello.to_dict(),
            "held": held,
            "keys": keys.to_hex() if keys is not None else None,
        }

    def _drop_serving(self) -> None:
        if self._serving is not None:
            self._serving.kill()
            self._serving = None

    def _drop_answering(self) -> None:
        if self._answering is not None:
            self._answering.kill()
            self._answering = None


def _unproven(message: Message, keys: EpochKeys | None) -> str:
    """Why a message is not believed; empty if it is."""
    try:
        message.require_proof(keys.messages if keys is not None else None)
    except PeerError as error:
        return str(error)
    return ""
