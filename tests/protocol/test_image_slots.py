import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from titan_grpo.errors import ProtocolError
from titan_grpo.protocol import image_slots as B

ONE = frozenset({0})


def do(b: B.SlotTable, *events: B.Event) -> B.SlotTable:
    for event in events:
        b, _ = B.step(b, event)
    return b


def promised(b: B.SlotTable) -> tuple[B.SlotTable, int]:
    b, (action,) = B.step(b, B.Reserve(()))
    assert isinstance(action, B.Promise)
    return b, action.slot


def published(b: B.SlotTable, version: int) -> B.SlotTable:
    b, slot = promised(b)
    return do(b, B.Write(slot, version, ONE), B.Copied(version, 0), B.Complete(version))


def test_a_version_goes_from_reserved_to_complete() -> None:
    b, slot = promised(B.SlotTable.of(2))
    assert (slot, repr(b)) == (0, "[reserved | free]")
    b = do(b, B.Write(slot, 1, ONE))
    assert (b.newest, repr(b)) == (None, "[writing v1 without 0 | free]")
    assert repr(do(b, B.Copied(1, 0), B.Complete(1))) == "[complete v1 | free]"


def test_a_version_is_whole_only_when_every_rank_has_copied_its_part() -> None:
    b, slot = promised(B.SlotTable.of(2))
    b = do(b, B.Write(slot, 1, frozenset({0, 3})))
    b = do(b, B.Copied(1, 3))
    assert repr(b) == "[writing v1 without 0 | free]"
    with pytest.raises(ProtocolError, match="not whole"):
        B.step(b, B.Complete(1))
    with pytest.raises(ProtocolError, match="rank 3 owes no part"):
        B.step(b, B.Copied(1, 3))
    assert do(b, B.Copied(1, 0), B.Complete(1)).newest == 1


def test_versions_only_grow() -> None:
    b, slot = promised(published(B.SlotTable.of(2), 5))
    with pytest.raises(ProtocolError, match="only grow"):
        B.step(b, B.Write(slot, 5, ONE))


def test_a_lane_pins_only_what_is_newer() -> None:
    b = published(B.SlotTable.of(2), 4)
    assert B.step(b, B.Pin("a", 4)) == (b, ())
    b, actions = B.step(b, B.Pin("a", 3))
    assert actions == (B.Read(4, 0),)
    with pytest.raises(ProtocolError, match="holds a pin"):
        B.step(b, B.Pin("a", None))
    assert do(b, B.Unpin("a")).slots[0].pins == frozenset()
    with pytest.raises(ProtocolError, match="no pin"):
        B.step(b, B.Unpin("b"))


def test_a_revoked_reservation_is_what_it_was_before() -> None:
    b, slot = promised(published(B.SlotTable.of(2), 1))
    assert do(b, B.Revoke(slot)) == published(B.SlotTable.of(2), 1)
    b = published(published(B.SlotTable.of(2), 1), 2)
    reserved, slot = promised(b)
    assert not reserved.revocable(None), (
        "version 2 is complete and newer than what the reserved slot holds"
    )
    assert do(reserved, B.Revoke(slot)) == b
    with pytest.raises(ProtocolError, match="must be reserved to be revoked"):
        B.step(b, B.Revoke(slot))


class AnyOrder(RuleBasedStateMachine):
    """Two writing ranks, three lanes, three slots, any order: what a lane reads never changes under
    it."""

    def __init__(self) -> None:
        super().__init__()
        self.b = B.SlotTable.of(3)
        self.version = 0
        self.slot: int | None = None
        self.held: dict[str, int | None] = dict.fromkeys("abc")
        self.reading: dict[str, tuple[int, int]] = {}

    @rule(idle=st.sets(st.sampled_from("abc")))
    def reserve(self, idle: set[str]) -> None:
        waiting = tuple(self.held[lane] for lane in idle - self.reading.keys())
        newest = self.b.newest
        self.b, actions = B.step(self.b, B.Reserve(waiting))
        if newest is not None and any(held is None or held < newest for held in waiting):
            assert self.b.newest == newest, "it is kept for who waits"
        for action in actions:
            assert isinstance(action, B.Promise)
            self.slot = action.slot

    @precondition(lambda self: self.slot is not None)
    @rule()
    def revoke(self) -> None:
        assert self.slot is not None
        self.b, self.slot = do(self.b, B.Revoke(self.slot)), None

    @precondition(lambda self: self.slot is not None)
    @rule()
    def write(self) -> None:
        assert self.slot is not None
        self.version += 1
        self.b, self.slot = do(self.b, B.Write(self.slot, self.version, frozenset({0, 1}))), None

    @rule(rank=st.sampled_from((0, 1)))
    def copy(self, rank: int) -> None:
        for slot in self.b.slots:
            if rank in slot.missing:
                assert slot.version is not None
                self.b = do(self.b, B.Copied(slot.version, rank))

    @rule(good=st.booleans())
    def settle(self, good: bool) -> None:
        for slot in self.b.slots:
            if slot.phase is B.Phase.WRITING and not slot.missing:
                assert slot.version is not None
                self.b = do(self.b, B.Complete(slot.version) if good else B.Discard(slot.version))

    @rule(lane=st.sampled_from("abc"))
    def pin(self, lane: str) -> None:
        if lane in self.reading:
            return
        self.b, actions = B.step(self.b, B.Pin(lane, self.held[lane]))
        held = self.held[lane]
        for read in actions:
            assert isinstance(read, B.Read)
            assert held is None or read.version > held
            assert read.version == self.b.newest
            self.reading[lane] = (read.version, read.slot)

    @rule(lane=st.sampled_from("abc"))
    def unpin(self, lane: str) -> None:
        if lane in self.reading:
            self.b = do(self.b, B.Unpin(lane))
            self.held[lane] = self.reading.pop(lane)[0]

    @invariant()
    def what_is_read_stays(self) -> None:
        for lane, (version, index) in self.reading.items():
            slot = self.b.slots[index]
            assert (slot.phase, slot.version) == (B.Phase.COMPLETE, version)
            assert lane in slot.pins

    @invariant()
    def one_promise_at_a_time(self) -> None:
        assert sum(s.phase is B.Phase.RESERVED for s in self.b.slots) == (self.slot is not None)


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)
