import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from titan_grpo.errors import ProtocolError
from titan_grpo.protocol import boundary as B


def published(b: B.Boundary, version: int) -> B.Boundary:
    b, slot = B.reserve(b, newest_wanted=False)
    assert slot is not None
    return B.complete(B.write(b, slot, version), version)


def test_a_version_goes_from_reserved_to_complete():
    b, slot = B.reserve(B.Boundary.of(2), False)
    assert (slot, repr(b)) == (0, "[reserved | free]")
    b = B.write(b, slot, 1)
    assert (b.newest, repr(b)) == (None, "[writing v1 | free]")
    assert repr(B.complete(b, 1)) == "[complete v1 | free]"


def test_the_oldest_unpinned_image_is_overwritten_first():
    b = published(published(B.Boundary.of(2), 1), 2)
    assert B.reserve(b, False)[1] == b.slot_of(1)


def test_a_pinned_slot_is_never_reserved():
    b = published(published(B.Boundary.of(2), 1), 2)
    b, version = B.pin(b, "a", None)
    assert version == 2
    b, slot = B.reserve(b, False)
    assert repr(b) == "[reserved v1 | complete v2 <a>]"
    b = B.complete(B.write(b, slot, 3), 3)
    b, version = B.pin(b, "b", 2)
    assert version == 3
    assert B.reserve(b, False) == (b, None)


def test_the_newest_image_stays_while_an_idle_lane_wants_it():
    b, _ = B.pin(published(B.Boundary.of(2), 1), "slow", None)
    b = published(b, 2)
    assert B.reserve(b, newest_wanted=True) == (b, None)
    assert B.reserve(b, newest_wanted=False)[1] == b.slot_of(2)


def test_only_one_slot_is_reserved_at_a_time():
    b, _ = B.reserve(B.Boundary.of(3), False)
    assert B.reserve(b, False) == (b, None)


def test_a_sealed_boundary_keeps_the_newest_image():
    b, _ = B.reserve(published(B.Boundary.of(2), 1), False)
    b = B.seal(b)
    assert repr(b) == "[complete v1 | free] sealed"
    assert B.reserve(b, False) == (b, None)


def test_versions_only_grow():
    b, slot = B.reserve(published(B.Boundary.of(2), 5), False)
    with pytest.raises(ProtocolError, match="only grow"):
        B.write(b, slot, 5)


def test_a_lane_pins_only_what_is_newer():
    b = published(B.Boundary.of(2), 4)
    assert B.pin(b, "a", 4) == (b, None)
    b, version = B.pin(b, "a", 3)
    assert version == 4
    with pytest.raises(ProtocolError, match="holds a pin"):
        B.pin(b, "a", None)
    assert B.unpin(b, "a").slots[0].pins == frozenset()
    with pytest.raises(ProtocolError, match="no pin"):
        B.unpin(b, "b")


def test_a_failed_copy_frees_its_slot():
    b, slot = B.reserve(B.Boundary.of(2), False)
    assert repr(B.discard(B.write(b, slot, 1), 1)) == "[free | free]"


@settings(max_examples=300, deadline=None)
@given(st.lists(st.sampled_from(["reserve", "write", "complete", "pin a", "pin b", "unpin a", "unpin b"]), max_size=60))
def test_in_any_order_a_pinned_image_never_changes(events):
    b, version, reserved, held = B.Boundary.of(2), 0, None, {"a": None, "b": None}
    pinned: dict[str, int] = {}
    for event in events:
        verb, _, lane = event.partition(" ")
        if verb == "reserve":
            b, slot = B.reserve(b, newest_wanted=False)
            reserved = slot if slot is not None else reserved
        elif verb == "write" and reserved is not None:
            version += 1
            b, reserved = B.write(b, reserved, version), None
        elif verb == "complete":
            for slot in b.slots:
                if slot.phase is B.Phase.WRITING:
                    b = B.complete(b, slot.version)
        elif verb == "pin" and lane not in pinned:
            b, got = B.pin(b, lane, held[lane])
            if got is not None:
                assert held[lane] is None or got > held[lane]
                pinned[lane] = got
        elif verb == "unpin" and lane in pinned:
            b = B.unpin(b, lane)
            held[lane] = pinned.pop(lane)
        for lane_name, v in pinned.items():
            slot = b.slots[b.slot_of(v)]
            assert slot.phase is B.Phase.COMPLETE
            assert lane_name in slot.pins


def test_a_revoked_reservation_is_what_it_was_before():
    b, slot = B.reserve(published(B.Boundary.of(2), 1), False)
    assert B.revoke(b, slot) == published(B.Boundary.of(2), 1)
    b = published(published(B.Boundary.of(2), 1), 2)
    promised, slot = B.reserve(b, False)
    assert not B.revocable(promised, None)  # version 2 is complete and newer than what the reserved slot holds
    assert B.revoke(promised, slot) == b
    with pytest.raises(ProtocolError, match="only a reservation is revoked"):
        B.revoke(b, slot)
