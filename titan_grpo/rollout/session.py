"""One trainer's session in the rollout service: its rollout process, and the frames between that and the trainer."""

import logging
import threading
import time
from collections.abc import Sequence
from typing import Any

from titan_grpo.engines.calls import Call, want
from titan_grpo.engines.drivers import SyncDriver
from titan_grpo.errors import ConfigError, DataError, PeerError, TitanGrpoError
from titan_grpo.protocol import peer, stream
from titan_grpo.rollout import messages
from titan_grpo.rollout.frames import decode, encode
from titan_grpo.rollout.link import Forgotten, Heard
from titan_grpo.rollout.local import LocalLink
from titan_grpo.rollout.messages import FromWorker, ToWorker
from titan_grpo.rollout.spec import RolloutSpec

logger = logging.getLogger(__name__)

POST_BYTES = 1 << 20
"""Most bytes of frames in one body, unless a single one has more: whoever reads JSON does nothing else meanwhile."""

CALL_S = 10.0
"""Deadline of one request between trainer and service, in seconds."""

PACE = peer.Pace(first_s=0.25, longest_s=10.0)
"""How long a trainer that did not take a callback is left alone, in seconds. It asks by itself."""


def have_of(answer: Any) -> int:
    """How many frames the other end has taken, as it says. Raises ServerRefused."""
    return int(want(answer, "have", int, "frames"))


class Session:
    """Runs until ``close``. Frames to the trainer go out as callbacks, and are kept until they are acknowledged.

    ``callback`` is the base URL of the trainer's endpoint, ``callback_key`` what it wants to be shown.
    """

    def __init__(self, name: str, spec: RolloutSpec, callback: str, callback_key: str) -> None:
        self.name, self._spec = name, spec
        self._callback = SyncDriver(callback, callback_key)
        self._link = LocalLink()
        self._taking = threading.Lock()
        self._inbox = stream.Inbox(name)
        self._changed = threading.Condition()
        self._outbox = stream.Outbox(name)
        self._failed = self._closing = False
        self._thread = threading.Thread(target=self._call_back, name="callbacks", daemon=True)

    def start(self) -> None:
        """Start the rollout process."""
        self._thread.start()
        self._link.start(self._spec, self._hear, CALL_S)

    def take(self, first: int, texts: Sequence[str], ack: int) -> int:
        """Frames of the trainer, which has taken ``ack`` of ours. How many of its frames are here now.

        Raises PeerError for frames that can not be read: then none is taken.
        """
        self.acknowledge(ack)
        with self._taking:
            inbox, action = stream.take(self._inbox, stream.Got(self.name, first, tuple(texts)))
            if isinstance(action, stream.Deliver):
                frames = [decode(text, ToWorker) for text in action.frames if text != stream.EMPTY]
                self._inbox = inbox
                for frame in frames:
                    self._link.send(frame)
            return self._inbox.have

    def acknowledge(self, have: int) -> None:
        """The trainer has taken ``have`` frames. Raises PeerError if there never were so many."""
        with self._changed:
            if have > self._outbox.end:
                raise PeerError(f"{have} frames were acknowledged, there are {self._outbox.end}")
            self._outbox, _ = stream.send(self._outbox, stream.Acknowledged(have))

    def after(self, have: int) -> stream.Post:
        """What there is for a trainer that has taken ``have`` frames: as many as fit into one answer."""
        self.acknowledge(have)
        return self._due() or stream.Post(self.name, have, ())

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
            self._outbox, _ = stream.send(self._outbox, stream.Put(text, len(text)))
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
            heard = messages.Failed("config" if isinstance(heard, ConfigError) else "bug", str(heard))
        self.send(heard)

    def _due(self) -> stream.Post | None:
        with self._changed:
            self._outbox, post = stream.send(self._outbox, stream.Due(time.monotonic(), POST_BYTES))
            return post

    def _call_back(self) -> None:
        health = peer.Health(PACE)
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closing or self._outbox.kept)
                self._changed.wait_for(lambda: self._closing, max(0.0, health.until - time.monotonic()))
                if self._closing:
                    break
            post = self._due()
            if post is None:
                continue  # The trainer has asked for them meanwhile.
            body = {"session": post.session, "first": post.first, "frames": post.frames}
            try:
                self.acknowledge(self._callback.run(Call("POST", "/frames", CALL_S, have_of, json=body)))
                health, _ = peer.step(health, peer.Answered())
            except PeerError as error:
                if health.phase is not peer.Phase.AWAY:
                    logger.warning("a callback did not get through, the trainer will ask for its frames: %s", error)
                health, _ = peer.step(health, peer.Silent(time.monotonic()))
        self._callback.close()
