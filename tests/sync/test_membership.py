"""Servers that come and go while versions are published; two runs and one server, one server under
two names, and servers that can never serve a run. With real receiver processes."""

import time
from typing import Any

import pytest

from tests.rigs.present import present
from tests.rigs.receiver_server import ReceiverServer
from tests.sync.conftest import MakeRig, Rig
from titan_grpo.engines.server import RolloutNeeds
from titan_grpo.errors import SyncError
from titan_grpo.observe import names
from titan_grpo.protocol.messages import Entry, Label, Standing, new_run_id
from titan_grpo.runkey import Key

pytestmark = pytest.mark.e2e

WAIT_S = 120.0


def join(r: Rig, url: str) -> ReceiverServer:
    """An unknown server joins, or one that left comes back."""
    server = r.servers.setdefault(url, ReceiverServer(url))
    r.server_set.add(url)
    return server


def test_a_server_that_joins_gets_the_newest_version_and_only_then_accepts(rig: MakeRig) -> None:
    r = rig("a")
    for version in (1, 2, 3):
        r.deliver(version)
    late = join(r, "late")
    assert not r.server_set.entries()["late"].accepting
    r.everyone(3)
    assert late.versions == [3]
    assert r.server_set.entries()["late"].accepting
    r.deliver(4)
    assert late.versions == [3, 4]
    assert r.recorder.history().commits["late"] == [3, 4]


def test_a_server_that_leaves_gets_no_more_versions_until_it_is_joined_in_a_newer_epoch(
    rig: MakeRig,
) -> None:
    r = rig("a", "b")
    r.deliver(1)
    for version in (2, 3):
        assert r.server_set.remove("b", WAIT_S)
        assert r.server_set.entries()["b"].standing is Standing.GONE
        r.publish(version)
        assert r.server_set.wait_held(version, WAIT_S, everyone=True) == ["a"]
        assert (r.servers["b"].versions[-1], r.servers["b"].paused) == (version - 1, False)
        join(r, "b")
        r.everyone(version)
    assert r.servers["b"].versions == [1, 2, 3]
    assert r.server_set.take_error() is None, (
        "its receiver, which lived on, would have refused an epoch it had seen"
    )


def test_a_server_that_leaves_in_the_middle_of_a_frozen_transfer_costs_no_deadline(
    rig: MakeRig,
) -> None:
    r = rig("a", "b", lane_deadline_s=120.0)
    r.deliver(1)
    r.servers["b"].freeze_receiver()
    r.publish(2)
    r.until(lambda: r.server_set.entries()["b"].incoming == 2)
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


def test_a_dead_server_leaves_at_once_and_its_image_is_free(rig: MakeRig) -> None:
    r = rig("a", "b")
    r.deliver(1)
    r.servers["b"].go_away()
    r.publish(2)
    r.until(lambda: r.server_set.entries()["b"].standing is Standing.UNKNOWN)
    start = time.monotonic()
    assert r.server_set.remove("b", WAIT_S)
    assert time.monotonic() - start < WAIT_S
    for version in (3, 4, 5):
        r.publish(version)
    assert r.server_set.wait_held(5, WAIT_S, everyone=True) == ["a"]


def second(rig: MakeRig, first: Rig, **config: Any) -> Rig:
    """A later run on the server of the first one, with a version to send."""
    run = rig("a", started=False, **config)
    run.servers["a"] = first.servers["a"]
    run.start()
    run.publish(1)
    return run


def test_a_live_run_keeps_its_server_and_the_other_one_says_whose_it_is(rig: MakeRig) -> None:
    first = rig("a")
    first.deliver(1)
    other = second(rig, first, take_over=False)
    other.until(lambda: other.server_set.last_error("a") is not None)
    error = str(other.server_set.last_error("a"))
    assert f"the live run {first.pool.run_id} has this server" in error
    assert "rollout.take_over = true" in error
    first.deliver(2)
    assert first.server_set.take_error() is None
    assert first.servers["a"].versions == [1, 2]


@pytest.mark.parametrize("config", [{"take_over": True}, {"take_over": False, "owner": "folder"}])
def test_a_run_that_takes_over_gets_the_server_and_the_loser_stops_with_its_name(
    rig: MakeRig, config: dict[str, bool | str]
) -> None:
    first = rig("a", owner="folder", take_over=False)
    first.deliver(1)
    other = second(rig, first, **config)
    other.everyone(1)
    first.until(lambda: first.server_set.last_error("a") is not None)
    first.until(lambda: not present(first.server_set.lane("a")).is_alive())
    with pytest.raises(SyncError, match=f"run {other.pool.run_id} took over every server"):
        first.server_set.reached(2)


def test_a_server_that_another_run_took_in_a_transfer_gets_no_rollouts_and_nobody_waits_for_it(
    rig: MakeRig,
) -> None:
    first = rig("a", "b")
    first.deliver(1)
    first.servers["a"].freeze_receiver()
    first.publish(2)
    first.until(lambda: first.server_set.entries()["a"].incoming == 2)
    other = second(rig, first)  # kills the receiver, so the transfer fails
    other.everyone(1)
    present(first.server_set.lane("a")).join(WAIT_S)
    assert first.server_set.entries()["a"] == Entry()
    start = time.monotonic()
    assert first.server_set.wait_held(2, 10 * WAIT_S, everyone=True) == ["b"]
    assert time.monotonic() - start < WAIT_S


