"""Frames delivered exactly once and in order over a transport that loses, repeats, delays and
reorders them. One Outbox and one Inbox serve one direction of one session; a restart of either end
starts a new session. Pure.

::

    sender    put(frame) -> kept until acknowledged(have)
              post(now, most) -> Post(session, first, frames), any number of times
    receiver  take(post) -> its new frames; none if the receiver has them already, an earlier
                            frame is missing, or the post belongs to another session

Frames are texts, numbered from 0. ``have``: how many frames the receiver has taken, which is the
number of the next one. Time is an argument, in seconds of any monotonic clock."""

from dataclasses import dataclass, replace

from titan_grpo.errors import ProtocolError

EMPTY = ""
"""Placeholder for an expired frame: the receiver waits for every number."""


@dataclass(frozen=True, slots=True)
class Kept:
    """One frame that is not acknowledged. ``until``: when it expires; None: never."""

    frame: str
    until: float | None = None


@dataclass(frozen=True, slots=True)
class Post:
    """Frames in flight from number ``first`` on: body of ``POST /frames``, answer to ``GET
    /frames``, a poll."""

    session: str
    first: int
    frames: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Outbox:
    """The sender's end. Frames ``first`` to ``end - 1`` are kept; earlier ones have arrived."""

    session: str
    first: int = 0
    kept: tuple[Kept, ...] = ()

    def __repr__(self) -> str:
        return f"<{self.session}: {self.first} arrived, {len(self.kept)} kept>"

    @property
    def end(self) -> int:
        """Number of all frames so far."""
        return self.first + len(self.kept)

    def put(self, frame: str, until: float | None = None) -> "Outbox":
        """Return the outbox with a new frame."""
        return replace(self, kept=(*self.kept, Kept(frame, until)))

    def acknowledged(self, have: int) -> "Outbox":
        """Return the outbox without the first ``have`` frames, which the receiver has taken. An old
        acknowledgement changes nothing. Raises ProtocolError for more frames than were put.

        >>> Outbox("s").put("a").put("b").acknowledged(1)
        <s: 1 arrived, 1 kept>
        """
        if have > self.end:
            raise ProtocolError(
                f"{have} frames were acknowledged, there are {self.end} in {self!r}"
            )
        gone = max(0, have - self.first)
        return replace(self, first=self.first + gone, kept=self.kept[gone:])

    def post(self, now: float, most: int) -> tuple["Outbox", Post | None]:
        """Return the outbox, and its oldest frames of at most ``most`` characters together (at
        least one frame); None if no frame is kept.

        >>> Outbox("s").put("a").put("b", until=5.0).post(7.0, most=9)[1].frames
        ('a', '')
        """
        # Keep the placeholder: two copies of one number must not differ.
        kept = tuple(
            Kept(EMPTY) if k.until is not None and k.until <= now else k for k in self.kept
        )
        count, size = 0, 0
        while count < len(kept) and (count == 0 or size + len(kept[count].frame) <= most):
            size += len(kept[count].frame)
            count += 1
        frames = tuple(k.frame for k in kept[:count])
        return replace(self, kept=kept), Post(self.session, self.first, frames) if frames else None


@dataclass(frozen=True, slots=True)
class Inbox:
    """The receiver's end; it has taken ``have`` frames."""

    session: str
    have: int = 0

    def __repr__(self) -> str:
        return f"<{self.session}: has {self.have}>"

    def take(self, post: Post) -> tuple["Inbox", tuple[str, ...]]:
        """Return the inbox after a post, and the post's new frames.

        >>> box, new = Inbox("s").take(Post("s", 0, ("a", "b")))
        >>> box, new
        (<s: has 2>, ('a', 'b'))
        >>> box.take(Post("s", 1, ("b", "c")))[1]
        ('c',)
        >>> box.take(Post("s", 3, ("d",)))[1], box.take(Post("of old", 2, ("c",)))[1]
        ((), ())
        """
        if post.session != self.session or post.first > self.have:
            return self, ()
        new = post.frames[self.have - post.first :]
        return replace(self, have=self.have + len(new)), new
