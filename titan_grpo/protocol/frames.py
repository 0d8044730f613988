"""Frames delivered exactly once and in order over a transport that loses, repeats, delays and
reorders them. One End at each side of a session, which carries frames both ways; a restart of
either side starts a new session. Pure.

::

    put(frame)       -> kept until the other end has it
    post(now, most)  -> Post(session, first, frames, have), any number of times
    take(post)       -> the other end's new frames; none if they were taken already, an earlier one
                        is missing, or the post belongs to another session

Frames are texts, numbered from 0. ``have``: how many of the other end's frames were taken, which is
the number of the next one. Time is an argument, in seconds of any monotonic clock."""

from dataclasses import dataclass, replace

from titan_grpo.errors import PeerError

EMPTY = ""
"""Placeholder for an expired frame: the other end waits for every number."""


@dataclass(frozen=True, slots=True)
class Kept:
    """One frame that is not acknowledged. ``until``: when it expires; None: never."""

    frame: str
    until: float | None = None


@dataclass(frozen=True, slots=True)
class Post:
    """Frames in flight from number ``first`` on, and how many of the other direction the sender
    has. ``wait``: seconds that the answer may wait for a frame; 0: none is asked for."""

    session: str
    first: int
    frames: tuple[str, ...]
    have: int
    wait: float = 0.0


@dataclass(frozen=True, slots=True)
class End:
    """One side of a session. The other one has its frames before ``first``; later ones are kept."""

    session: str
    have: int = 0
    first: int = 0
    kept: tuple[Kept, ...] = ()

    def __repr__(self) -> str:
        return f"<{self.session}: has {self.have}, {self.first} arrived, {len(self.kept)} kept>"

    @property
    def end(self) -> int:
        """Number of all frames put so far."""
        return self.first + len(self.kept)

    def put(self, frame: str, until: float | None = None) -> "End":
        """Return the end with a new frame."""
        return replace(self, kept=(*self.kept, Kept(frame, until)))

    def post(self, now: float, most: int) -> tuple["End", Post]:
        """Return the end, and its oldest frames of at most ``most`` characters together (at least
        one, if any is kept).

        >>> End("s").put("a").put("b", until=5.0).post(7.0, most=9)[1].frames
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
        return replace(self, kept=kept), Post(self.session, self.first, frames, self.have)

    def take(self, post: Post) -> tuple["End", tuple[str, ...]]:
        """Return the end after a post of the other one, and the post's new frames. Raises PeerError
        if the other one has more frames than were put.

        >>> end, new = End("s").put("x").take(Post("s", 0, ("a", "b"), have=1))
        >>> end, new
        (<s: has 2, 1 arrived, 0 kept>, ('a', 'b'))
        >>> end.take(Post("s", 1, ("b", "c"), have=0))[1]
        ('c',)
        >>> end.take(Post("s", 3, ("d",), 1))[1], end.take(Post("of old", 2, ("c",), 1))[1]
        ((), ())
        """
        if post.session != self.session:
            return self, ()
        if post.have > self.end:
            raise PeerError(f"{post.have} frames were acknowledged, there are {self.end}")
        gone = max(0, post.have - self.first)
        new = post.frames[self.have - post.first :] if post.first <= self.have else ()
        have, first = self.have + len(new), self.first + gone
        return replace(self, have=have, first=first, kept=self.kept[gone:]), new
