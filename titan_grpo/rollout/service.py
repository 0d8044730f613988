"""One trainer's session in the rollout service: its rollout process, and the frames between that
and the trainer.

The rollout service: makes the rollouts of one run at a time for a trainer on another host, over
HTTP.

==== ================ ==================================================================================================
POST /open            {format, run, session, spec, callback, callback_key} -> {lease_s}; the same once more does nothing
POST /frames          {session, first, frames, ack} -> {have}
GET  /frames          ?session=NAME&after=N -> {first, frames}
POST /close           {session} -> {}
GET  /status          -> {format, run}
==== ================ ==================================================================================================

400: not understood, or the spec can not be served here. 401: not the key. 409: a newer run has the
service. 410: no such session, so a new one is to be opened."""

import json
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from titan_grpo.engines.http import Call, SyncDriver, want
from titan_grpo.errors import ConfigError, DataError, PeerError, TitanGrpoError
from titan_grpo.protocol import frames, lease, recovery
from titan_grpo.rollout import messages
from titan_grpo.rollout.codec import FORMAT, decode, encode, spec_from_json
from titan_grpo.rollout.httpd import RETRY_AFTER_S, HttpServer, Reply, Request
from titan_grpo.rollout.messages import FromWorker, ToWorker
from titan_grpo.rollout.spec import RolloutSpec
from titan_grpo.rollout.transport import Forgotten, Heard, LocalLink

logger = logging.getLogger(__name__)

POST_BYTES = 1 << 20
"""Most bytes of frames in one body, unless a single one has more: whoever reads JSON does nothing
else meanwhile."""

CALL_S = 10.0
"""Deadline of one request between trainer and service, in seconds."""

PACE = recovery.Backoff(first_s=0.25, longest_s=10.0)
"""How long a trainer that did not take a callback is left alone, in seconds. It asks by itself."""


def have_of(answer: Any) -> int:
    """How many frames the other end has taken, as it says. Raises ServerRefused."""
    return int(want(answer, "have", int, "frames"))


