"""Servers that come and go while versions are published, with real receiver processes."""

import time

import pytest

from tests.rigs.receiver_server import DirectControl, ReceiverServer
from titan_grpo.errors import ProtocolError
from titan_grpo.protocol.ledger import Standing

pytestmark = pytest.mark.e2e

WAIT_S = 60.0


def join(r, url: str) -> ReceiverServer:
    """A server that nobody knew joins, or one that left comes back."""
    server = r.servers.setdefault(url, ReceiverServer(url))
    r.worker.add(DirectControl(server))
    return server


def test_a_server_that_joins_gets_the_newest_version_and_only_then_accepts(rig):
    r = rig("a")
    for version in (1, 2, 3):
        r.publish(version)
        r.everyone(version)
    late = join(r, "late")
    assert not r.fleet.entry("late").accepting
    r.everyone(3)
    assert late.versions == [3]
    assert r.fleet.entry("late").accepting
    r.publish(4)
    r.everyone(4)
    assert late.versions == [3, 4]
    assert r.recorder.commits()["late"] == [3, 4]


def test_a_server_that_leaves_gets_no_more_versions_and_the_others_do(rig):
    r = rig("a", "b")
    r.publish(1)
    r.everyone(1)
    r.worker.remove("b")
    assert r.fleet.entry("b").standing is Standing.GONE
    assert not r.servers["b"].paused
    r.publish(2)
    assert r.worker.wait_held(2, WAIT_S, everyone=True) == ["a"]
    assert r.servers["b"].versions == [1]
    assert r.worker.take_error() is None


def test_a_server_that_comes_back_is_joined_in_a_newer_epoch_and_gets_the_newest(rig):
    r = rig("a", "b")
    r.publish(1)
    r.everyone(1)
    for version in (2, 3):
        r.worker.remove("b")
        r.publish(version)
        assert r.worker.wait_held(version, WAIT_S, everyone=True) == ["a"]
        join(r, "b")
        r.everyone(version)
    assert r.servers["b"].versions == [1, 2, 3]
    assert r.worker.take_error() is None, (
        "its receiver, which lived on, would have refused an epoch it had seen"
    )


def test_a_server_that_leaves_in_the_middle_of_a_frozen_transfer_costs_no_deadline(rig):
    r = rig("a", "b", lane_deadline_s=120.0)
    r.publish(1)
    r.everyone(1)
    r.servers["b"].freeze_receiver()
    r.publish(2)
    r.until(lambda: r.fleet.entry("b").incoming == 2)
    start = time.monotonic()
    r.worker.remove("b")
    assert time.monotonic() - start < WAIT_S
    r.publish(3)
    assert r.worker.wait_held(3, WAIT_S, everyone=True) == ["a"]
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
    r.until(lambda: r.fleet.entry("b").standing is Standing.UNKNOWN)
    start = time.monotonic()
    r.worker.remove("b")
    assert time.monotonic() - start < WAIT_S
    for version in (3, 4, 5):
        r.publish(version)
    assert r.worker.wait_held(5, WAIT_S, everyone=True) == ["a"]


def test_a_server_is_not_added_twice_and_a_stranger_is_not_removed(rig):
    r = rig("a")
    with pytest.raises(ProtocolError, match="its last lane goes on"):
        r.worker.add(DirectControl(r.servers["a"]))
    with pytest.raises(ProtocolError, match="has no lane"):
        r.worker.remove("b")
