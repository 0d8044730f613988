"""Lanes with real receiver processes: what a bad server costs is its own version, never the others'
and never a mix."""

import threading
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.rigs.present import present
from tests.rigs.receiver_server import DirectControl
from tests.rigs.sockets import descriptors_left
from tests.sync.conftest import MakeRig
from titan_grpo.engines.http import TlsFailed
from titan_grpo.engines.server import RolloutNeeds
from titan_grpo.errors import ServerRefused
from titan_grpo.observe import names
from titan_grpo.protocol import lane as table
from titan_grpo.protocol.lane import LaneEvent, Point
from titan_grpo.protocol.messages import Standing
from titan_grpo.protocol.pause_guard import Deadlines
from titan_grpo.receive.commit import WorkerDevice
from titan_grpo.sync.lane import STOOD_STILL_S
from titan_grpo.sync.pause_guard_main import Access, fence

pytestmark = pytest.mark.e2e

WAIT_S = 120.0


class Strike:
    """A watch that does something when a lane passes a point for the first time, and remembers
    every passing."""

    def __init__(self, point: Point, action: Callable[[], object]) -> None:
        self._point, self._action = point, action
        self._passed: list[tuple[Point, float]] = []
        self._changed = threading.Condition()

    def __call__(self, passing: LaneEvent) -> None:
        with self._changed:
            first = passing.point is self._point and self._point not in [p for p, _ in self._passed]
            self._passed.append((passing.point, time.monotonic()))
            self._changed.notify_all()
        if first:
            self._action()

    def times(self, point: Point) -> list[float]:
        with self._changed:
            return [t for p, t in self._passed if p is point]

    def wait(self, point: Point, count: int) -> bool:
        with self._changed:
            return self._changed.wait_for(
                lambda: [p for p, _ in self._passed].count(point) >= count, WAIT_S
            )


def test_versions_reach_every_server_through_one_epoch_and_are_read_back(rig: MakeRig) -> None:
    r = rig("a", "b", quantised={"b": "fp8"})
    for version in (1, 2, 3):
        r.deliver(version)
        for url, server in r.servers.items():
            assert server.label == str(r.complete(version).label)
            assert not server.paused
            assert r.loaded[url].value() == version
            assert r.server_set.entries()[url].accepting
    assert r.recorder.history().commits == {"a": [1, 2, 3], "b": [1, 2, 3]}
    assert r.recorder.history().quantised == {"a": "", "b": "fp8"}
    assert len(r.recorder.series(names.CONNECT_S)) == 2
    assert r.server_set.take_error() is None


