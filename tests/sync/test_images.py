"""Image slots behind their lock, and versions as patches: a server that holds an earlier one reads
what has changed, and what a patch does not make it reads whole."""

import numpy as np
import pytest
import torch

from tests.rigs.present import present
from titan_grpo.config import WeightSync
from titan_grpo.layout import delta
from titan_grpo.observe import names
from titan_grpo.protocol.messages import Label
from titan_grpo.sync.images import ImageSlots, Patches, Published
from titan_grpo.sync.publisher import Announcer, Copy

from .conftest import SHAPES, WAIT_S, MakeRig, Rig


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
    slots.complete(Published(Label("run", version, "f"), slot, (), 0.0))
    return slot


def test_the_first_slot_is_reserved_from_the_start_and_only_once() -> None:
    slots = ImageSlots(2)
    assert slots.reserved.take() == 0
    assert slots.reserved.take() is None


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


def test_a_lane_gets_the_newest_version_and_skips_what_came_between() -> None:
    slots = ImageSlots(2)
    for version in (1, 2, 3):
        publish(slots, version)
    assert present(ask(slots, "lane", None)).version == 3
    slots.unpin("lane")
    assert ask(slots, "lane", 3) is None


def test_no_slot_is_given_while_each_one_is_read_and_an_unpin_gives_it() -> None:
    slots = ImageSlots(2)
    publish(slots, 1)
    assert present(ask(slots, "slow", None)).version == 1
    slot = present(slots.reserved.take())
    slots.writing(2, slot, frozenset({0}))  # from here on slot 0 is pinned and slot 1 is written
    assert slots.reserved.take() is None
    slots.unpin("slow")
    assert slots.reserved.wait(0.0) == 0


def test_a_version_that_no_lane_waits_for_gives_way_to_the_next_one() -> None:
    slots = ImageSlots(2)
    publish(slots, 1)
    ask(slots, "busy", None)
    assert publish(slots, 2) == publish(slots, 3) == 1


def test_a_late_lane_gets_the_newest_version_though_its_slot_was_promised_to_the_next() -> None:
    slots = ImageSlots(2)
    publish(slots, 1)
    ask(slots, "stuck", None)
    publish(slots, 2)  # no lane waits for it, and the other slot is pinned: its slot is reserved
    assert present(slots.newest()).version == 1
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
    assert slots.newest() is None
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


def test_a_sealed_set_of_slots_keeps_the_newest_version_and_gives_no_slot() -> None:
    slots = ImageSlots(2)
    publish(slots, 1)
    publish(slots, 2)
    slots.seal()
    assert present(ask(slots, "late", None)).version == 2
    slots.unpin("late")
    assert slots.reserved.take() is None
    assert present(slots.newest()).version == 2


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


IMAGE = 8 << 20


def counted(version: int) -> dict[str, torch.Tensor]:
    """A version whose first elements count versions, and all others are 0."""
    shards = {fqn: torch.zeros(shape) for fqn, shape in SHAPES.items()}
    for tensor in shards.values():
        tensor.view(-1)[: 10 * version] = float(version)
    return shards


def publish_counted(rig: Rig, version: int) -> None:
    """See ``counted``."""
    slot = rig.slots.reserved.wait(WAIT_S)
    assert slot is not None
    rig.publish_into(version, slot, counted(version))
    rig.everyone(version)


def spared(rig: Rig) -> float:
    """Bytes that no server read."""
    return rig.recorder.history().totals.get(names.SPARED_BYTES, 0)


def loaded(rig: Rig, url: str) -> set[float]:
    """Least and largest element of what a server has loaded."""
    return set().union(*rig.loaded[url].values.values())


def test_a_server_reads_patches_after_its_first_version(rig: MakeRig) -> None:
    r = rig("a", "b", delta="on")
    publish_counted(r, 0)
    assert spared(r) == 0
    publish_counted(r, 1)
    publish_counted(r, 2)
    assert spared(r) > 0.99 * 4 * IMAGE
    assert loaded(r, "a") == loaded(r, "b") == {0.0, 2.0}


