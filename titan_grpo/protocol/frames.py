"""Frames delivered once and in order over a way that loses, repeats, delays and reorders them. Two
pure tables, a pair for one direction of one session; a restart of either end is a new session.

::

    sender    Put(frame) -> kept, until Acknowledged(have)
              Due(now) -> Post(session, first, frames), as often as wished
    receiver  Got(session, first, frames) -> Deliver(frames)       without those it has already
                                          -> Missing(have)       an earlier one is lost: takes none
                                          -> WrongSession(session)  of another session: takes none

Frames are numbered from 0. ``have`` is how many the receiver has taken, and so the number of the
one it wants. A post may also answer a poll (frames after ``have``): both are a Post. Time is an
argument, in seconds of any monotonic clock."""

from dataclasses import dataclass, replace
from typing import Any

from titan_grpo.errors import ProtocolError

EMPTY = ""
"""What is sent in place of a frame that came too late to be of use: the number must not be
missing."""


@dataclass(frozen=True, slots=True)
class Kept:
    """One frame that is not acknowledged. ``until``: when it is not worth delivering any more;
    None: never."""

    frame: Any
    size: int
    until: float | None = None


@dataclass(frozen=True, slots=True)
class Outbox:
    """The sender's end: frames ``first`` to ``end - 1`` are kept, those before ``first`` have
    arrived."""

    session: str
    first: int = 0
    kept: tuple[Kept, ...] = ()

    def __repr__(self) -> str:
        return f"<{self.session}: {self.first} arrived, {len(self.kept)} kept>"

    @property
    def end(self) -> int:
        """How many frames there were in all."""
        return self.first + len(self.kept)


@dataclass(frozen=True, slots=True)
class Inbox:
    """The receiver's end: it has taken ``have`` frames."""

    session: str
    have: int = 0

    def __repr__(self) -> str:
        return f"<{self.session}: has {self.have}>"


# Events of the sender.


@dataclass(frozen=True, slots=True)
class Put:
    """A new frame, of ``size`` in any unit."""

    frame: Any
    size: int = 1
    until: float | None = None


@dataclass(frozen=True, slots=True)
class Acknowledged:
    """The receiver has taken ``have`` frames. Old news are no news."""

    have: int


@dataclass(frozen=True, slots=True)
class Due:
    """It is time to post: the oldest frames, of at most ``most`` together (one at least)."""

    now: float
    most: int


Sending = Put | Acknowledged | Due


@dataclass(frozen=True, slots=True)
class Post:
    """Send these, the first of them with that number."""

    session: str
    first: int
    frames: tuple[Any, ...]


# Event and actions of the receiver.


@dataclass(frozen=True, slots=True)
class Got:
    """A Post arrived."""

    session: str
    first: int
    frames: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Deliver:
    """These are new, and next."""

    frames: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Missing:
    """Frames from that number on are somewhere else: ask for them."""

    have: int


@dataclass(frozen=True, slots=True)
class WrongSession:
    """It was for a session that is not this one."""

    session: str


Taking = Deliver | Missing | WrongSession


def send(box: Outbox, event: Sending) -> tuple[Outbox, Post | None]:
    """The sender's next state, and what to post.

    Raises ProtocolError for an acknowledgement of frames that there never were.

    >>> box, _ = send(Outbox("s"), Put("a"))
    >>> box, _ = send(box, Put("b", until=5.0))
    >>> send(box, Due(7.0, most=9))[1].frames
    ('a', '')
    >>> send(box, Acknowledged(1))
    (<s: 1 arrived, 1 kept>, None)
    """
    match event:
        case Put(frame, size, until):
            return replace(box, kept=(*box.kept, Kept(frame, size, until))), None
        case Acknowledged(have):
            if have > box.end:
                raise ProtocolError(
                    f"{have} frames were acknowledged, there are {box.end} in {box!r}"
                )
            gone = max(0, have - box.first)
            return replace(box, first=box.first + gone, kept=box.kept[gone:]), None
        case Due(now, most):
            # Once left out, always left out: a copy of the same number must not say something else
            # later.
            kept = tuple(
                Kept(EMPTY, 0) if k.until is not None and k.until <= now else k for k in box.kept
            )
            count, size = 0, 0
            while count < len(kept) and (count == 0 or size + kept[count].size <= most):
                size += kept[count].size
                count += 1
            post = (
                Post(box.session, box.first, tuple(k.frame for k in kept[:count]))
                if count
                else None
            )
            return replace(box, kept=kept), post


def take(box: Inbox, event: Got) -> tuple[Inbox, Taking]:
    """The receiver's next state, and what follows.

    >>> box, action = take(Inbox("s"), Got("s", 0, ("a", "b")))
    >>> box, action.frames
    (<s: has 2>, ('a', 'b'))
    >>> take(box, Got("s", 1, ("b", "c")))[1]
    Deliver(frames=('c',))
    >>> take(box, Got("s", 3, ("d",)))[1]
    Missing(have=2)
    """
    if event.session != box.session:
        return box, WrongSession(event.session)
    if event.first > box.have:
        return box, Missing(box.have)
    new = event.frames[box.have - event.first :]
    return replace(box, have=box.have + len(new)), Deliver(new)
