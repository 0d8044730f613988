"""Two ends of a stream over a way that loses, repeats, delays and reorders, with restarts: once,
and in order."""

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from titan_grpo.errors import PeerError
from titan_grpo.protocol import frames as S


@dataclass
class Wires:
    """Both ends, and all posts and acknowledgements that are still on their way: nothing is ever
    known to be gone."""

    epoch: int = 0
    sender: S.End = field(default_factory=lambda: S.End("0"))
    receiver: S.End = field(default_factory=lambda: S.End("0"))
    put: list[str] = field(default_factory=list)
    expired: set[str] = field(default_factory=set)
    delivered: list[str] = field(default_factory=list)
    posts: list[S.Post] = field(default_factory=list)
    acks: list[S.Post] = field(default_factory=list)

    def put_one(self, until: float | None = None) -> None:
        frame = f"{self.epoch}/{len(self.put)}"
        self.put.append(frame)
        self.sender = self.sender.put(frame, until)

    def post(self, now: float = 0.0, most: int = 3) -> None:
        self.sender, post = self.sender.post(now, most)
        if post.frames:
            self.posts.append(post)

    def arrive(self, index: int, keep: bool) -> None:
        """Any post that was ever made, whichever came before it; kept, it will come once more."""
        if self.posts:
            post = self.posts[index % len(self.posts)]
            if not keep:
                self.posts.remove(post)
            self.receiver, new = self.receiver.take(post)
            assert not new or post.session == self.receiver.session
            self.delivered += new
            self.acks.append(self.receiver.post(0.0, 0)[1])

    def acknowledge(self, index: int) -> None:
        """An answer gets through, however old."""
        if self.acks:
            self.sender, new = self.sender.take(self.acks[index % len(self.acks)])
            assert not new

    def restart(self) -> None:
        """Either end is new: what was not delivered is lost, and what is on its way is of no
        session."""
        self.epoch += 1
        self.sender, self.receiver = S.End(str(self.epoch)), S.End(str(self.epoch))
        self.put, self.delivered = [], []

    def check(self) -> None:
        assert len(self.delivered) == self.receiver.have
        assert all(
            got in (sent, S.EMPTY) for got, sent in zip(self.delivered, self.put, strict=False)
        )
        assert self.sender.first <= self.receiver.have <= self.sender.end == len(self.put)

    def settle(self) -> None:
        """From now on nothing is lost: what is missing is asked for."""
        for _ in self.put:
            self.sender, _ = self.sender.take(self.receiver.post(0.0, 0)[1])
            self.posts = []
            self.post(now=0.0)
            self.arrive(0, keep=False)
        assert self.delivered == self.put


MOVES = st.lists(
    st.tuples(st.sampled_from("pppsssaaakkr"), st.integers(0, 1000), st.booleans()), max_size=80
)


@settings(max_examples=300, deadline=None)
@given(MOVES)
def test_every_frame_is_delivered_once_and_in_order(moves: list[tuple[str, int, bool]]) -> None:
    wires = Wires()
    for kind, number, keep in moves:
        match kind:
            case "p":
                wires.put_one()
            case "s":
                wires.post(most=3 + number % 12)
            case "a":
                wires.arrive(number, keep)
            case "k":
                wires.acknowledge(number)
            case "r":
                wires.restart()
        wires.check()
    wires.settle()


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.tuples(st.one_of(st.none(), st.integers(0, 9)), st.integers(0, 9)),
        min_size=1,
        max_size=20,
    ),
    st.data(),
)
def test_a_frame_past_its_time_is_never_sent_and_its_number_is(
    frames: list[tuple[int | None, int]], data: st.DataObject
) -> None:
    wires, now = Wires(), 0
    for until, passes in frames:
        wires.put_one(None if until is None else float(now + until))
        if data.draw(st.booleans()):
            now += passes
            wires.post(float(now), most=99)
            post = wires.posts[-1]
            late = {k.until for k in wires.sender.kept if k.until is not None and k.until <= now}
            assert late == set()
            assert len(post.frames) == len(wires.sender.kept)
            wires.arrive(len(wires.posts) - 1, keep=True)
            wires.check()


def test_posts_are_bounded_and_never_empty() -> None:
    end = S.End("s").put("of 5.").put("12").put("34").put("of nine..")
    sizes = []
    while (post := end.post(0.0, most=4)[1]).frames:
        sizes.append(post.frames)
        end, _ = end.take(S.Post("s", 0, (), post.first + len(post.frames)))
    assert sizes == [("of 5.",), ("12", "34"), ("of nine..",)]


def test_an_old_acknowledgement_changes_nothing() -> None:
    end, _ = S.End("s").put("a").put("b").put("c").take(S.Post("s", 0, (), 2))
    assert end.take(S.Post("s", 0, (), 1)) == (end, ())


def test_an_acknowledgement_of_what_was_never_sent_is_refused() -> None:
    with pytest.raises(PeerError, match="2 frames were acknowledged, there are 1"):
        S.End("s").put("a").take(S.Post("s", 0, (), 2))