class Session:
    """Runs until ``close``. Frames to the trainer go out as callbacks, and are kept until they are
    acknowledged.

    ``callback`` is the base URL of the trainer's endpoint, ``callback_key`` what it wants to be
    shown.
    """

    def __init__(self, name: str, spec: RolloutSpec, callback: str, callback_key: str) -> None:
        self.name, self._spec = name, spec
        self._callback = SyncDriver(callback, callback_key)
        self._link = LocalLink()
        self._taking = threading.Lock()
        self._inbox = frames.Inbox(name)
        self._changed = threading.Condition()
        self._outbox = frames.Outbox(name)
        self._failed = self._closing = False
        self._thread = threading.Thread(target=self._call_back, name="callbacks", daemon=True)

    def start(self) -> None:
        """Start the rollout process."""
        self._thread.start()
        self._link.start(self._spec, self._hear, CALL_S)

    def take(self, first: int, texts: Sequence[str], ack: int) -> int:
        """Frames of the trainer, which has taken ``ack`` of ours. How many of its frames are here
        now.

        Raises PeerError for frames that can not be read: then none is taken.
        """
        self.acknowledge(ack)
        with self._taking:
            inbox, action = frames.take(self._inbox, frames.Got(self.name, first, tuple(texts)))
            if isinstance(action, frames.Deliver):
                taken = [decode(text, ToWorker) for text in action.frames if text != frames.EMPTY]
                self._inbox = inbox
                for message in taken:
                    self._link.send(message)
            return self._inbox.have

    def acknowledge(self, have: int) -> None:
        """The trainer has taken ``have`` frames. Raises PeerError if there never were so many."""
        with self._changed:
            if have > self._outbox.end:
                raise PeerError(f"{have} frames were acknowledged, there are {self._outbox.end}")
            self._outbox, _ = frames.send(self._outbox, frames.Acknowledged(have))

    def after(self, have: int) -> frames.Post:
        """What there is for a trainer that has taken ``have`` frames: as many as fit into one
        answer."""
        self.acknowledge(have)
        return self._due() or frames.Post(self.name, have, ())

    def send(self, message: FromWorker) -> None:
        """A frame to the trainer. Any thread; never blocks."""
        try:
            text = encode(message, FromWorker)
        except DataError as error:
            message = messages.Failed("data", str(error))
            text = encode(message, FromWorker)
        with self._changed:
            if self._failed:
                return  # Its last words were said.
            self._failed = isinstance(message, messages.Failed)
            self._outbox, _ = frames.send(self._outbox, frames.Put(text, len(text)))
            self._changed.notify_all()

    def close(self, deadline_s: float) -> None:
        """Abort what runs, and end; within the deadline. Idempotent; raises nothing."""
        with self._changed:
            self._failed = self._closing = True
            self._changed.notify_all()
        self._link.close(deadline_s)

    def _hear(self, heard: Heard) -> None:
        assert not isinstance(heard, Forgotten), "a child process forgets nothing"
        if isinstance(heard, TitanGrpoError):
            heard = messages.Failed(
                "config" if isinstance(heard, ConfigError) else "bug", str(heard)
            )
        self.send(heard)

    def _due(self) -> frames.Post | None:
        with self._changed:
            self._outbox, post = frames.send(self._outbox, frames.Due(time.monotonic(), POST_BYTES))
            return post

    def _call_back(self) -> None:
        health = recovery.Health(PACE)
        while True:
            with self._changed:
                # no deadline: a frame for the trainer, or close()
                self._changed.wait_for(lambda: self._closing or self._outbox.kept)
                self._changed.wait_for(
                    lambda: self._closing, max(0.0, health.until - time.monotonic())
                )
                if self._closing:
                    break
            post = self._due()
            if post is None:
                continue  # The trainer has asked for them meanwhile.
            body = {"session": post.session, "first": post.first, "frames": post.frames}
            try:
                self.acknowledge(
                    self._callback.run(Call("POST", "/frames", CALL_S, have_of, json=body))
                )
                health, _ = recovery.step(health, recovery.Answered())
            except PeerError as error:
                if health.phase is not recovery.Phase.AWAY:
                    logger.warning(
                        "a callback did not get through, the trainer will ask for its frames: %s",
                        error,
                    )
                health, _ = recovery.step(health, recovery.Silent(time.monotonic()))
        self._callback.close()


CLOSE_S = 10.0
"""How long a session that ends may take, in seconds."""

Say = Callable[[str], None]


