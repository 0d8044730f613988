"""Versions as patches: a server that holds an earlier one reads what has changed, and what a patch
does not make it reads whole."""

import numpy as np
import pytest
import torch

from titan_grpo.config import WeightSync
from titan_grpo.layout import delta
from titan_grpo.observe import names
from titan_grpo.sync.patches import Patches

from .conftest import SHAPES, WAIT_S, MakeRig, Rig

IMAGE = 8 << 20


def publish(rig: Rig, version: int) -> None:
    """A version whose first elements count versions, and all others are 0."""
    slot = rig.slots.wait_reserved(WAIT_S)
    assert slot is not None
    shards = {fqn: torch.zeros(shape) for fqn, shape in SHAPES.items()}
    for tensor in shards.values():
        tensor.view(-1)[: 10 * version] = float(version)
    rig.publish_into(version, slot, shards)
    rig.everyone(version)


def spared(rig: Rig) -> float:
    """Bytes that no server read."""
    return rig.recorder.totals().get(names.SPARED_BYTES, 0)


def loaded(rig: Rig, url: str) -> set[float]:
    """Least and largest element of what a server has loaded."""
    return set().union(*rig.loaded[url].values.values())


def test_a_server_reads_patches_after_its_first_version(rig: MakeRig) -> None:
    r = rig("a", "b", delta="on")
    publish(r, 0)
    assert spared(r) == 0
    publish(r, 1)
    publish(r, 2)
    assert spared(r) > 0.99 * 4 * IMAGE
    assert loaded(r, "a") == loaded(r, "b") == {0.0, 2.0}


def test_a_restarted_server_reads_the_whole_version_and_patches_after_it(rig: MakeRig) -> None:
    r = rig("a", delta="on")
    publish(r, 0)
    publish(r, 1)
    before = spared(r)
    r.servers["a"].kill_receiver()
    publish(r, 2)
    assert spared(r) == before
    publish(r, 3)
    assert spared(r) > before + 0.99 * IMAGE
    assert loaded(r, "a") == {0.0, 3.0}


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
    publish(r, 0)
    monkeypatch.setattr(delta, "encode", torn)
    publish(r, 1)
    assert 0.4 * IMAGE < spared(r) < 0.99 * IMAGE
    assert loaded(r, "a") == {0.0, 1.0}


def image(value: int) -> memoryview:
    """An image whose first word is ``value``."""
    out = np.zeros(IMAGE // 2, np.uint16)
    out[0] = value
    return memoryview(out.view(np.uint8))


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
        memoryview(np.where(rng.random(IMAGE // 2) < 0.02, n, 0).astype(np.uint16).view(np.uint8))
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
