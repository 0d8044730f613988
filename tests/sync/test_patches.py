"""Versions as patches: a server that holds an earlier one reads what has changed, of each trainer
host's part by itself, and what a patch does not make it reads whole."""

from collections.abc import Iterator

import numpy as np
import pytest

from tests.rigs.present import present
from titan_grpo.config import WeightSync
from titan_grpo.layout import delta
from titan_grpo.layout.manifest import Manifest, Part
from titan_grpo.observe import names
from titan_grpo.protocol.messages import Patch, RangeSource
from titan_grpo.sync.images import ImagePool
from titan_grpo.sync.patches import Deliveries, Patches, is_wanted, say_wanted
from titan_grpo.sync.publisher import Announcer, Copy
from titan_grpo.sync.transports.range_server import RangeServer

from .conftest import WAIT_S, MakeRig, Rig

IMAGE = 8 << 20
"""Of the rig."""

SMALL = 1 << 20
CHANGED = 10


def spared(rig: Rig) -> float:
    """Bytes that no server read."""
    return rig.recorder.history().totals.get(names.SPARED_BYTES, 0)


def loaded(rig: Rig, url: str) -> set[float]:
    """Least and largest element of what a server has loaded."""
    return set().union(*rig.loaded[url].values.values())


@pytest.mark.parametrize("hosts", [1, 2])
def test_a_server_reads_patches_after_its_first_version(rig: MakeRig, hosts: int) -> None:
    r = rig("a", "b", delta="on", changed=CHANGED, hosts=hosts)
    r.deliver(0)
    assert spared(r) == 0
    r.deliver(1)
    r.deliver(2)
    assert spared(r) > 0.99 * 4 * IMAGE
    assert loaded(r, "a") == loaded(r, "b") == {0.0, 2.0}


def test_the_check_of_a_patched_version_takes_time_too(rig: MakeRig) -> None:
    """Before, its figure was 0, although each block is hashed."""
    r = rig("a", delta="on", changed=CHANGED)
    r.deliver(0)
    r.deliver(1)
    whole_s, patched_s = r.recorder.series(names.VERIFY_S)
    assert spared(r) > 0
    assert min(whole_s, patched_s) > 0


def test_a_restarted_server_reads_the_whole_version_and_patches_after_it(rig: MakeRig) -> None:
    r = rig("a", delta="on", changed=CHANGED)
    r.deliver(0)
    r.deliver(1)
    before = spared(r)
    r.servers["a"].kill_receiver()
    r.deliver(2)
    assert spared(r) == before
    r.deliver(3)
    assert spared(r) > before + 0.99 * IMAGE
    assert loaded(r, "a") == {0.0, 3.0}


def test_a_host_that_was_started_again_has_its_part_read_whole_and_the_other_one_patched(
    rig: MakeRig,
) -> None:
    r = rig("a", delta="on", changed=CHANGED, hosts=2)
    r.deliver(0)
    r.deliver(1)
    before = spared(r)
    r.hosts[0].kill_sync()
    r.deliver(2)
    assert 0.49 * IMAGE < spared(r) - before < 0.51 * IMAGE
    assert loaded(r, "a") == {0.0, 2.0}


def test_other_hosts_make_patches_once_rank_0s_lanes_have_seen_that_they_are_worth_it(
    rig: MakeRig,
) -> None:
    r = rig("a", delta="auto", changed=CHANGED, hosts=2)
    r.deliver(0)
    r.deliver(1)
    r.lanes._deliveries.came("of another host", IMAGE, 3600.0)
    r.deliver(2)  # the second host may have asked before
    r.deliver(3)
    before = spared(r)
    r.deliver(4)
    assert spared(r) - before > 0.99 * IMAGE
    assert loaded(r, "a") == {0.0, 4.0}


def test_a_sync_process_takes_back_that_patches_are_worth_it_as_the_one_before_it_had_seen(
    rig: MakeRig,
) -> None:
    r = rig("a", delta="auto", hosts=2, started=False)
    say_wanted(present(r.pool.hashed), True)
    r.start()
    r.deliver(0)
    assert not is_wanted(present(r.pool.hashed), r.config)


@pytest.mark.long
def test_what_a_failed_version_left_in_a_slot_is_no_patchs_base(rig: MakeRig) -> None:
    """Another rank's parts of versions 2 and 3 are missing; 3 is in the slot of version 1."""
    r = rig("a", delta="on", changed=CHANGED, remote_writers=(1,), lane_deadline_s=8.0)
    other = Announcer(1, r.pool.store.port, WAIT_S, WAIT_S)

    def write(version: int, fails: bool = False) -> int:
        slot = r.slots.reserved.wait(WAIT_S)
        assert slot is not None
        if not fails:
            other(version, slot, Copy(0.0))
        r.publish_into(version, slot)
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

    def torn(base: np.ndarray, new: np.ndarray, part: Part, limit: int) -> bytearray | None:
        torn = base.copy()
        torn[5 << 20] ^= 1
        return encode(torn, new, part, limit)

    r = rig("a", delta="on", changed=CHANGED)
    r.deliver(0)
    monkeypatch.setattr(delta, "encode", torn)
    r.deliver(1)
    assert 0.4 * IMAGE < spared(r) < 0.99 * IMAGE
    assert loaded(r, "a") == {0.0, 1.0}