class Service:
    """Serves from construction to ``close``. A trainer that is silent for ``lease_s`` seconds loses
    its session.

    Raises ConfigError where the address can not be bound.
    """

    def __init__(self, address: str, key: str, lease_s: float, say: Say) -> None:
        self._say = say
        self._changed = threading.Condition()
        self._tenancy = lease.Lease(lease_s)
        self._session: Session | None = None
        self._closing = False
        self._turnover = threading.Lock()
        """Held while one session ends and the next begins: both could want the same address."""
        self._server = HttpServer(address, key, self._answer, "--bind")
        self.address = self._server.address
        self._thread = threading.Thread(target=self._watch, name="lease", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Abort what runs and take no further request. Idempotent."""
        self._server.close()
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join(CLOSE_S)
        with self._turnover:
            self._end("the service ends")

    def _answer(self, request: Request) -> Reply:
        routes: Mapping[tuple[str, str], Callable[[Mapping[str, Any]], Reply]] = {
            ("POST", "/open"): self._open,
            ("POST", "/frames"): self._take,
            ("GET", "/frames"): self._give,
            ("POST", "/close"): self._close,
            ("GET", "/status"): self._status,
        }
        route = routes.get((request.method, request.path))
        if route is None:
            known = ", ".join(" ".join(name) for name in routes)
            return Reply(404, {"error": f"there is {known}, got {request.method} {request.path}"})
        try:
            body = json.loads(request.body) if request.method == "POST" else request.query
            if not isinstance(body, Mapping):
                raise PeerError(f"the body must be a JSON object, got {str(body)[:100]!r}")
            return route(body)
        except (PeerError, KeyError, TypeError, ValueError) as error:
            return Reply(
                400, {"error": str(error) if isinstance(error, PeerError) else repr(error)}
            )

    def _open(self, body: Mapping[str, Any]) -> Reply:
        if body.get("format") != FORMAT:
            return Reply(
                400,
                {
                    "error": (
                        "trainer and service must run the same titan_grpo: their messages differ"
                    )
                },
            )
        spec, run, name = spec_from_json(body["spec"]), str(body["run"]), str(body["session"])
        if fault := unservable(spec):
            return Reply(400, {"error": fault})
        with self._turnover:
            with self._changed:
                if name == self._tenancy.session:
                    return Reply(
                        200, {"lease_s": self._tenancy.lease_s}
                    )  # Its first answer was lost.
                self._tenancy, actions = lease.step(
                    self._tenancy, lease.Open(run, name, time.monotonic())
                )
                self._changed.notify_all()
            for action in actions:
                if isinstance(action, lease.Refuse):
                    return Reply(409, {"error": f"the newer run {action.run} has this service"})
                if isinstance(action, lease.End):
                    self._end("replaced by a newer session")
            session = Session(name, spec, str(body["callback"]), str(body["callback_key"]))
            with self._changed:
                self._session = session
            try:
                session.start()
            except OSError as error:
                with self._changed:
                    self._tenancy, _ = lease.step(self._tenancy, lease.Close(name))
                self._end("it did not start")
                return Reply(
                    503,
                    {"error": f"the rollout process could not be started: {error}"},
                    RETRY_AFTER_S,
                )
            self._say(f"run {run} has this service")
            with self._changed:
                # The lease begins where the trainer can know of it.
                self._tenancy, _ = lease.step(self._tenancy, lease.Renewed(name, time.monotonic()))
                return Reply(200, {"lease_s": self._tenancy.lease_s})

    def _take(self, body: Mapping[str, Any]) -> Reply:
        session = self._heard(body)
        if session is None:
            return _unknown(body)
        return Reply(
            200, {"have": session.take(int(body["first"]), list(body["frames"]), int(body["ack"]))}
        )

    def _give(self, query: Mapping[str, Any]) -> Reply:
        session = self._heard(query)
        if session is None:
            return _unknown(query)
        post = session.after(int(query["after"]))
        return Reply(200, {"first": post.first, "frames": post.frames})

    def _close(self, body: Mapping[str, Any]) -> Reply:
        with self._turnover:
            with self._changed:
                self._tenancy, actions = lease.step(
                    self._tenancy, lease.Close(str(body["session"]))
                )
            if any(isinstance(action, lease.Unknown) for action in actions):
                return _unknown(body)
            self._end("its run is over")
        return Reply(200, {})

    def _status(self, _query: Mapping[str, Any]) -> Reply:
        with self._changed:
            return Reply(200, {"format": FORMAT, "run": self._tenancy.run})

    def _heard(self, body: Mapping[str, Any]) -> Session | None:
        with self._changed:
            heard = lease.Renewed(str(body["session"]), time.monotonic())
            self._tenancy, actions = lease.step(self._tenancy, heard)
            session = self._session
            return None if actions or session is None or session.name != heard.session else session

    def _watch(self) -> None:
        """Ends the session of a trainer that is silent."""
        while True:
            with self._changed:
                due = self._tenancy.due
                self._changed.wait(None if due is None else max(0.0, due - time.monotonic()))
                if self._closing:
                    return
            with self._turnover:
                with self._changed:
                    self._tenancy, actions = lease.step(
                        self._tenancy, lease.Ticked(time.monotonic())
                    )
                if actions:
                    self._end(f"its trainer was silent for {self._tenancy.lease_s:g} s")

    def _end(self, why: str) -> None:
        with self._changed:
            session, self._session = self._session, None
        if session is not None:
            session.close(CLOSE_S)
            self._say(f"the session has ended: {why}")


def unservable(spec: RolloutSpec) -> str:
    """Why the spec can not be served on this host; empty if it can."""
    tokenizer = Path(spec.model_dir) / "tokenizer.json"
    if spec.source == "task" and not tokenizer.is_file():
        return (
            f"the service's host must have the model's tokenizer too, and there is no {tokenizer}"
        )
    return ""


def _unknown(body: Mapping[str, Any]) -> Reply:
    return Reply(410, {"error": f"there is no session {str(body['session'])[:80]}: open one"})
