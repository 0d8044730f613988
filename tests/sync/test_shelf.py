"""The shelf: slots between one publisher and lanes that progress at their own pace."""

import threading

from titan_grpo.protocol.messages import Label
from titan_grpo.sync.slots import Published, Shelf

WAIT_S = 30.0


def publish(shelf: Shelf, version: int) -> int:
    """Take the reserved slot, write and complete ``version``; the slot."""
    slot = shelf.take_reserved()
    assert slot is not None
    shelf.writing(version, slot, frozenset({0}))
    assert shelf.copied(version, 0)
    shelf.complete(Published(Label("run", version, "f"), slot, (), 0.0))
    return slot


def test_the_first_slot_is_reserved_from_the_start_and_only_once():
    shelf = Shelf(2)
    assert shelf.take_reserved() == 0
    assert shelf.take_reserved() is None


def test_a_lane_that_waits_is_woken_by_a_new_version():
    shelf = Shelf(2)
    got: list[Published | None] = []
    waiting = threading.Thread(target=lambda: got.append(shelf.pin_newer("lane", None, WAIT_S)))
    waiting.start()
    publish(shelf, 1)
    waiting.join(WAIT_S)
    assert [p.version for p in got if p] == [1]


def test_a_lane_gets_the_newest_version_and_skips_what_came_between():
    shelf = Shelf(2)
    for version in (1, 2, 3):
        publish(shelf, version)
    assert shelf.pin_newer("lane", None, 0.0).version == 3
    shelf.unpin("lane")
    assert shelf.pin_newer("lane", 3, 0.0) is None


def test_no_slot_is_given_while_each_one_is_read_and_an_unpin_gives_it():
    shelf = Shelf(2)
    publish(shelf, 1)
    assert shelf.pin_newer("slow", None, 0.0).version == 1
    slot = shelf.take_reserved()
    shelf.writing(2, slot, frozenset({0}))  # from here on slot 0 is pinned and slot 1 is written
    assert shelf.take_reserved() is None
    shelf.unpin("slow")
    assert shelf.wait_reserved(0.0) == 0


def test_a_version_that_no_lane_waits_for_gives_way_to_the_next_one():
    shelf = Shelf(2)
    publish(shelf, 1)
    shelf.pin_newer("busy", None, 0.0)
    assert publish(shelf, 2) == publish(shelf, 3) == 1


def test_a_lane_that_comes_late_gets_the_newest_version_though_its_slot_was_promised_to_the_next_one():
    shelf = Shelf(2)
    publish(shelf, 1)
    shelf.pin_newer("stuck", None, 0.0)
    publish(shelf, 2)  # nobody waits for it, and the other slot is pinned: its slot is reserved
    assert shelf.newest().version == 1
    shelf.unpin("stuck")
    assert shelf.pin_newer("stuck", 1, 0.0).version == 2
    assert shelf.take_reserved() == 0


def test_a_reservation_that_the_trainer_has_taken_is_not_revoked():
    shelf = Shelf(2)
    publish(shelf, 1)
    shelf.pin_newer("stuck", None, 0.0)
    publish(shelf, 2)
    assert shelf.take_reserved() == 1
    shelf.unpin("stuck")
    assert shelf.pin_newer("stuck", 1, 0.0) is None
    shelf.writing(3, 1, frozenset({0}))


def test_a_slot_that_was_put_back_is_the_next_one_again_or_a_late_lanes():
    shelf = Shelf(2)
    publish(shelf, 1)
    shelf.pin_newer("stuck", None, 0.0)
    publish(shelf, 2)
    shelf.put_back(shelf.take_reserved())
    assert shelf.take_reserved() == 1
    shelf.put_back(1)
    shelf.unpin("stuck")
    assert shelf.pin_newer("stuck", 1, 0.0).version == 2
    assert shelf.take_reserved() == 0


def test_a_discarded_version_is_seen_by_nobody_and_its_slot_comes_back():
    shelf = Shelf(2)
    slot = shelf.take_reserved()
    shelf.writing(1, slot, frozenset({0}))
    other = shelf.take_reserved()
    shelf.discard(1)
    assert shelf.newest() is None
    shelf.writing(2, other, frozenset({0}))
    assert shelf.take_reserved() == slot


def test_a_stopped_lane_is_woken_and_pins_nothing_any_more():
    shelf = Shelf(2)
    got: list[Published | None] = []
    waiting = threading.Thread(target=lambda: got.append(shelf.pin_newer("lane", None, WAIT_S)))
    waiting.start()
    shelf.stop("lane")
    waiting.join(WAIT_S)
    publish(shelf, 1)
    assert got == [None]
    assert shelf.pin_newer("lane", None, 0.0) is None


def test_a_sealed_shelf_keeps_the_newest_version_and_gives_no_slot():
    shelf = Shelf(2)
    publish(shelf, 1)
    publish(shelf, 2)
    shelf.seal()
    assert shelf.pin_newer("late", None, 0.0).version == 2
    shelf.unpin("late")
    assert shelf.take_reserved() is None
    assert shelf.newest().version == 2
