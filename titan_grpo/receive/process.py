"""The receiver process, one per epoch: the engine's handle, which starts, calls and kills it, and
the code that runs in it.

It is a separate process because a communicator can abort its process (gloo if more bytes come than
announced, NCCL by its watchdog), and because a hanging epoch can then be killed alone.
"""

import logging
import os
import socket
import subprocess
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from titan_grpo.errors import PeerError, TitanGrpoError
from titan_grpo.protocol.messages import PROBE, Applied, Attach, Commit, Hello, Joined, Message
from titan_grpo.protocol.server import (
    CommitRequested,
    EngineState,
    FenceEvent,
    Loaded,
    OpenEpoch,
    fence,
)
from titan_grpo.receive.fetch import RELAY_HOST
from titan_grpo.receive.receiver import CERTIFICATE, CERTIFICATE_KEY, Place, Receiver
from titan_grpo.runkey import EpochKeys, Key
from titan_grpo.subprocesses import (
    end_with_parent,
    helper_environment,
    how_ended,
    start_module,
    use_any_memory,
    wait_process,
    when_ended,
)
from titan_grpo.unix_rpc import Channel

ANSWER_S = 5.0
"""Seconds to wait for one answer of the receiver. The engine is blocked meanwhile."""

SIGN_S = 2.0
"""Seconds to wait for a receiver's report of its trainer's last sign of life, before another run
takes the server."""

KILL_S = 5.0
"""Seconds to wait for a killed receiver to be reaped."""

ANSWERING = 8
"""Most hellos which open no epoch that are being answered at once. No further one is answered."""

REPLY_S = 10.0
"""How long an answer to the engine, or of the engine to a hello, may block, in seconds."""

ZONE = "TITAN_GRPO_ZONE"
"""Environment variable: see receiver.Place.zone."""

LAST_LINE = 0
"""Id of the message that a receiver process leaves for the engine at its end; requests count from
1."""

log = logging.getLogger("titan_grpo.receive")


class ReceiverProcess:
    """Handle of one receiver process and the channel to it."""

    def __init__(self, first: dict[str, Any], broken: Callable[[str], object]) -> None:
        """Start the process and send its first message, without waiting for an answer. ``broken``
        is called, in a thread, with how the process ended, if it was by an exception that it does
        not catch, or by a signal that is not ``kill``'s."""
        # The receiver does not need an allocator that the engine preloads.
        self._process, ours = start_module(
            "titan_grpo.receive.process",
            env=helper_environment(os.environ, "LD_PRELOAD"),
        )
        self.pid = self._process.pid
        self._killed = False
        # Reap it when it ends: the next hello may come late, or never.
        when_ended(self.pid, lambda: self._ended(broken))
        self._channel = Channel(ours)
        self._sent = 0
        self._last_line_s: float | None = None
        """The trainer's last sign, from the last line of the process."""
        self._silent_s: float | None = None
        """When the process was first found to be silent; None: it has answered since."""
        self._channel.send(first, ANSWER_S)

    def _ended(self, broken: Callable[[str], object]) -> None:
        status = self._process.poll()
        if status == 1:  # the interpreter's code
            broken("it ended by an exception, which is in the server's log")
        elif status is not None and status < 0 and not self._killed:
            broken(f"it ended with {how_ended(status)}")

    def ask(self, message: dict[str, Any], timeout_s: float = ANSWER_S) -> dict[str, Any]:
        """Send a request and return its answer. Raises PeerError if the process is gone, refuses,
        or is silent for ``timeout_s``."""
        self._sent += 1
        self._channel.send({"id": self._sent, **message}, ANSWER_S)
        answer = self._answer(timeout_s)
        if answer is None:
            raise PeerError(
                f"the receiver process ended with {how_ended(self._wait())}; the next hello"
                " starts another"
            )
        if not answer["ok"]:
            raise PeerError(str(answer["error"]))
        return answer

    def last_sign_s(self) -> float:
        """Return the time of the trainer's last sign of life (monotonic clock), minus infinity
        after its bye. A process that has ended left it in its last line."""
        self._sent += 1
        with suppress(PeerError):  # it has ended: its last line can still be read
            self._channel.send({"id": self._sent, "op": "last_sign"}, ANSWER_S)
        with suppress(PeerError):  # it is frozen
            if (answer := self._answer(SIGN_S)) is not None:
                return float(answer["last_sign_s"])
        if self._last_line_s is not None:
            return self._last_line_s
        if self._silent_s is None:
            # Killed or frozen: the trainer's last sign is unknown. Count its lease from now.
            self._silent_s = time.monotonic()
        return self._silent_s

    def _answer(self, timeout_s: float) -> dict[str, Any] | None:
        """Return the answer to the last request; None if the process has ended."""
        while (answer := self._channel.receive(timeout_s)) is not None:
            if answer["id"] == LAST_LINE:
                self._last_line_s = float(answer["last_sign_s"])
                continue
            self._silent_s = None
            if answer["id"] == self._sent:
                return answer  # others: late, of requests that timed out
        return None

    @property
    def ended(self) -> bool:
        return self._process.poll() is not None

    def kill(self) -> None:
        """Kill the process, and with it the epoch's memory and connections."""
        self._channel.close()
        self._killed = True
        self._process.kill()
        self._wait()

    def _wait(self) -> int | None:
        try:
            return wait_process(self._process, KILL_S)
        except subprocess.TimeoutExpired:
            log.warning("receiver process %d is not gone %s s after SIGKILL", self.pid, KILL_S)
            return None