class Host:
    """A host's patches, by the first word of each version; ``share`` of the words change too."""

    def __init__(self, slots: int) -> None:
        manifest = Manifest.build([("a", "bfloat16", (SMALL // 2,))], 1 << 16)
        self.pool = ImagePool.create(manifest, slots)
        self.server = RangeServer()
        place = RangeSource("127.0.0.1", self.server.listen("127.0.0.1"), "")
        self.patches = Patches(self.pool, self.server, place, None)
        self._random = np.random.default_rng(0)

    def whole(self, version: int, slot: int, share: float = 0.0) -> tuple[Patch, ...]:
        """Write a version, and what leads to it."""
        self.patches.writing(slot)
        words = np.frombuffer(self.pool.images[slot].buffer, np.uint16)
        words[:] = self._random.random(words.size) < share
        words[0] = version
        return self.patches.make(version, slot, wanted=True)

    def served(self) -> set[str]:
        return {ticket.hex() for ticket in self.server._grants}


@pytest.fixture
def host() -> Iterator[Host]:
    made = Host(3)
    yield made
    made.server.close()
    made.pool.close()


def test_a_chain_has_no_gap(host: Host) -> None:
    host.whole(1, 0)
    host.whole(2, 1)
    chain = host.whole(4, 2)
    assert [(made.base, made.version) for made in chain] == [(1, 2), (2, 4)]
    host.patches.writing(2)  # of a version that fails
    assert host.whole(5, 0) == ()
    assert [(made.base, made.version) for made in host.whole(6, 1)] == [(5, 6)]


def test_what_is_kept_stays_within_its_share_of_a_part(host: Host) -> None:
    for n in range(20):
        chain = host.whole(n, n % 3, share=0.02)
        assert sum(made.nbytes for made in chain) <= SMALL / 4
        assert [made.version for made in chain[-1:]] == ([n] if n else [])
    assert 1 < len(chain) < 19
    assert host.whole(20, 2, share=0.9) == ()


def test_a_version_for_whose_patch_no_memory_is_left_has_none(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of a part of many GB: the sealer goes on, and the next version has a patch again."""

    def full(*_: object) -> None:
        raise MemoryError

    host.whole(0, 0)
    with monkeypatch.context() as patch:
        patch.setattr(delta, "encode", full)
        assert host.whole(1, 1) == ()
    assert [(made.base, made.version) for made in host.whole(2, 2)] == [(1, 2)]


def test_patches_to_a_version_are_served_until_its_slot_is_written_again(host: Host) -> None:
    host.whole(0, 0)
    chain = host.whole(1, 1)
    host.patches.writing(2)
    host.patches.make(2, 2, wanted=False)
    assert host.served() == {made.source.ticket for made in chain}
    host.patches.writing(1)
    assert host.served() == set()


def test_auto_makes_patches_where_versions_take_long_and_all_patches_are_less_than_one() -> None:
    manifest = Manifest.build([("a", "bfloat16", (1 << 29,))], 1 << 20)
    seen = Deliveries(WeightSync(delta="auto"), manifest, int)
    assert not seen.patches_wanted()
    seen.came("a", 1 << 30, 1.0)
    assert not seen.patches_wanted()
    seen.came("b", 1 << 30, 90.0)  # 100 Mbit/s
    assert seen.patches_wanted()
    for servers, wanted in ((20, True), (21, False)):
        seen = Deliveries(WeightSync(delta="auto"), manifest, int, relays=True)
        for number in range(servers):
            seen.came(str(number), 1 << 30, 90.0)
        seen.made(0.05)
        assert seen.patches_wanted() is wanted
    seen.gone("0")  # 20 are left
    assert seen.patches_wanted()
    seen = Deliveries(WeightSync(), manifest, int)
    seen.came("b", 1 << 30, 90.0)
    assert not seen.patches_wanted()


def test_patches_that_were_too_large_for_the_link_are_tried_again_the_later_the_larger() -> None:
    def versions_without(share: float) -> int:
        seen.made(share)
        return next(n for n in range(100) if seen.patches_wanted())

    manifest = Manifest.build([("a", "bfloat16", (1 << 29,))], 4 << 20)
    seen = Deliveries(WeightSync(delta="auto"), manifest, int, relays=True)
    for number in range(8):
        seen.came(str(number), manifest.total_bytes, 90.0)
    assert [versions_without(share) for share in (0.1, 0.13, 0.2, 0.25)] == [0, 1, 5, 7]
    assert versions_without(0.01) == 0
    assert all(seen.patches_wanted() for _ in range(100))
