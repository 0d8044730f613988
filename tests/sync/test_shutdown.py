"""The end of a sync: the newest version for those who live, one deadline for all the others
together."""

import threading
import time

import pytest

from tests.rigs.present import present
from tests.sync.conftest import MakeRig
from titan_grpo.protocol.messages import Standing
from titan_grpo.sync import server_set

pytestmark = pytest.mark.e2e

TIMEOUT_S = 4.0
SHARED_S = 2.5 * TIMEOUT_S
"""Three servers that cost a deadline each cost more."""

FROZEN, HANGING = ("frozen", "frozen too"), ("slow", "slower", "slowest")


def test_the_live_server_is_flushed_and_all_others_cost_one_deadline_together(
    rig: MakeRig,
) -> None:
    r = rig("live", "dead", *FROZEN, *HANGING)
    r.deliver(1)
    goes_on = threading.Event()
    for url in HANGING:
        r.loaded[url].hold = goes_on
    r.servers["dead"].go_away()
    for url in FROZEN:
        r.servers[url].freeze_receiver()
    r.publish(2)
    r.until(lambda: all(r.server_set.entries()[url].incoming == 2 for url in FROZEN))
    r.until(
        lambda: all(r.server_set.entries()[url].standing is Standing.COMMITTING for url in HANGING)
    )
    r.until(lambda: r.server_set.entries()["live"].held == 2)
    start = time.monotonic()
    assert r.flush(2, TIMEOUT_S) == ["live"]
    r.end()
    assert time.monotonic() - start < SHARED_S, "each of them cost a deadline"
    assert r.servers["live"].versions == [1, 2]
    assert not any(r.servers[url].paused for url in ("live", "dead", *FROZEN))
    goes_on.set()
    # Given up inside their commit: no record may say that they hold anything.
    r.until(
        lambda: all(r.server_set.entries()[url].standing is Standing.UNKNOWN for url in HANGING)
    )


def test_without_a_flush_every_lane_ends_when_it_is_told_to(
    rig: MakeRig, caplog: pytest.LogCaptureFixture
) -> None:
    r = rig("live", "frozen", "dead", lane_deadline_s=120.0)
    r.deliver(1)
    r.servers["frozen"].freeze_receiver()
    r.servers["dead"].go_away()
    r.publish(2)
    r.until(lambda: r.server_set.entries()["frozen"].incoming == 2)
    r.end()
    assert [r for r in caplog.records if r.name == server_set.logger.name] == []


def test_a_lane_that_does_not_end_is_waited_for_once_and_the_summary_says_it(rig: MakeRig) -> None:
    r = rig("stuck")
    r.deliver(1)
    r.loaded["stuck"].hold = threading.Event()
    r.publish(2)
    r.until(lambda: r.server_set.entries()["stuck"].standing is Standing.COMMITTING)
    r.end(within_s=1.0)
    lane = present(r.server_set.lane("stuck"))
    assert lane.is_alive()
    (said,) = r.recorder.history().errors
    assert said.startswith("the lane of stuck did not end within 1.0 s: the server or the sync")
    start = time.monotonic()
    r.end(within_s=120.0)
    assert time.monotonic() - start < 60.0
    r.loaded["stuck"].hold.set()