class ReceiverHandle:
    """Owner of the fence state across receiver processes, and of the one that serves an epoch, if
    any. A hello which opens none is answered from here, by a thread."""

    def __init__(
        self, package: str, run_key: Key | None, device: str, quantization: str = ""
    ) -> None:
        """Start no process. ``package`` and ``quantization``: for the Joined answer. With a run key
        only trainers that prove it are served. ``device``: the engine's, "cuda:N" or "cpu"."""
        self._package, self._run_key, self._device = package, run_key, device
        self._quantization = quantization
        self._serving: ReceiverProcess | None = None
        self._deadline = 0.0
        self._commit: Commit | None = None
        self._greeting: Hello | None = None
        """The Hello of the epoch in force."""
        self._started_s = 0.0
        """Start of the run in force (monotonic clock)."""
        self.state = EngineState()

    def hello(self, hello: Hello, problem: str, unmap: Callable[[], None]) -> str:
        """Start serving the Hello's epoch if it is newer and proves the run key; else only answer
        the Hello. Return why it was refused, or "".

        ``problem``: why this engine cannot serve that trainer. It is sent as the answer, and the
        epoch in force stays. ``unmap``: lets go of the memory of a receiver that is replaced.
        """
        probe, keys = hello.transport == PROBE, self._keys(hello.run_id, hello.epoch)
        unproven = "" if probe and not hello.proof else _unproven(hello, keys)
        if unproven:
            keys = None
        refusal, aged = problem or unproven, True
        final = bool(refusal)
        if not refusal and not probe:
            if refusal := self._second_name(hello):
                final = True
            elif refusal := self._occupied(hello):
                # Not how old the run in force is: the lane of a younger one would retry at once
                # with a higher term, forever.
                aged = False
            else:
                before, _ = self.state.in_force
                refusal = self._step(OpenEpoch(hello.run_id, hello.epoch, hello.term))
                if not refusal and hello.run_id != before:
                    self._started_s = time.monotonic() - hello.age_s
        if refusal or probe:
            self.answer(hello, refusal, keys if hello.proof else None, final, aged)
            return refusal
        # Before the next one starts: two images may not fit in memory, and only one receiver may
        # answer for an engine. While an image stays mapped, its memory is not freed.
        self._kill_serving()
        unmap()
        self._greeting = hello

        def unable(why: object) -> str:
            """Answer from here: the lane would wait for its deadline."""
            problem = f"the server's host cannot run a receiver process: {why}"
            answer_hello(self._first(hello, problem, keys))
            return problem

        try:
            self._serving = ReceiverProcess(self._first(hello, "", keys), unable)
        except OSError as error:  # no memory, no process left, no interpreter
            return unable(error)
        return ""

    def _occupied(self, hello: Hello) -> str:
        """Return why a newer run must not take the server from a live one, or ""."""
        served = self._greeting
        if served is None or served.run_id == hello.run_id or hello.take_over:
            return ""
        if self._serving is None or (hello.owner and hello.owner == served.owner):
            return ""
        # The live run's lane may be reconnecting. A dead or frozen trainer keeps the server for
        # live_s at most.
        if time.monotonic() - self._serving.last_sign_s() >= served.live_s:
            return ""
        return (
            f"the live run {served.run_id} has this server: end that run, or take the server from"
            " it with rollout.take_over = true"
        )

    def _second_name(self, hello: Hello) -> str:
        """Return why a lane is refused if its run has this server under another URL, or ""."""
        served = self._greeting
        if served is None or served.run_id != hello.run_id or served.url == hello.url:
            return ""
        if not served.url or not hello.url or self._serving is None:
            return ""
        if self._serving.ended:
            return ""  # the lane of the other name has ended
        return f"it is in this run already as {served.url}: one server has one name in a run"

    def answer(
        self,
        hello: Hello,
        problem: str,
        keys: EpochKeys | None = None,
        final: bool = False,
        aged: bool = True,
    ) -> None:
        """Answer the Hello, without serving it: with ``problem``, or with what the engine holds.
        ``final``: a retry cannot succeed. ``aged``: the answer says how old the run in force is."""
        first = self._first(hello, problem, keys)
        first["joined"]["final"] = final
        if not aged:
            first["joined"]["age_in_force_s"] = 0.0
        answer_hello(first)

    def place(self, attach: Attach) -> dict[str, Any]:
        """Return what ``lend`` will return in this epoch, and lend nothing. Raises PeerError if
        that memory does not exist or the epoch is not in force."""
        if unproven := _unproven(attach, self._keys(attach.run_id, attach.epoch)):
            raise PeerError(unproven)
        if (attach.run_id, attach.epoch) != self.state.in_force:
            raise PeerError(f"epoch {attach.epoch} of run {attach.run_id} is not in force")
        return _grant(self._served().ask({"op": "place"}))

    def lend(self, commit: Commit) -> dict[str, Any]:
        """Return ``{"image": address, "manifest": address of its JSON, "streamed": bool}``. Raises
        PeerError if that version is not staged here or may not be loaded.

        If streamed, the image is the window: call ``take``.
        """
        self._commit = None  # an unproven commit must not be reported as one of this epoch
        if unproven := _unproven(commit, self._keys(commit.run_id, commit.epoch)):
            raise PeerError(unproven)
        self._commit = commit if (commit.run_id, commit.epoch) == self.state.in_force else None
        if refusal := self._step(CommitRequested(commit.run_id, commit.epoch, commit.version)):
            raise PeerError(refusal)
        answer = self._served().ask({"op": "lend", "commit": commit.to_dict()})
        self._deadline = time.monotonic() + float(answer["timeout_s"])
        return _grant(answer)

    def take(self, consumed: int) -> int:
        """See Window.take. Wait until the deadline of the whole transfer, counted from ``lend``."""
        left = max(0.0, self._deadline - time.monotonic())
        message = {"op": "take", "consumed": consumed, "wait_s": left}
        # Window.take returns by the deadline: only a receiver that hangs needs the extra time.
        return int(self._served().ask(message, left + ANSWER_S)["filled"])

    def applied(self, commit: Commit, report: Applied) -> None:
        """Record how a commit ended and send the report to the lane. Raises PeerError if it cannot
        be sent."""
        if self._commit is not commit:
            # The lane in force may wait for a report of the same number: do not send it this one.
            raise PeerError("the commit was not one of the epoch in force: it is not reported")
        self._commit = None
        if self.state.granted is not None:
            self._step(
                Loaded(commit.run_id, commit.version, commit.fingerprint, report.ok, report.intact)
            )
        self._served().ask({"op": "applied", "applied": report.to_dict()})

    def close(self) -> None:
        self._kill_serving()

    def _served(self) -> ReceiverProcess:
        if self._serving is None:
            raise PeerError("no receiver serves this engine: send a hello first")
        return self._serving

    def _step(self, event: FenceEvent) -> str:
        """Apply an event to the fence; return why it refuses, or ""."""
        self.state, refusal = fence(self.state, event)
        return refusal

    def _keys(self, run_id: str, epoch: int) -> EpochKeys | None:
        return EpochKeys.of(self._run_key, run_id, epoch) if self._run_key is not None else None

    def _first(self, hello: Hello, problem: str, keys: EpochKeys | None) -> dict[str, Any]:
        # Do not name the run in force to a lane without the key: it could retry with a higher term
        # at once, forever.
        believed = keys is not None or not (hello.proof or self._run_key)
        state = self.state if believed and hello.transport != PROBE else EngineState()
        joined = Joined(
            ok=not problem,
            error=problem,
            package=self._package,
            pid=0,
            held_run=self.state.run,
            held_version=self.state.version,
            held_fingerprint=self.state.fingerprint,
            intact=self.state.intact,
            keyed=self._run_key is not None,
            run_in_force=state.in_force[0],
            epoch_in_force=state.in_force[1],
            term_in_force=state.term,
            age_in_force_s=time.monotonic() - self._started_s if state.in_force[0] else 0.0,
            quantization=self._quantization,
        )
        hex_keys = keys.to_hex() if keys is not None else None
        return {
            "hello": hello.to_dict(),
            "joined": joined.to_dict(),
            "keys": hex_keys,
            "device": self._device,
        }

    def _kill_serving(self) -> None:
        if self._serving is not None:
            self._serving.kill()
            self._serving = None


