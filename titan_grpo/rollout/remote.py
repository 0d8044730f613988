"""Rollouts made by a service on another host: the trainer's end of that way (the other one is
service.py)."""

import json
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from titan_grpo.engines.http import Call, HttpRefused, SyncDriver, ignore, want
from titan_grpo.errors import ConfigError, PeerError, ServerUnreachable, TitanGrpoError
from titan_grpo.protocol import frames, recovery
from titan_grpo.protocol.messages import new_run_id
from titan_grpo.rollout import messages
from titan_grpo.rollout.codec import FORMAT, decode, encode, spec_to_json
from titan_grpo.rollout.httpd import HttpServer, Reply, Request
from titan_grpo.rollout.messages import FromWorker, ToWorker
from titan_grpo.rollout.service import CALL_S, POST_BYTES, have_of
from titan_grpo.rollout.spec import RolloutSpec
from titan_grpo.rollout.transport import Forgotten, Hear, RolloutStopped

OPEN_S = 40.0
"""Deadline of opening a session, in seconds: another one may have to end first."""

RECONCILE_S = 5.0
"""After that much silence the service is asked what there is, in seconds. Callbacks are hints: the
trainer does not rely on them."""

PACE = recovery.Backoff(first_s=0.25, longest_s=2.0)
"""How long a service that did not answer is left alone, in seconds."""


