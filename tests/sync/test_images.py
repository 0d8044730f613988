"""Image slots behind their lock."""

import pytest

from tests.rigs.present import present
from titan_grpo.protocol.messages import Label
from titan_grpo.sync.images import ImageSlots, Published


def ask(slots: ImageSlots, lane: str, held: int | None) -> Published | None:
    """Pin what is newer, or leave."""
    found = slots.pin_newer(lane, held, lambda: None)
    if found is None:
        slots.leave(lane)
    return found


def publish(slots: ImageSlots, version: int) -> int:
    """Take the reserved slot, write and complete ``version``; the slot."""
    slot = present(slots.reserved.take())
    assert slot is not None
    slots.writing(version, slot, frozenset({0}))
    slots.copied(version, 0)
    slots.complete(Published(Label("run", version, "f"), slot, b"", 0.0))
    return slot


def test_an_idle_lane_is_woken_by_a_new_version() -> None:
    slots, woken = ImageSlots(2), []
    assert slots.pin_newer("lane", None, lambda: woken.append(1)) is None
    assert woken == []
    publish(slots, 1)
    assert woken == [1]
    assert present(ask(slots, "lane", None)).version == 1


def test_a_lane_that_reads_or_has_left_is_not_woken() -> None:
    slots, woken = ImageSlots(3), []
    publish(slots, 1)
    slots.pin_newer("reads", None, lambda: woken.append("reads"))
    slots.pin_newer("left", 1, lambda: woken.append("left"))
    slots.leave("left")
    publish(slots, 2)
    assert woken == []


def test_a_version_that_an_idle_lane_wants_is_not_written_over_until_it_leaves() -> None:
    slots = ImageSlots(2)
    publish(slots, 1)
    ask(slots, "busy", None)
    slots.pin_newer("idle", None, lambda: None)
    slots.unpin("idle")
    slots.pin_newer("idle", 1, lambda: None)
    publish(slots, 2)
    assert slots.reserved.take() is None
    slots.leave("idle")
    assert slots.reserved.take() == 1


def test_no_slot_is_given_while_each_one_is_read_and_an_unpin_gives_it() -> None:
    slots = ImageSlots(2)
    publish(slots, 1)
    assert present(ask(slots, "slow", None)).version == 1
    slot = present(slots.reserved.take())
    slots.writing(2, slot, frozenset({0}))  # from here on slot 0 is pinned and slot 1 is written
    assert slots.reserved.take() is None
    slots.unpin("slow")
    assert slots.reserved.wait(0.0) == 0


def test_a_late_lane_gets_the_newest_version_though_its_slot_was_promised_to_the_next() -> None:
    slots = ImageSlots(2)
    publish(slots, 1)
    ask(slots, "stuck", None)
    publish(slots, 2)  # no lane waits for it, and the other slot is pinned: its slot is reserved
    assert "complete v1" in repr(slots)
    assert "reserved v2" in repr(slots)
    slots.unpin("stuck")
    assert present(ask(slots, "stuck", 1)).version == 2
    assert slots.reserved.take() == 0


def test_a_reservation_that_the_trainer_has_taken_is_not_revoked() -> None:
    slots = ImageSlots(2)
    publish(slots, 1)
    ask(slots, "stuck", None)
    publish(slots, 2)
    assert slots.reserved.take() == 1
    slots.unpin("stuck")
    assert ask(slots, "stuck", 1) is None
    slots.writing(3, 1, frozenset({0}))


def test_a_slot_that_was_put_back_is_the_next_one_again_or_a_late_lanes() -> None:
    slots = ImageSlots(2)
    publish(slots, 1)
    ask(slots, "stuck", None)
    publish(slots, 2)
    slots.reserved.put(present(slots.reserved.take()))
    assert slots.reserved.take() == 1
    slots.reserved.put(1)
    slots.unpin("stuck")
    assert present(ask(slots, "stuck", 1)).version == 2
    assert slots.reserved.take() == 0


def test_a_discarded_version_is_never_seen_and_its_slot_comes_back() -> None:
    slots = ImageSlots(2)
    slot = present(slots.reserved.take())
    slots.writing(1, slot, frozenset({0}))
    other = present(slots.reserved.take())
    slots.discard(1)
    assert "v1" not in repr(slots)
    slots.writing(2, other, frozenset({0}))
    assert slots.reserved.take() == slot


def test_a_stopped_lane_pins_nothing_any_more_and_wants_no_slot() -> None:
    slots = ImageSlots(2)
    publish(slots, 1)
    ask(slots, "busy", None)
    slots.pin_newer("lane", 1, lambda: None)
    slots.stop("lane")
    publish(slots, 2)
    assert slots.reserved.take() == 1
    assert ask(slots, "lane", None) is None


def test_a_finished_set_of_slots_keeps_the_newest_version_and_gives_no_slot() -> None:
    slots = ImageSlots(2)
    publish(slots, 1)
    publish(slots, 2)
    slots.finish()
    assert present(ask(slots, "late", None)).version == 2
    slots.unpin("late")
    assert slots.reserved.take() is None
    assert "complete v2" in repr(slots)


def test_a_lane_that_is_kept_on_its_version_gets_the_newest_one_when_it_goes_on() -> None:
    slots = ImageSlots(2)
    publish(slots, 1)
    assert present(ask(slots, "kept", None)).version == 1
    slots.unpin("kept")
    slots.keep("kept")
    for version in (2, 3):
        publish(slots, version)
        assert ask(slots, "kept", 1) is None
        assert present(ask(slots, "other", version - 1)).version == version, "others go on"
        slots.unpin("other")
    slots.go_on("kept")
    assert present(ask(slots, "kept", 1)).version == 3


def test_a_lane_that_is_idle_while_it_is_kept_is_woken_to_go_on() -> None:
    slots, woken = ImageSlots(2), []
    slots.keep("lane")
    publish(slots, 1)
    assert slots.pin_newer("lane", None, lambda: woken.append(1)) is None
    publish(slots, 2)
    woken.clear()
    slots.go_on("lane")
    assert woken == [1]
    assert present(ask(slots, "lane", None)).version == 2


@pytest.mark.parametrize("how", ["keep", "stop"])
def test_an_idle_lane_that_gets_no_newer_version_holds_no_slot(how: str) -> None:
    slots = ImageSlots(2)
    publish(slots, 1)
    ask(slots, "busy", None)
    getattr(slots, how)("lane")
    assert slots.pin_newer("lane", 0, lambda: None) is None
    publish(slots, 2)
    assert slots.reserved.take() == 1


def test_digests_of_versions_that_are_written_over_are_forgotten() -> None:
    slots = ImageSlots(2)
    for version in range(1, 6):
        publish(slots, version)
    assert slots._published.keys() == {4, 5}
