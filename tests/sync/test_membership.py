"""Servers that come and go while versions are published, with real receiver processes."""

import time

import pytest

from tests.rigs.receiver_server import ReceiverServer
from titan_grpo.errors import ServerRefused
from titan_grpo.protocol.ledger import Standing

pytestmark = pytest.mark.e2e

WAIT_S = 60.0


def join(r, url: str) -> ReceiverServer:
    """An unknown server joins, or one that left comes back."""
    server = r.servers.setdefault(url, ReceiverServer(url))
    r.server_set.add(url)
    return server


def test_a_server_that_joins_gets_the_newest_version_and_only_then_accepts(rig):
    r = rig("a")
    for version in (1, 2, 3):
        r.publish(version)
        r.everyone(version)
    late = join(r, "late")
    assert not r.server_set.entry("late").accepting
    r.everyone(3)
    assert late.versions == [3]
    assert r.server_set.entry("late").accepting
    r.publish(4)
    r.everyone(4)
    assert late.versions == [3, 4]
    assert r.recorder.commits()["late"] == [3, 4]


def test_a_server_that_leaves_gets_no_more_versions_and_the_others_do(rig):
    r = rig("a", "b")
    r.publish(1)
    r.everyone(1)
    assert r.server_set.remove("b", WAIT_S)
    assert r.server_set.entry("b").standing is Standing.GONE
    assert not r.servers["b"].paused
    r.publish(2)
    assert r.server_set.wait_held(2, WAIT_S, everyone=True) == ["a"]
    assert r.servers["b"].versions == [1]
    assert r.server_set.take_error() is None


def test_a_server_that_comes_back_is_joined_in_a_newer_epoch_and_gets_the_newest(rig):
    r = rig("a", "b")
    r.publish(1)
    r.everyone(1)
    for version in (2, 3):
        assert r.server_set.remove("b", WAIT_S)
        r.publish(version)
        assert r.server_set.wait_held(version, WAIT_S, everyone=True) == ["a"]
        join(r, "b")
        r.everyone(version)
    assert r.servers["b"].versions == [1, 2, 3]
    assert r.server_set.take_error() is None, (
        "its receiver, which lived on, would have refused an epoch it had seen"
    )


def test_a_server_that_leaves_in_the_middle_of_a_frozen_transfer_costs_no_deadline(rig):
    r = rig("a", "b", lane_deadline_s=120.0)
    r.publish(1)
    r.everyone(1)
    r.servers["b"].freeze_receiver()
    r.publish(2)
    r.until(lambda: r.server_set.entry("b").incoming == 2)
    start = time.monotonic()
    assert r.server_set.remove("b", WAIT_S)
    assert time.monotonic() - start < WAIT_S
    r.publish(3)
    assert r.server_set.wait_held(3, WAIT_S, everyone=True) == ["a"]
    assert not r.servers["b"].paused
    r.servers["b"].thaw_receiver()
    join(r, "b")
    r.everyone(3)
    assert r.servers["b"].versions == [1, 3]


def test_a_dead_server_leaves_at_once_and_its_image_is_free(rig):
    r = rig("a", "b")
    r.publish(1)
    r.everyone(1)
    r.servers["b"].go_away()
    r.publish(2)
    r.until(lambda: r.server_set.entry("b").standing is Standing.UNKNOWN)
    start = time.monotonic()
    assert r.server_set.remove("b", WAIT_S)
    assert time.monotonic() - start < WAIT_S
    for version in (3, 4, 5):
        r.publish(version)
    assert r.server_set.wait_held(5, WAIT_S, everyone=True) == ["a"]


def test_a_server_is_not_added_twice_and_a_stranger_is_not_removed(rig):
    r = rig("a")
    with pytest.raises(ServerRefused, match="there already"):
        r.server_set.add("a")
    with pytest.raises(ServerRefused, match="not a server of this run"):
        r.server_set.remove("b", WAIT_S)