class RemoteLink:
    """A link to the service at ``url``. One thread talks to it; its callbacks come in at an
    endpoint of this host.

    ``key``: the bearer key of the service, empty for none. ``callback_address``: host:port of the
    endpoint (port 0: any), which the service knows as ``callback_url`` if it can not reach it
    there. ``deadline_s``: how long the service may be unreachable before that is an error. A
    service that does not know our session any more (it was restarted, or has not heard from us for
    its lease) is told everything anew.
    """

    def __init__(
        self,
        url: str,
        key: str,
        callback_address: str,
        deadline_s: float = 120.0,
        reconcile_s: float = RECONCILE_S,
        callback_url: str = "",
    ) -> None:
        self._driver = SyncDriver(url, key)
        self._callback_address, self._callback_url = callback_address, callback_url
        self._callback_key = secrets.token_urlsafe(32)
        self._deadline_s, self._reconcile_s = deadline_s, reconcile_s
        self._run_id = new_run_id(time.time())
        self._taking = threading.Lock()
        """Held while frames are heard, so that they are in order; taken before the client's lock,
        never after it."""
        self._changed = threading.Condition()
        """Guards what is below; taken after the client's lock."""
        self._inbox, self._outbox = frames.Inbox(""), frames.Outbox("")
        self._opened = self._asking = self._closing = self._over = False
        self._heard_at = 0.0
        self._health = recovery.Health(PACE)
        self._silent_since: float | None = None
        self._endpoint: HttpServer | None = None
        self._thread: threading.Thread | None = None

    def start(self, spec: RolloutSpec, hear: Hear, timeout_s: float) -> None:
        """Open the endpoint; the session is opened by the thread. Raises ConfigError where the
        endpoint can not be bound."""
        self._hear = hear
        self._begin(spec, ())
        self._endpoint = HttpServer(
            self._callback_address,
            self._callback_key,
            self._called_back,
            "rollout.callback_address",
        )
        self._thread = threading.Thread(target=self._run, name="rollout-remote", daemon=True)
        self._thread.start()

    def send(self, message: messages.ToWorker, within_s: float | None = None) -> None:
        """As Link.send."""
        with self._changed:
            self._put(message, within_s)
            self._changed.notify_all()

    def close(self, deadline_s: float) -> None:
        """Let the service end the session, if it answers in time; else its lease does. Idempotent;
        raises nothing."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(deadline_s)
        if self._endpoint is not None:
            self._endpoint.close()

    # A session.

    def _begin(self, spec: RolloutSpec, first: Sequence[messages.ToWorker]) -> None:
        """What is sent from now on is of a new session. While frames are heard only by the thread
        that hears them."""
        with self._changed:
            name = secrets.token_hex(16)
            self._spec, self._inbox, self._outbox = spec, frames.Inbox(name), frames.Outbox(name)
            self._opened = self._asking = False
            for message in first:
                self._put(message, None)

    def _put(self, message: messages.ToWorker, within_s: float | None) -> None:
        text = encode(message, ToWorker)
        until = None if within_s is None else time.monotonic() + within_s
        self._outbox, _ = frames.send(self._outbox, frames.Put(text, len(text), until))

    def _take(self, session: str, first: int, texts: Sequence[str]) -> frames.Taking:
        """Frames from the service, by whichever way. Raises PeerError for what can not be read:
        then none is taken."""
        with self._taking:
            inbox, action = frames.take(self._inbox, frames.Got(session, first, tuple(texts)))
            if isinstance(action, frames.Deliver):
                taken = [decode(text, FromWorker) for text in action.frames if text != frames.EMPTY]
                self._inbox = inbox
                for message in taken:
                    self._hear(message)
            with self._changed:
                if not isinstance(action, frames.WrongSession):
                    self._heard_at = time.monotonic()
                self._asking = self._asking or isinstance(action, frames.Missing)
                self._changed.notify_all()
        return action

    def _called_back(self, request: Request) -> Reply:
        """One callback, in a thread of the endpoint."""
        if (request.method, request.path) != ("POST", "/frames"):
            return Reply(
                404, {"error": f"there is POST /frames, got {request.method} {request.path}"}
            )
        try:
            body = json.loads(request.body)
            action = self._take(str(body["session"]), int(body["first"]), list(body["frames"]))
        except (PeerError, KeyError, TypeError, ValueError) as error:
            return Reply(
                400, {"error": str(error) if isinstance(error, PeerError) else repr(error)}
            )
        if isinstance(action, frames.WrongSession):
            return Reply(410, {"error": "no such session"})
        return Reply(200, {"have": self._inbox.have})

    # The thread.

    def _run(self) -> None:
        try:
            while self._wait():
                self._try(self._work)
            if self._opened:
                self._driver.run(
                    Call("POST", "/close", CALL_S, ignore, json={"session": self._outbox.session})
                )
        except TitanGrpoError as error:
            self._hear(error)
        except Exception as error:  # noqa: BLE001 - top of a thread: latched, and raised by next_batch
            self._hear(
                RolloutStopped(f"the link to the rollout service failed, a bug of ours: {error!r}")
            )
        finally:
            self._driver.close()

    def _wait(self) -> bool:
        """Until there is something to ask or to tell, and the service's rest is over; False to
        end."""
        with self._changed:
            while not self._closing:
                now = time.monotonic()
                ready = not self._opened or self._asking or bool(self._outbox.kept)
                due = (
                    self._health.until
                    if ready
                    else max(self._health.until, self._heard_at + self._reconcile_s)
                )
                if due <= now:
                    return True
                self._changed.wait(due - now)
            return False

    def _try(self, work: Callable[[], None]) -> None:
        """Once; what the service refuses for good is raised, and so is its silence past the
        deadline."""
        now = time.monotonic()
        try:
            work()
        except ServerUnreachable as error:
            self._silent(now, error)
        except HttpRefused as error:
            if error.status >= 500:
                self._silent(now, error)
            else:
                self._refused(error)
        except PeerError as error:
            raise RolloutStopped(
                f"{self._driver.url} does not speak as a rollout service does: {error}"
            ) from error
        else:
            self._silent_since = None
            self._health, _ = recovery.step(self._health, recovery.Answered())

    def _silent(self, since: float, error: PeerError) -> None:
        now = time.monotonic()
        self._silent_since = since if self._silent_since is None else self._silent_since
        if now - self._silent_since >= self._deadline_s:
            raise RolloutStopped(
                f"the rollout service {self._driver.url} was not there for {self._deadline_s:g} s"
                f" (rollout.controller_deadline_s): {error}. Start it again (titan-grpo rollouts"
                " --bind HOST:PORT) and resume from the last checkpoint"
            ) from error
        self._health, _ = recovery.step(self._health, recovery.Silent(now))

    def _refused(self, error: HttpRefused) -> None:
        if error.status == 410:
            with self._taking:
                self._hear(Forgotten(self._begin))
            return
        if error.status == 401:
            raise ConfigError(
                f"the rollout service {self._driver.url} wants another key: the variable that"
                " rollout.controller_key_env names must hold the one that the service was started"
                " with"
            ) from error
        if error.status == 409:
            raise RolloutStopped(
                f"another run, started later, has the rollout service: {error}"
            ) from error
        raise ConfigError(
            "rollout.controller must be the URL of a rollout service that can serve this run:"
            f" {error}"
        ) from error

    def _work(self) -> None:
        if not self._opened:
            self._open()
        elif self._outbox.kept:
            self._post()
        else:
            self._ask()

    def _open(self) -> None:
        assert self._endpoint is not None
        body = {
            "format": FORMAT,
            "run": self._run_id,
            "session": self._outbox.session,
            "spec": spec_to_json(self._spec),
            "callback": self._callback_url or f"http://{self._endpoint.address}",
            "callback_key": self._callback_key,
        }
        lease_s = self._driver.run(Call("POST", "/open", OPEN_S, _lease_of, json=body))
        with self._changed:
            self._reconcile_s = min(self._reconcile_s, lease_s / 3)
            self._opened, self._heard_at = True, time.monotonic()

    def _post(self) -> None:
        with self._changed:
            self._outbox, post = frames.send(self._outbox, frames.Due(time.monotonic(), POST_BYTES))
        if post is None:
            return
        body = {
            "session": post.session,
            "first": post.first,
            "frames": post.frames,
            "ack": self._inbox.have,
        }
        have = self._driver.run(Call("POST", "/frames", CALL_S, have_of, json=body))
        with self._changed:
            if not post.first + len(post.frames) <= have <= self._outbox.end:
                raise PeerError(
                    f"of {self._outbox.end} frames it was sent {post.first} and those that follow,"
                    f" it has {have}"
                )
            self._outbox, _ = frames.send(self._outbox, frames.Acknowledged(have))

    def _ask(self) -> None:
        session, have = self._inbox.session, self._inbox.have
        query = {"session": session, "after": str(have)}
        first, texts = self._driver.run(Call("GET", "/frames", CALL_S, _frames_of, params=query))
        if first > have:
            raise PeerError(f"asked for frame {have}, it gave {first}")
        with self._changed:
            # There may be more than fits into one answer.
            self._asking = bool(texts)
        self._take(session, first, texts)


def _lease_of(answer: Any) -> float:
    return float(want(answer, "lease_s", (int, float), "/open"))


def _frames_of(answer: Any) -> tuple[int, list[str]]:
    return int(want(answer, "first", int, "/frames")), list(want(answer, "frames", list, "/frames"))