def test_a_receiver_that_joins_late_renews_the_lease_of_its_lane(
    rig: MakeRig, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The hello and the look at the label take 5 s each, where the lease is 9 s. The server is none
    that the guard could reach: each look at it is a line of its log."""
    pace, greet, label = threading.Event(), DirectControl.greet, DirectControl.label

    def slow_greet(control: DirectControl, hello: Mapping[str, Any]) -> None:
        pace.wait(5.0)
        greet(control, hello)

    def slow_label(control: DirectControl) -> str:
        pace.wait(5.0)
        return label(control)

    monkeypatch.setattr(DirectControl, "greet", slow_greet)
    monkeypatch.setattr(DirectControl, "label", slow_label)
    connected = Strike(Point.CONNECTED, pace.set)
    r = rig("a", watch=connected, leases=Deadlines(60.0, 9.0, tries=1))
    assert connected.wait(Point.CONNECTED, 1)
    r.end()
    assert (tmp_path / "pause_guard.log").read_text() == ""


def test_the_engine_pins_its_receivers_memory_before_there_is_a_version(
    rig: MakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    pinned, pins = threading.Event(), []

    def pin(
        _: WorkerDevice, image: torch.Tensor
    ) -> None:  # stands in for the call that needs a GPU
        pins.append(image.numel())
        pinned.set()

    monkeypatch.setattr(WorkerDevice, "pin", pin)
    r = rig("a")
    assert pinned.wait(WAIT_S)
    assert r.servers["a"].versions == []
    r.deliver(1)
    assert pins == [r.pool.manifest.total_bytes]


def test_a_frozen_receiver_does_not_delay_the_other_server_and_gets_the_newest_in_a_new_epoch(
    rig: MakeRig,
) -> None:
    frozen, others_are_done = threading.Event(), threading.Event()

    def watch(passing: LaneEvent) -> None:
        if passing.url == "a" and passing.point is Point.GREET and frozen.is_set():
            assert others_are_done.wait(WAIT_S)

    r = rig("a", "b", lane_deadline_s=8.0, watch=watch)
    r.deliver(1)
    r.servers["a"].freeze_receiver()
    frozen.set()
    for version in (2, 3, 4, 5):
        r.publish(version)
        assert r.servers["b"].wait_version(version, WAIT_S)
    assert r.servers["b"].versions == [1, 2, 3, 4, 5]
    assert r.servers["a"].versions == [
        1
    ]  # its lane has not even begun anew, so b waited for none of it
    others_are_done.set()
    assert r.servers["a"].wait_version(5, WAIT_S)
    assert r.servers["a"].versions == [1, 5]
    assert r.loaded["a"].value() == 5.0
    assert r.recorder.history().totals[names.SYNC_FAILURES] == 1


def test_a_receiver_that_thaws_in_time_goes_on_and_then_takes_the_newest(rig: MakeRig) -> None:
    r = rig("a", "b")
    r.deliver(1)
    r.servers["a"].freeze_receiver()
    r.publish(2)
    r.until(lambda: r.server_set.entries()["a"].incoming == 2)
    for version in (3, 4):
        r.publish(version)
        assert r.servers["b"].wait_version(version, WAIT_S)
    r.servers["a"].thaw_receiver()
    assert r.servers["a"].wait_version(4, WAIT_S)
    assert r.servers["a"].versions == [1, 2, 4]
    assert names.SYNC_FAILURES not in r.recorder.history().totals


def test_two_frozen_servers_keep_no_slot_from_a_healthy_one_past_the_progress_deadline(
    rig: MakeRig,
) -> None:
    r = rig("a", "b", "c", slots=2, lane_deadline_s=600.0, progress_deadline_s=1.0)
    r.deliver(1)
    for version, url in ((2, "a"), (3, "b")):  # one slot each
        r.servers[url].freeze_receiver()
        r.publish(version)
        assert r.servers["c"].wait_version(version, WAIT_S)
    for version in (4, 5, 6):
        r.publish(version)  # waits for a slot, less than the transfer's deadline
        assert r.servers["c"].wait_version(version, WAIT_S)
    assert r.servers["c"].versions == [1, 2, 3, 4, 5, 6]


def test_a_server_that_went_away_takes_no_rollouts_and_gets_the_newest_when_it_is_back(
    rig: MakeRig,
) -> None:
    r = rig("a", "b")
    r.deliver(1)
    r.servers["a"].go_away()
    for version in (2, 3):
        r.publish(version)
        assert r.servers["b"].wait_version(version, WAIT_S)
    r.until(lambda: r.server_set.entries()["a"].standing is Standing.UNKNOWN)
    assert not r.server_set.entries()["a"].accepting
    r.servers["a"].come_back()
    assert r.servers["a"].wait_version(3, WAIT_S)
    assert r.servers["a"].versions == [1, 3]


def test_an_idle_lane_notices_a_server_that_was_restarted_and_one_that_somebody_paused(
    rig: MakeRig,
) -> None:
    r = rig("restarted", "paused")
    r.deliver(1)
    r.servers["restarted"].go_away()
    r.servers["restarted"].come_back()
    DirectControl(r.servers["paused"]).pause()
    assert r.servers["restarted"].wait_version(1, WAIT_S)
    r.until(lambda: not r.servers["paused"].paused)
    r.everyone(1)
    assert r.servers["paused"].versions == [1], "its weights were right: it only had to go on"


def test_an_idle_lane_puts_its_label_back_over_the_engines_and_another_runs(
    rig: MakeRig,
) -> None:
    r = rig("a", "b")
    r.deliver(1)
    label = r.servers["a"].label
    for url, shown in (("a", "default"), ("b", label.replace(r.lanes.run_id, "other"))):
        DirectControl(r.servers[url]).relabel(shown)
    r.until(lambda: all(server.label == label for server in r.servers.values()))


def test_idle_lanes_have_no_threads_and_notice_at_once_that_a_receiver_ended(
    rig: MakeRig,
) -> None:
    strike = Strike(Point.GREET, lambda: None)
    r = rig("a", "b", look_s=3600.0, watch=strike)
    r.deliver(1)
    for thread in threading.enumerate():
        if thread.name.startswith("lane "):
            thread.join(WAIT_S)
            assert not thread.is_alive(), thread.name
    r.servers["a"].kill_receiver()
    assert strike.wait(Point.GREET, 3)
    r.everyone(1)


def test_bytes_that_changed_after_their_digest_are_counted_retried_and_never_loaded(
    rig: MakeRig,
) -> None:
    r = rig("a", started=False)
    r.servers["a"].go_away()
    r.start()
    slot = r.publish(1)
    r.complete(1)
    r.pool.images[slot].buffer[5_000_000] ^= 1
    r.servers["a"].come_back()
    r.until(lambda: r.recorder.history().totals.get(names.DIGEST_MISMATCHES, 0) >= 1)
    assert r.servers["a"].versions == []
    assert r.loaded["a"].values == {}
    r.until(lambda: getattr(r.server_set.last_error("a"), "block", None) is not None)
    error = present(r.server_set.last_error("a"))
    assert (error.url, error.version, error.block) == ("a", 1, 5_000_000 // r.config.block_bytes)
    r.pool.images[slot].buffer[5_000_000] ^= 1
    assert r.servers["a"].wait_version(1, WAIT_S)
    assert r.loaded["a"].value() == 1.0


def test_a_half_loaded_server_stays_paused_until_a_whole_load(rig: MakeRig) -> None:
    looked = threading.Event()

    def watch(passing: LaneEvent) -> None:
        if (
            passing.point is Point.LOAD
            and passing.version == 2
            and not r.loaded["a"].breaks.is_set()
        ):
            assert looked.wait(WAIT_S)

    r = rig("a", watch=watch)
    r.deliver(1)
    r.loaded["a"].breaks.set()
    r.publish(2)
    r.until(lambda: bool(r.recorder.history().totals.get(names.QUARANTINES)))
    assert (r.servers["a"].versions, r.servers["a"].paused) == ([1], True)
    looked.set()
    assert r.servers["a"].wait_version(2, WAIT_S)
    r.until(lambda: r.server_set.entries()["a"].held == 2)
    assert not r.servers["a"].paused
    assert r.loaded["a"].value() == 2.0
    assert "half loaded" in str(r.server_set.take_error())


def test_a_stop_that_meets_the_step_into_a_commit_leaves_the_commit_alone(
    rig: MakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    stepping, stopped = threading.Event(), threading.Event()
    step = table.step

    def held_step(
        state: table.Lane, event: table.Event
    ) -> tuple[table.Lane, tuple[table.Action, ...]]:
        if isinstance(event, table.Staged):
            stepping.set()
            stopped.wait(1.0)  # a stop that does not wait for the step takes effect meanwhile
        return step(state, event)

    monkeypatch.setattr(table, "step", held_step)
    r = rig("a")
    r.publish(1)
    assert stepping.wait(WAIT_S)
    lane = present(r.server_set.lane("a"))
    lane.stop()
    stopped.set()
    lane.join(WAIT_S)
    assert r.servers["a"].versions == [1]
    assert not r.servers["a"].paused


def test_a_server_restarted_before_its_label_is_not_given_it_although_it_would_take_it(
    rig: MakeRig,
) -> None:
    def restart() -> None:
        # as if a stray call had opened an update on it: this server takes any label
        r.servers["a"].go_away()
        r.loaded["a"].values.clear()
        threading.Event().wait(2 * STOOD_STILL_S)  # less than an engine takes to start
        r.servers["a"].come_back()

    strike = Strike(Point.LABEL, restart)
    r = rig("a", watch=strike)
    r.deliver(1)
    assert r.loaded["a"].value() == 1.0
    assert len(strike.times(Point.BEGIN)) == 2, "the second time to the server that came back"
    assert len(strike.times(Point.HELD)) == 1
    assert r.recorder.history().commits == {"a": [1]}
    assert "set label failed" in str(r.server_set.take_error())


@pytest.mark.parametrize(
    "point", [Point.LABEL, Point.RESUME, Point.RESUMED], ids=lambda point: point.value
)
def test_a_receiver_killed_after_its_load_is_replaced_at_once_and_nothing_is_sent_twice(
    rig: MakeRig, point: Point
) -> None:
    strike = Strike(point, lambda: r.servers["a"].kill_receiver())
    r = rig("a", watch=strike, commit_deadline_s=2 * WAIT_S)
    r.publish(1)
    assert strike.wait(Point.GREET, 2)
    r.everyone(1)
    assert len(strike.times(Point.BEGIN)) == 1
    assert not r.servers["a"].paused
    lost, greeted = strike.times(point)[0], strike.times(Point.GREET)[1]
    assert greeted - lost < WAIT_S, "a deadline of its own, not that of a commit call"


def test_a_lane_that_was_fenced_before_its_load_learns_it_before_the_deadline_of_the_load(
    rig: MakeRig,
) -> None:
    def newer_epoch() -> None:
        fence(
            DirectControl(r.servers["a"]), Access("127.0.0.1", 10.0, WAIT_S, ""), r.pool.run_id, 3
        )

    strike = Strike(Point.LOAD, newer_epoch)
    r = rig("a", watch=strike, commit_deadline_s=2 * WAIT_S)
    r.publish(1)
    assert strike.wait(Point.GREET, 2)
    greeted = strike.times(Point.GREET)[1]
    r.everyone(1)
    assert r.servers["a"].versions == [1]
    assert not r.servers["a"].paused
    assert greeted - strike.times(Point.LOAD)[0] < WAIT_S


@pytest.mark.parametrize(
    "moment", ["before its label", "before its resume", "before the answer to its label"]
)
def test_a_lane_that_stood_still_neither_labels_nor_resumes_a_server_that_another_has(
    rig: MakeRig, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    def replaced() -> None:
        access = Access("127.0.0.1", 10.0, WAIT_S, "")
        fence(DirectControl(r.servers["a"]), access, r.pool.run_id, 3)
        threading.Event().wait(2 * STOOD_STILL_S)  # as long as the lane stands still

    finish, labels = DirectControl.finish, list[str]()

    def answered(control: DirectControl, label: str) -> None:
        labels.append(label)
        finish(control, label)
        if moment == "before the answer to its label":
            replaced()

    monkeypatch.setattr(DirectControl, "finish", answered)
    struck = {"before its label": Point.LABEL, "before its resume": Point.RESUME}
    strike = Strike(struck.get(moment, Point.RESUMED), replaced)
    r = rig("a", watch=strike)
    r.publish(1)
    assert strike.wait(Point.GREET, 2)
    assert strike.times(Point.RESUMED) == []
    r.everyone(1)
    assert len(labels) == (moment != "before its label")
    assert r.servers["a"].versions == [1]
    assert not r.servers["a"].paused


def test_a_lane_that_gets_no_descriptor_for_its_image_goes_on_once_it_does(rig: MakeRig) -> None:
    with ExitStack() as shortage:

        def watch(passing: LaneEvent) -> None:
            if passing.point is Point.BEGIN and not r.server_set.last_error("a"):
                shortage.enter_context(descriptors_left(0))
            elif passing.point is Point.GREET:
                shortage.close()

        r = rig("a", watch=watch)
        r.deliver(1)
    assert "send failed: [Errno 24]" in str(r.server_set.take_error())


def test_a_lane_whose_connection_cannot_be_closed_goes_on(
    rig: MakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Routes:
        def workers(self, _: float) -> int:
            raise ServerRefused("it starts up")

        def close(self) -> None:
            raise RuntimeError("can't start new thread")

    offered = iter([Routes()])
    monkeypatch.setattr(DirectControl, "stock", lambda _: next(offered, None))
    r = rig("a", apply="streamed")
    r.deliver(1)
    assert "connect failed: it starts up" in str(r.server_set.take_error())


def test_a_server_that_is_away_is_said_once_for_each_time_that_it_is_away(
    rig: MakeRig, caplog: pytest.LogCaptureFixture
) -> None:
    def counted(failures: int) -> bool:
        return r.recorder.history().totals.get(names.SYNC_FAILURES, 0) >= failures

    r = rig("a")
    for version in (1, 2):
        r.deliver(version)
        r.servers["a"].go_away()
        r.until(partial(counted, 3 * version))
        r.servers["a"].come_back()
        r.until_held("a", version)
        assert r.server_set.take_error() is not None
        assert caplog.text.count("connect failed: a is away") == version, caplog.text


def test_a_server_without_https_or_a_trusted_certificate_is_said_at_once(
    rig: MakeRig, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def untrusted(*_: object) -> None:
        raise TlsFailed("a: GET /weight_info failed (certificate has expired)")

    monkeypatch.setattr(DirectControl, "greet", untrusted)
    r = rig("a")
    r.until(lambda: "certificate has expired" in str(r.server_set.last_error("a")))
    said = capsys.readouterr().err
    assert "a refuses this run: GET /weight_info failed (certificate has expired)" in said


def test_a_server_whose_receiver_does_not_reach_the_trainer_is_said_once(
    rig: MakeRig, caplog: pytest.LogCaptureFixture
) -> None:
    r = rig("a", connect_deadline_s=0.001)
    r.until(lambda: r.recorder.history().totals.get(names.SYNC_FAILURES, 0) >= 3)
    assert caplog.text.count("waiting for the server's receiver to connect") == 1, caplog.text


def test_a_server_is_not_paused_while_another_one_answers_at_its_url(rig: MakeRig) -> None:
    """The other one holds a version of this run too: the greeted one's before the last."""
    r = rig("a", look_s=3600.0)
    r.deliver(1)
    before = r.servers["a"].label
    r.deliver(2)
    DirectControl(r.servers["a"]).relabel(before)
    r.deliver(3)
    assert "do two servers answer at this URL?" in str(r.server_set.take_error())


def test_a_lane_that_is_stopped_before_it_greets_its_server_does_not_greet_it(
    rig: MakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, answered = threading.Event(), threading.Event()

    def asks(_: DirectControl) -> None:
        asked.set()
        assert answered.wait(WAIT_S)

    monkeypatch.setattr(DirectControl, "check_tool_parser", asks)
    r = rig("a", needs=RolloutNeeds(tool_calls=True))
    assert asked.wait(WAIT_S)
    lane = present(r.server_set.lane("a"))
    lane.stop()
    answered.set()
    lane.join(WAIT_S)
    assert not lane.is_alive()
    assert r.servers["a"].receiver_pid is None
    assert r.server_set.take_error() is None


def test_a_draining_server_generates_and_takes_nothing_new_while_the_other_one_commits(
    rig: MakeRig,
) -> None:
    held, gone = threading.Event(), threading.Event()

    def drain(url: str) -> None:
        if url == "a":
            held.set()
            assert gone.wait(WAIT_S)

    r = rig("a", "b", drain=drain)
    r.publish(1)
    assert held.wait(WAIT_S)
    for version in (2, 3):
        r.publish(version)
        assert r.servers["b"].wait_version(version, WAIT_S)
    entry = r.server_set.entries()["a"]
    assert entry.standing is Standing.COMMITTING
    assert not entry.accepting
    assert not r.servers["a"].paused
    gone.set()
    r.everyone(3)
    assert r.servers["a"].versions == [1, 3]
    assert r.recorder.series(names.DRAIN_S)
    assert r.server_set.take_error() is None
