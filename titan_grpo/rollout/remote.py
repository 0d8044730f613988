"""Worker transport to a rollout service on another host: the trainer's end (service.py is the other
one)."""

import logging
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial

import msgspec

from titan_grpo.engines.http import Call, HttpRefused, SyncDriver, ignore
from titan_grpo.errors import ConfigError, PeerError, ServerUnreachable, TitanGrpoError
from titan_grpo.protocol import frames
from titan_grpo.protocol.messages import new_run_id
from titan_grpo.protocol.recovery import Health
from titan_grpo.rollout import messages
from titan_grpo.rollout.messages import (
    FORMAT,
    FromWorker,
    Message,
    OnMessage,
    RolloutSpec,
    RolloutStopped,
    SessionLost,
    convert,
    decode,
    encode,
)
from titan_grpo.rollout.service import POLL_S, POST_BYTES

logger = logging.getLogger(__name__)

OPEN_S = 40.0
"""Deadline of opening a session, in seconds: the service may have to end another one first."""

CALL_S = 10.0
"""Deadline of one request between trainer and service, in seconds."""

FINAL = frozenset({400, 401, 409})
"""Status codes with which a service refuses a run that it has served. Others are those of a proxy,
whose service restarts."""

NAMED_AFTER_S = 3.0
"""Silence of the service after which a line says so, in seconds: the trainer soon waits for it."""

HEALTH = Health(first_s=0.25, longest_s=2.0)
"""Back-off after the service did not answer, in seconds."""


class Opened(msgspec.Struct):
    """Answer to ``POST /open``."""

    lease_s: float


