"""The end of a sync: the newest version for those who live, one deadline for all the others
together."""

import threading
import time

import pytest

from titan_grpo.protocol.ledger import Standing

pytestmark = pytest.mark.e2e

TIMEOUT_S = 4.0
SLACK_S = 2.0
"""For a busy machine."""


def test_the_live_server_is_flushed_and_a_frozen_and_a_dead_one_cost_one_deadline_together(rig):
    r = rig("live", "frozen", "frozen too", "dead")
    r.publish(1)
    r.everyone(1)
    r.servers["dead"].go_away()
    for url in ("frozen", "frozen too"):
        r.servers[url].freeze_receiver()
    r.publish(2)
    r.until(lambda: all(r.fleet.entry(url).incoming == 2 for url in ("frozen", "frozen too")))
    start = time.monotonic()
    assert r.worker.flush(2, TIMEOUT_S) == ["live"]
    r.worker.close()
    assert time.monotonic() - start < TIMEOUT_S + SLACK_S
    assert r.servers["live"].versions == [1, 2]
    assert not any(server.paused for server in r.servers.values())


def test_without_a_flush_the_end_is_quick_too(rig):
    r = rig("live", "frozen", "dead", lane_deadline_s=120.0)
    r.publish(1)
    r.everyone(1)
    r.servers["frozen"].freeze_receiver()
    r.servers["dead"].go_away()
    r.publish(2)
    r.until(lambda: r.fleet.entry("frozen").incoming == 2)
    start = time.monotonic()
    r.worker.close()
    assert time.monotonic() - start < TIMEOUT_S + SLACK_S


def test_commits_that_hang_on_two_servers_share_the_deadline(rig):
    r = rig("live", "slow", "slower")
    r.publish(1)
    r.everyone(1)
    goes_on = threading.Event()
    for url in ("slow", "slower"):
        r.loaded[url].hold = goes_on
    r.publish(2)
    r.until(
        lambda: all(r.fleet.entry(url).standing.value == "committing" for url in ("slow", "slower"))
    )
    start = time.monotonic()
    assert r.worker.flush(2, TIMEOUT_S) == ["live"]
    r.worker.close()
    assert time.monotonic() - start < TIMEOUT_S + SLACK_S
    goes_on.set()
    # Given up inside their commit: nobody may believe that they hold anything.
    r.until(
        lambda: all(r.fleet.entry(url).standing is Standing.UNKNOWN for url in ("slow", "slower"))
    )