def _grant(answer: dict[str, Any]) -> dict[str, Any]:
    return {key: answer[key] for key in ("image", "manifest", "streamed")}


def _unproven(message: Message, keys: EpochKeys | None) -> str:
    """Return why a message's proof does not hold, or ""."""
    try:
        message.require_proof(keys.messages if keys is not None else None)
    except PeerError as error:
        return str(error)
    return ""


# In the process.


def leave(code: int) -> None:
    """Exit without destructors: a process group's blocks or aborts on an unfinished operation."""
    logging.shutdown()
    os._exit(code)


def converse(receiver: Receiver, channel: Channel) -> None:
    """Serve the epoch, then end the process (a thread's main function)."""
    code = 0
    try:
        receiver.run()
        log.info("the trainer closed the epoch")
    except TitanGrpoError as error:
        log.warning("epoch ended: %s; the engine keeps its version", error)
        code = 3
    except Exception:  # noqa: BLE001 - top of a thread: the lane would wait for its deadline
        log.error("epoch ended by a bug; the engine keeps its version\n%s", traceback.format_exc())
        code = 4
    with suppress(PeerError):  # the engine has ended too
        channel.send({"id": LAST_LINE, "ok": True, "last_sign_s": receiver.signed_s}, REPLY_S)
    # After the last line: the answer lets the trainer end, and the next run's hello, which needs
    # that line, may come at once.
    with suppress(PeerError):
        receiver.confirm_bye()
    leave(code)


