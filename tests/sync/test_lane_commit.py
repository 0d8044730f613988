"""What a lane asks of a server in a commit, besides the load."""

import pytest
from msgspec.structs import replace as change

from tests.rigs.receiver_server import OWN_LABEL, DirectControl
from tests.sync.conftest import MakeRig
from titan_grpo.protocol.lane import LaneEvent, Point
from titan_grpo.protocol.messages import Applied
from titan_grpo.sync.link import LaneLink

pytestmark = pytest.mark.e2e


@pytest.mark.parametrize(
    ("kv_after_update", "dropped"), [("recompute", [(True, OWN_LABEL)]), ("keep", [])]
)
def test_the_kv_of_requests_in_flight_is_dropped_in_the_pause(
    rig: MakeRig,
    monkeypatch: pytest.MonkeyPatch,
    kv_after_update: str,
    dropped: list[tuple[bool, str]],
) -> None:
    found: list[tuple[bool, str]] = []
    monkeypatch.setattr(
        DirectControl, "drop_kv", lambda control: found.append((control.paused(), control.label()))
    )
    rig("a", kv_after_update=kv_after_update).deliver(1)
    assert found == dropped


def test_a_server_whose_load_failed_before_it_began_shows_its_version_before(
    rig: MakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    applied, given, finish = LaneLink.wait_applied, list[str](), DirectControl.finish
    failing = iter([False, True])

    def answer(link: LaneLink, number: int, timeout_s: float) -> Applied:
        true = applied(link, number, timeout_s)
        return change(true, ok=False, error="no room") if next(failing, False) else true

    def label(control: DirectControl, text: str) -> None:
        given.append(text)
        finish(control, text)

    monkeypatch.setattr(LaneLink, "wait_applied", answer)
    monkeypatch.setattr(DirectControl, "finish", label)
    r = rig("a")
    r.deliver(1)
    first = str(r.complete(1).label)
    r.deliver(2)
    assert given[:2] == [first, first]
    assert r.servers["a"].label == str(r.complete(2).label)
    assert not r.servers["a"].paused
    assert "no room; the engine keeps its version" in str(r.server_set.take_error())


def test_a_server_that_shows_another_version_after_its_commit_does_not_hold_the_version(
    rig: MakeRig,
) -> None:
    others = iter(["another trainer's"])

    def watch(passing: LaneEvent) -> None:
        if passing.point is Point.RESUMED and (label := next(others, "")):
            r.servers["a"]._set(label=label)

    r = rig("a", watch=watch)
    r.publish(1)
    r.until_error('it shows "another trainer\'s": another trainer writes this server')
    r.everyone(1)
    assert r.servers["a"].label == str(r.complete(1).label)