def test_a_restarted_server_reads_the_whole_version_and_patches_after_it(rig: MakeRig) -> None:
    r = rig("a", delta="on")
    publish_counted(r, 0)
    publish_counted(r, 1)
    before = spared(r)
    r.servers["a"].kill_receiver()
    publish_counted(r, 2)
    assert spared(r) == before
    publish_counted(r, 3)
    assert spared(r) > before + 0.99 * IMAGE
    assert loaded(r, "a") == {0.0, 3.0}


@pytest.mark.long
def test_what_a_failed_version_left_in_a_slot_is_no_patchs_base(rig: MakeRig) -> None:
    """Another rank's parts of versions 2 and 3 are missing; 3 is in the slot of version 1."""
    r = rig("a", delta="on", remote_writers=(1,), lane_deadline_s=8.0)
    other = Announcer(1, r.pool.store.port, WAIT_S)

    def write(version: int, fails: bool = False) -> int:
        slot = r.slots.reserved.wait(WAIT_S)
        assert slot is not None
        if not fails:
            other(version, slot, Copy(0.0))
        r.publish_into(version, slot, counted(version))
        return slot

    write(0)
    r.everyone(0)
    one = write(1)
    r.everyone(1)
    before = spared(r)
    assert [write(version, fails=True) for version in (2, 3)] == [1 - one, one]
    write(4)
    r.everyone(4)
    assert spared(r) == before > 0
    write(5)
    r.everyone(5)
    assert spared(r) > before
    assert loaded(r, "a") == {0.0, 5.0}
    other.close(WAIT_S)


def test_a_wrong_patch_costs_the_blocks_that_differ_and_nothing_else(
    rig: MakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after a slot that was written anew while the patch was made from it."""
    encode = delta.encode

    def torn(base: np.ndarray, new: np.ndarray, limit: int) -> bytes | None:
        torn = base.copy()
        torn[5 << 20] ^= 1
        return encode(torn, new, limit)

    r = rig("a", delta="on")
    publish_counted(r, 0)
    monkeypatch.setattr(delta, "encode", torn)
    publish_counted(r, 1)
    assert 0.4 * IMAGE < spared(r) < 0.99 * IMAGE
    assert loaded(r, "a") == {0.0, 1.0}


def image(value: int) -> memoryview:
    """An image whose first word is ``value``."""
    out = np.zeros(IMAGE // 2, np.uint16)
    out[0] = value
    return out.view(np.uint8).data


def test_a_chain_has_no_gap() -> None:
    patches = Patches(WeightSync(delta="on"), IMAGE, int)
    patches.make(1, image(1), 2, image(2))
    chain = patches.make(2, image(2), 4, image(4))
    assert [(made.base, made.version) for made in chain] == [(1, 2), (2, 4)]
    chain = patches.make(5, image(5), 6, image(6))
    assert [(made.base, made.version) for made in chain] == [(5, 6)]


def test_what_is_kept_stays_within_its_share_of_an_image() -> None:
    patches, rng = Patches(WeightSync(delta="on"), IMAGE, int), np.random.default_rng(0)
    images = [
        np.where(rng.random(IMAGE // 2) < 0.02, n, 0).astype(np.uint16).view(np.uint8).data
        for n in range(20)
    ]
    for n in range(1, 20):
        chain = patches.make(n - 1, images[n - 1], n, images[n])
        assert sum(len(made.data) for made in chain) <= IMAGE / 4
        assert chain[-1].version == n
    assert 1 < len(chain) < 19
    assert patches.make(19, images[0], 20, memoryview(rng.bytes(IMAGE))) == ()


def test_auto_makes_patches_where_a_server_needs_much_longer_for_a_version() -> None:
    patches = Patches(WeightSync(delta="auto"), 1 << 30, int)
    assert not patches.wanted()
    patches.sent("a", 1 << 30, 1.0)
    assert not patches.wanted()
    patches.sent("b", 1 << 30, 90.0)  # 100 Mbit/s
    assert patches.wanted()
    patches = Patches(WeightSync(), 1 << 30, int)
    patches.sent("b", 1 << 30, 90.0)
    assert not patches.wanted()
