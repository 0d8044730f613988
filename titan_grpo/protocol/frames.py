"""Frames delivered once and in order over a way that loses, repeats, delays and reorders them: two
ends, a pair for one direction of one session; a restart of either end is a new session. Pure.

::

    sender    put(frame) -> kept, until acknowledged(have)
              post(now, most) -> Post(session, first, frames), as often as wished
    receiver  take(post) -> the frames of it that are new and next: none if it has them already,
                            an earlier one is missing, or the post is of another session

Frames are texts, numbered from 0. ``have`` is how many the receiver has taken, and so the number of
the one it wants. Time is an argument, in seconds of any monotonic clock."""

from dataclasses import dataclass, replace

from titan_grpo.errors import ProtocolError

EMPTY = ""
"""What is sent in place of a frame that came too late to be of use: the number must not be
missing."""


@dataclass(frozen=True, slots=True)
class Kept:
    """One frame that is not acknowledged. ``until``: when it is not worth delivering any more;
    None: never."""

    frame: str
    until: float | None = None


@dataclass(frozen=True, slots=True)
class Post:
    """Frames on their way, the first of them with that number: the body of ``POST /frames``, and
    the answer to ``GET /frames``, a poll."""

    session: str
    first: int
    frames: tuple[str, ...]


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

    def put(self, frame: str, until: float | None = None) -> "Outbox":
        """With a new frame."""
        return replace(self, kept=(*self.kept, Kept(frame, until)))

    def acknowledged(self, have: int) -> "Outbox":
        """Without the first ``have`` frames, which the receiver has taken. Old news are no news.
        Raises ProtocolError for frames that there never were.

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
        """The oldest frames, of at most ``most`` characters together (one frame at least); None
        without a frame.

        >>> Outbox("s").put("a").put("b", until=5.0).post(7.0, most=9)[1].frames
        ('a', '')
        """
        # Once left out, always left out: a copy of the same number must not say something else
        # later.
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
    """The receiver's end: it has taken ``have`` frames."""

    session: str
    have: int = 0

    def __repr__(self) -> str:
        return f"<{self.session}: has {self.have}>"

    def take(self, post: Post) -> tuple["Inbox", tuple[str, ...]]:
        """The frames of a post that are new and next.

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