class RemoteTransport:
    """Transport with two threads and a connection each: one opens sessions and posts frames, the
    other gets the service's frames by long polls. So the trainer's host accepts no connections.

    ``key``: bearer key of the service, empty for none. ``deadline_s``: seconds that the service may
    be unreachable before the transport fails.
    """

    def __init__(self, url: str, key: str, deadline_s: float = 120.0) -> None:
        self._sender, self._poller = SyncDriver(url, key), SyncDriver(url, key)
        self._url = self._sender.url
        self._deadline_s = deadline_s
        self._run_id = new_run_id(time.time())
        self._delivering = threading.Lock()
        """Keeps delivered messages in order. Lock order: this one, the client's, ``_changed``."""
        self._changed = threading.Condition()
        """Guards the attributes below."""
        self._end = frames.End("")
        self._opened = self._closing = self._served = False
        self._health = HEALTH
        self._silent_since: float | None = None
        self._named = False
        """Whether a line said that the service is silent."""
        self._threads: list[threading.Thread] = []

    def start(self, spec: RolloutSpec, on_message: OnMessage) -> None:
        self._on_message = on_message
        self._begin(spec, ())
        for name, target in (("send", self._send_loop), ("poll", self._poll_loop)):
            thread = threading.Thread(
                target=self._run, args=(target,), name=f"rollout-{name}", daemon=True
            )
            thread.start()
            self._threads.append(thread)

    def send(self, message: messages.ToWorker, within_s: float | None = None) -> None:
        with self._changed:
            self._put(message, within_s)
            self._changed.notify_all()

    def close(self, deadline_s: float) -> None:
        """Close the session if the service answers in time; else its lease ends it."""
        deadline = time.monotonic() + deadline_s
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        for thread in self._threads:
            # The end of the session answers a pending poll. If the service is gone, the poll ends
            # by its own deadline, in a daemon thread.
            thread.join(max(0.0, deadline - time.monotonic()))

    def _begin(self, spec: RolloutSpec, first: Sequence[messages.ToWorker]) -> None:
        """Begin a new session; all messages sent from now on belong to it."""
        with self._changed:
            self._spec, self._end, self._opened = spec, frames.End(secrets.token_hex(16)), False
            for message in first:
                self._put(message, None)
            self._changed.notify_all()

    def _put(self, message: messages.ToWorker, within_s: float | None) -> None:
        text = encode(message)
        until = None if within_s is None else time.monotonic() + within_s
        self._end = self._end.put(text, until)

    # The threads.

    def _run(self, loop: Callable[[], None]) -> None:
        try:
            loop()
        except TitanGrpoError as error:
            self._fail(error)
        except Exception as error:  # noqa: BLE001 - top of a thread: next_batch raises it
            self._fail(
                RolloutStopped(
                    f"the transport to the rollout service failed, a bug of ours: {error!r}"
                )
            )

    def _fail(self, error: Message) -> None:
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        with self._delivering:
            self._on_message(error)

    def _send_loop(self) -> None:
        with self._sender:
            while self._wait(lambda: not self._opened or bool(self._end.kept)):
                self._attempt(self._post if self._opened else self._open)
            if self._opened:
                body = {"session": self._end.session}
                self._sender.run(Call("POST", "/close", CALL_S, ignore, json=body))

    def _poll_loop(self) -> None:
        with self._poller:
            while self._wait(lambda: self._opened):
                self._attempt(self._poll, POLL_S)

    def _wait(self, ready: Callable[[], bool]) -> bool:
        """Wait until ``ready()`` and the end of the back-off; return False to end the thread."""
        with self._changed:
            while not self._closing:
                # no deadline: ends by a message to send, an opened session, or close()
                self._changed.wait_for(lambda: self._closing or ready())
                now = time.monotonic()
                if self._health.askable(now):
                    break
                self._changed.wait_for(lambda: self._closing, self._health.until - now)
            return not self._closing

    def _attempt(self, work: Callable[[], None], wait_s: float = 0.0) -> None:
        """Do ``work`` once; on a transient failure start the back-off. Raises the service's final
        refusals, and RolloutStopped if it is silent past the deadline. ``wait_s``: seconds that the
        service may take to answer."""
        due, session = time.monotonic() + wait_s, self._end.session
        try:
            work()
        except ServerUnreachable as error:
            self._silent(due, error)
        except HttpRefused as error:
            # 409 at the start: the newer run may be a dead one with a clock ahead of ours, whose
            # lease ends. A run that had the service was replaced.
            passes = error.status not in FINAL if self._served else error.status == 409
            if error.status == 410:
                with self._delivering:
                    # Both threads may be refused: the second one finds a new session here. And
                    # close() ends the session under a pending poll.
                    if session == self._end.session and not self._closing:
                        self._on_message(
                            SessionLost(self._begin, "the rollout service lost this run's session")
                        )
            elif error.status >= 500 or passes:
                self._silent(due, error)
            else:
                raise self._refusal(error) from error
        except PeerError as error:
            raise RolloutStopped(
                f"{self._url} does not answer as a rollout service does: {error}"
            ) from error
        else:
            with self._changed:
                named, self._named, self._silent_since = self._named, False, None
                self._health = self._health.answered()
            if named:
                logger.warning("rollout: the service %s answers again", self._url)

    def _silent(self, due: float, error: PeerError) -> None:
        with self._changed:
            now = time.monotonic()
            if self._silent_since is None:
                self._silent_since = min(due, now)  # a poll may break off before it is due
            if now - self._silent_since >= self._deadline_s:
                if isinstance(error, HttpRefused) and error.status == 409:
                    raise self._refusal(error) from error
                raise RolloutStopped(
                    f"the rollout service {self._url} was not there for {self._deadline_s:g} s"
                    f" (rollout.controller_deadline_s): {error}. Start it again (titan-grpo"
                    " rollouts --bind HOST:PORT) and resume from the last checkpoint"
                ) from error
            self._health = self._health.silent(now)
            first = not self._named and now - self._silent_since >= NAMED_AFTER_S
            self._named |= first
        if first:
            logger.warning(
                "rollout: the service %s does not answer (%s); the run ends after %g s of silence"
                " (rollout.controller_deadline_s)",
                *(self._url, error, self._deadline_s),
            )

    def _refusal(self, error: HttpRefused) -> TitanGrpoError:
        if error.status == 401:
            return ConfigError(
                f"the rollout service {self._url} refuses the key: the variable that"
                " rollout.controller_key_env names must hold the one that the service was started"
                " with"
            )
        if error.status == 409:
            return RolloutStopped(f"another run, started later, has the rollout service: {error}")
        return ConfigError(
            "rollout.controller must be the URL of a rollout service that can serve this run:"
            f" {error}"
        )

    def _open(self) -> None:
        with self._changed:
            session, spec = self._end.session, msgspec.to_builtins(self._spec, str_keys=True)
        body = {"format": FORMAT, "run": self._run_id, "session": session, "spec": spec}
        parse = partial(convert, kind=Opened, what="the answer to /open")
        self._sender.run(Call("POST", "/open", OPEN_S, parse, json=body))
        with self._changed:
            self._opened = self._served = True
            self._changed.notify_all()

    def _post(self) -> None:
        with self._changed:
            self._end, post = self._end.post(time.monotonic(), POST_BYTES)
        self._exchange(self._sender, post)

    def _poll(self) -> None:
        with self._changed:
            post = frames.Post(self._end.session, 0, (), self._end.have, POLL_S)
        self._exchange(self._poller, post)

    def _exchange(self, driver: SyncDriver, post: frames.Post) -> None:
        """Send frames, or wait for some, and deliver those that come."""
        parse = partial(convert, kind=frames.Post, what="the answer to /frames")
        answer = driver.run(Call("POST", "/frames", post.wait + CALL_S, parse, json=asdict(post)))
        with self._delivering:
            with self._changed:
                # If the session was lost meanwhile, this end is the new one's and takes nothing.
                self._end, new = self._end.take(answer)
            for text in new:
                if text != frames.EMPTY:
                    message = decode(text, FromWorker)
                    if isinstance(message, messages.Failed) and message.kind == "killed":
                        message = SessionLost(self._begin, message.text, killed=True)
                    self._on_message(message)
