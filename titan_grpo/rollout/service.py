"""Rollout service: makes rollouts for a trainer on another host, one run at a time, over HTTP.

==== ================ ======================================================================
POST /open            {format, run, session, spec} -> {lease_s}; repeating it does nothing
POST /frames          a frames.Post -> a frames.Post
POST /close           {session} -> {}
GET  /status          -> {format, run}
GET  /metrics         -> the counters of the session's rollouts, for Prometheus
==== ================ ======================================================================

``POST /frames`` with a ``wait`` is a long poll: it returns when there is a frame that the sender
does not have, or after ``wait`` seconds. Each one renews the lease.

400: bad request, or the spec cannot be served here. 401: wrong key. 409: a newer run has the
service. 410: no such session; open a new one. 503: the rollout process did not start; retry."""

import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import msgspec

from titan_grpo.errors import ConfigError, DataError, PeerError, TitanGrpoError
from titan_grpo.observe import dashboards
from titan_grpo.protocol import frames
from titan_grpo.protocol.lease import Lease
from titan_grpo.protocol.messages import ServerState
from titan_grpo.rollout import messages
from titan_grpo.rollout.child import LocalTransport
from titan_grpo.rollout.httpd import RETRY_AFTER_S, HttpServer, Reply, Request
from titan_grpo.rollout.messages import (
    FORMAT,
    Message,
    RolloutSpec,
    SessionLost,
    ToWorker,
    decode,
    encode,
)

POST_BYTES = 1 << 20
"""Maximum bytes of frames in one body, unless a single frame is larger: decoding JSON holds the
GIL."""

POLL_S = 20.0
"""Longest wait of one ``POST /frames``, in seconds."""

CLOSE_S = 10.0
"""Deadline of the end of a session, in seconds."""


class Opening(msgspec.Struct):
    """Body of ``POST /open``. ``spec`` is decoded only after ``format`` is found equal to ours."""

    format: str = ""
    run: str = ""
    session: str = ""
    spec: msgspec.Raw = msgspec.Raw(b"{}")


class Closing(msgspec.Struct):
    """Body of ``POST /close``."""

    session: str


class Session:
    """A trainer's rollout process, and the frames between the two, until ``close``."""

    def __init__(self, name: str, spec: RolloutSpec) -> None:
        """Start the process. Raises OSError."""
        self.name = name
        self._worker = LocalTransport()
        self._changed = threading.Condition()
        self._end = frames.End(name)
        self.closing = False
        self.lost = ""
        """How the rollout process ended, if it was killed. The trainer has the state for the next
        one: it opens another session."""
        self.counters: dict[str, int] = {}
        """Latest counters of the rollout process, without those of servers that left."""
        self._servers: set[str] = set()
        self._worker.start(spec, self._on_message)

    def exchange(self, post: frames.Post, longest_s: float) -> frames.Post:
        """Pass the trainer's new frames to the worker; return how many were taken so far, with
        those for the trainer if it waits, for ``longest_s`` seconds at most.

        Raises PeerError for frames that cannot be decoded, of which none is taken, and for a number
        of frames that there are not.
        """
        with self._changed:
            end, new = self._end.take(post)
            taken = [decode(text, ToWorker) for text in new if text != frames.EMPTY]
            self._end = end
            for message in taken:
                self._worker.send(message)
                if isinstance(message, ServerState):
                    self._servers.add(message.url)
                elif isinstance(message, messages.ServerLeft):
                    self._servers.discard(message.url)
                    messages.forget(self.counters, message.url)
            if not post.wait:
                return frames.Post(self.name, 0, (), end.have)
            self._changed.wait_for(
                lambda: self.closing or self._end.kept, min(post.wait, longest_s)
            )
            self._end, answer = self._end.post(time.monotonic(), POST_BYTES)
            return answer

    def close(self, deadline_s: float) -> None:
        """Abort everything and end the worker within the deadline. Idempotent; raises nothing."""
        with self._changed:
            self.closing = True
            self._changed.notify_all()
        self._worker.close(deadline_s)

    def _on_message(self, message: Message) -> None:
        if isinstance(message, SessionLost):
            self.lost = message.why
            message = messages.Failed("killed", message.why)
        elif isinstance(message, TitanGrpoError):
            config = isinstance(message, ConfigError)
            message = messages.Failed("config" if config else "bug", str(message))
        counters: dict[str, int] = getattr(message, "counters", {})
        try:
            text = encode(message)
        except DataError as error:
            message = messages.Failed("data", str(error))
            text = encode(message)
        with self._changed:
            # A message on its way when a server left still names it.
            self.counters |= {
                name: count
                for name, count in counters.items()
                if not (url := messages.server_of(name)) or url in self._servers
            }
            self._end = self._end.put(text)
            self._changed.notify_all()