def test_a_server_that_another_run_took_gets_versions_again_once_it_has_left_and_come_back(
    rig: MakeRig,
) -> None:
    first = rig("a", "b")
    first.deliver(1)
    other = second(rig, first)
    other.everyone(1)
    lane = present(first.server_set.lane("a"))
    lane.join(WAIT_S)
    assert not lane.is_alive()
    other.end()
    assert first.server_set.remove("a", WAIT_S)
    first.servers["a"].go_away()  # restarted, it knows of no run
    first.servers["a"].come_back()
    join(first, "a")
    first.publish(2)
    first.everyone(2)


@pytest.mark.parametrize("receiver", ["killed", "alive"])
def test_a_live_run_keeps_its_server_while_its_lane_is_in_backoff(
    rig: MakeRig, receiver: str
) -> None:
    first = rig("a", backoff_s=10 * WAIT_S, backoff_max_s=10 * WAIT_S, commit_deadline_s=WAIT_S)
    first.deliver(1)
    if receiver == "killed":
        first.servers["a"].kill_receiver()
    else:
        present(first.server_set.lane("a")).abort()
    first.publish(2)
    first.until(lambda: first.server_set.last_error("a") is not None)
    other = second(rig, first, take_over=False)
    other.until(lambda: other.server_set.last_error("a") is not None)
    assert f"the live run {first.pool.run_id} has this server" in str(
        other.server_set.last_error("a")
    )
    assert first.servers["a"].versions == [1]


def test_a_run_that_ends_leaves_its_server_to_the_next_one_at_once(rig: MakeRig) -> None:
    first = rig("a", commit_deadline_s=10 * WAIT_S)
    first.deliver(1)
    first.end()
    other = second(rig, first, take_over=False)
    other.everyone(1)
    label = present(Label.parse(other.servers["a"].label))
    assert (label.run_id, label.version) == (other.pool.run_id, 1), "not the first run's version 1"


@pytest.mark.parametrize("owner", ["", "folder"])
def test_a_frozen_run_blocks_the_next_one_for_a_commit_deadline_and_a_resumed_one_never(
    rig: MakeRig, owner: str
) -> None:
    # A lane that finds its receiver frozen greets again, and its run is live: this one rests.
    rest = {"backoff_s": 10 * WAIT_S, "backoff_max_s": 10 * WAIT_S}
    first = rig("a", commit_deadline_s=10 * WAIT_S if owner else 3.0, owner=owner, **rest)
    first.deliver(1)
    first.servers["a"].freeze_receiver()
    second(rig, first, take_over=False, owner=owner).everyone(1)


def test_a_later_run_whose_clock_was_behind_and_has_caught_up_gets_the_server(rig: MakeRig) -> None:
    first = rig("a")
    first.deliver(1)
    second(rig, first, run_id=new_run_id(time.time() - 3600)).everyone(1)


def test_an_earlier_run_that_comes_after_a_later_one_is_refused_and_says_so_once(
    rig: MakeRig, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    earlier = rig("a", started=False)
    later = rig("a", run_id=new_run_id(time.time() + 1))
    later.deliver(1)
    earlier.servers["a"] = later.servers["a"]
    earlier.start()
    earlier.until(lambda: earlier.server_set.last_error("a") is not None)
    said = f"another run has this server: run {later.pool.run_id} "
    assert said in str(earlier.server_set.last_error("a"))
    earlier.until(lambda: earlier.recorder.history().totals[names.SYNC_FAILURES] >= 3)
    assert caplog.text.count(said) == 1, caplog.text
    assert capfd.readouterr().err.count("a refuses this run") == 1
    later.deliver(2)


def test_one_server_under_two_names_is_refused_under_the_second(rig: MakeRig) -> None:
    r = rig("a", "b", started=False)
    r.servers["b"] = r.servers["a"]
    r.start()
    r.publish(1)
    r.until(lambda: any(r.server_set.last_error(url) for url in "ab"))
    (refused,) = [url for url in "ab" if r.server_set.last_error(url)]
    kept = "a" if refused == "b" else "b"
    assert f"it is in this run already as {kept}" in str(r.server_set.last_error(refused))
    for version in (2, 3):
        r.publish(version)
        r.until_held(kept, version)
    assert not r.server_set.last_error(kept)


def test_a_wait_for_servers_that_can_never_serve_the_run_ends_at_once_with_each_reason(
    rig: MakeRig,
) -> None:
    r = rig("a", "b", run_keys={"trainer": Key.generate(), "a": Key.generate()})
    start = time.monotonic()
    assert r.server_set.wait_held(1, 10 * WAIT_S, everyone=False) == []
    assert time.monotonic() - start < WAIT_S
    reasons = r.server_set.unfit()
    assert "a: Hello was proven with another run key" in reasons
    assert "b: Hello proves a run key and its reader has none" in reasons
    r.server_set.refused("a", "a: it wants a key", final=True)
    assert r.server_set.unfit().startswith("a: it wants a key; "), "its URL was said twice"


def test_a_server_that_cannot_read_calls_of_tools_is_refused_before_it_is_greeted(
    rig: MakeRig,
) -> None:
    r = rig("a", "b", "own", started=False, needs=RolloutNeeds(tool_calls=True, exempt=("own",)))
    r.servers["b"].reads_tool_calls = r.servers["own"].reads_tool_calls = False
    r.start()
    r.publish(1)
    r.until(lambda: "b reads no calls of tools" in str(r.server_set.last_error("b")))
    r.until(lambda: all(r.server_set.entries()[url].held == 1 for url in ("a", "own")))
    assert r.servers["b"].receiver_pid is None