def respond(receiver: Receiver, message: dict[str, Any]) -> dict[str, Any]:
    """Answer one request of the engine."""
    try:
        match message["op"]:
            case "lend" | "place" as op:
                commit = Commit.from_dict(message["commit"]) if op == "lend" else None
                image, manifest = receiver.place() if commit is None else receiver.lend(commit)
                return {
                    "ok": True,
                    "image": image.to_json(),
                    "manifest": manifest.to_json(),
                    "streamed": receiver.streamed,
                    "timeout_s": receiver.timeout_s,
                }
            case "take":
                filled = receiver.take(int(message["consumed"]), float(message["wait_s"]))
                return {"ok": True, "filled": filled}
            case "last_sign":
                return {"ok": True, "last_sign_s": receiver.last_sign_s()}
            case _:
                receiver.applied(Applied.from_dict(message["applied"]))
                return {"ok": True}
    except TitanGrpoError as error:
        return {"ok": False, "error": str(error)}


def receiver_of(first: dict[str, Any]) -> Receiver:
    """Return the receiver of an engine's first message."""
    keys = EpochKeys.from_hex(first["keys"]) if first["keys"] else None
    hello, joined = Hello.from_dict(first["hello"]), Joined.from_dict(first["joined"])
    env = os.environ
    certificate = env.get(CERTIFICATE, ""), env.get(CERTIFICATE_KEY, "")
    place = Place(env.get(RELAY_HOST, ""), env.get(ZONE, ""), certificate)
    return Receiver(hello, joined, keys, first["device"], place)


def answer_hello(first: dict[str, Any]) -> None:
    """Have a thread answer a hello, and serve no epoch."""

    def answer() -> None:
        try:
            receiver_of(first).answer(REPLY_S)
        except TitanGrpoError as error:
            log.warning("%s", error)

    name = "answer to a hello"
    if sum(thread.name == name for thread in threading.enumerate()) >= ANSWERING:
        log.warning("a hello gets no answer: %d others wait for their trainers", ANSWERING)
        return
    threading.Thread(target=answer, name=name, daemon=True).start()


def serve(channel: Channel) -> None:
    """Serve the engine's requests on the main thread until the engine ends."""
    first = channel.receive(REPLY_S)
    if first is None:
        return
    receiver = receiver_of(first)
    talk = receiver, channel
    threading.Thread(target=converse, args=talk, name="epoch", daemon=True).start()
    while (message := channel.receive(None)) is not None:
        channel.send({"id": message["id"], **respond(receiver, message)}, REPLY_S)


def main(sock: socket.socket, parent: int) -> None:
    """Run the receiver process of the engine with pid ``parent``, over ``sock``."""
    end_with_parent()
    # Check after the call: the end of a parent before the call sends no signal.
    if os.getppid() != parent:
        leave(0)
    logging.basicConfig(level=logging.INFO, format="titan_grpo receiver %(process)d: %(message)s")
    try:
        # The process inherits the engine's affinity, often one core that is busy generating.
        os.sched_setaffinity(0, range(os.cpu_count() or 1))
    except OSError as error:
        log.info("the receiver keeps the engine's cores: %s", error)
    # SGLang binds its workers' memory to the GPU's NUMA node (numactl --membind). A whole model may
    # not fit there, and the kernel would kill a process of that node, such as the engine.
    use_any_memory()
    code = 0
    try:
        serve(Channel(sock))
    except TitanGrpoError as error:
        log.warning("%s", error)
        code = 3
    leave(code)