class Service:
    """HTTP service, from construction to ``close``. A trainer that is silent for ``lease_s``
    seconds loses its session. ``say`` prints one line.

    Raises ConfigError if the address cannot be bound.
    """

    def __init__(self, address: str, key: str, lease_s: float, say: Callable[[str], None]) -> None:
        self._say = say
        self._changed = threading.Condition()
        self._lease = Lease(lease_s)
        self._session: Session | None = None
        self._closing = False
        self._turnover = threading.Lock()
        """Held while one session ends and the next starts: both may bind the same address."""
        self._server = HttpServer(address, key, self._answer, "--bind")
        self.address = self._server.address
        self._thread = threading.Thread(target=self._watch, name="lease", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the session and the server. Idempotent."""
        self._server.close()
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join(CLOSE_S)
        with self._turnover:
            self._end("the service ends")

    def _answer(self, request: Request) -> Reply:
        try:
            match request.method, request.path:
                case "POST", "/open":
                    return self._open(decode(request.body, Opening))
                case "POST", "/frames":
                    return self._frames(decode(request.body, frames.Post))
                case "POST", "/close":
                    return self._close(decode(request.body, Closing).session)
                case "GET", "/status":
                    with self._changed:
                        return Reply(200, {"format": FORMAT, "run": self._lease.run})
                case "GET", "/metrics":
                    return self._metrics()
            known = "POST /open, POST /frames, POST /close, GET /status and GET /metrics"
            return Reply(404, {"error": f"there is {known}, got {request.method} {request.path}"})
        except _NoSession as error:
            return Reply(410, {"error": f"there is no session {str(error)[:80]}: open one"})
        except PeerError as error:
            return Reply(400, {"error": str(error)})

    def _metrics(self) -> Reply:
        with self._changed:
            # A copy: the rollout process's thread adds counters meanwhile.
            counters = dict(self._session.counters) if self._session is not None else {}
        try:
            page = dashboards.page(dashboards.NO_DROPS | messages.counted(counters))
        except ImportError:
            return Reply(501, {"error": "pip install 'titan_grpo[dashboards]' on this host"})
        return Reply(200, page, kind=dashboards.CONTENT_TYPE)

    def _open(self, body: Opening) -> Reply:
        if body.format != FORMAT:
            text = "trainer and service must run the same titan_grpo: their messages differ"
            return Reply(400, {"error": text})
        spec: RolloutSpec = decode(body.spec, RolloutSpec)
        tokenizer = Path(spec.model_dir) / "tokenizer.json"
        if spec.source == "task" and not tokenizer.is_file():
            text = f"the service's host must have the model's tokenizer, there is no {tokenizer}"
            return Reply(400, {"error": text})
        if not (body.run and body.session):
            raise PeerError("a run and a session must have names")
        with self._turnover:
            return self._opened(body.run, body.session, spec)

    def _opened(self, run: str, name: str, spec: RolloutSpec) -> Reply:
        with self._changed:
            answer = Reply(200, {"lease_s": self._lease.lease_s})
            if name == self._lease.session:
                return answer  # a repeated request: its first answer was lost
            lease = self._lease.open(run, name, time.monotonic())
            if lease is None:
                text = f"the newer run {self._lease.run} has this service"
                return Reply(409, {"error": text})
            # Before the end of the old session: its trainer's requests are refused from now on.
            self._lease = lease
            self._changed.notify_all()
        self._end("replaced by a newer session")
        try:
            session = Session(name, spec)
        except OSError as error:
            with self._changed:
                self._lease = self._lease.close(name) or self._lease
            text = f"the rollout process could not be started: {error}"
            self._say(text)
            return Reply(503, {"error": text}, RETRY_AFTER_S)
        self._say(f"run {run} has this service")
        with self._changed:
            self._session = session
            # Renew now: ending the old session and starting the process took seconds of the lease.
            self._lease = self._lease.renew(name, time.monotonic()) or self._lease
        return answer

    def _frames(self, post: frames.Post) -> Reply:
        session = self._renewed(post.session)
        # A waiting poll does not renew the lease, so it must return well before the lease ends.
        answer = session.exchange(post, min(POLL_S, self._lease.lease_s / 2))
        if session.closing:
            raise _NoSession(post.session)
        return Reply(200, asdict(answer))

    def _close(self, name: str) -> Reply:
        with self._turnover:
            with self._changed:
                if (free := self._lease.close(name)) is None:
                    raise _NoSession(name)
                self._lease = free
            self._end("its run is over")
        return Reply(200, {})

    def _renewed(self, name: str) -> Session:
        """Renew the lease of the session of that name, and return the session. Raises
        _NoSession."""
        with self._changed:
            lease, session = self._lease.renew(name, time.monotonic()), self._session
            if lease is None or session is None or session.name != name:
                raise _NoSession(name)
            self._lease = lease
            return session

    def _watch(self) -> None:
        while True:
            with self._changed:
                due = self._lease.due
                self._changed.wait(None if due is None else max(0.0, due - time.monotonic()))
                if self._closing:
                    return
            with self._turnover:
                with self._changed:
                    free = self._lease.expire(time.monotonic())
                    self._lease = free or self._lease
                if free is not None:
                    self._end(f"its trainer was silent for {free.lease_s:g} s")

    def _end(self, why: str) -> None:
        with self._changed:
            session, self._session = self._session, None
        if session is not None:
            session.close(CLOSE_S)
            self._say(f"the session has ended: {session.lost or why}")


class _NoSession(Exception):
    pass
