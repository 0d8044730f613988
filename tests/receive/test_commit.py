"""What can go wrong in a commit ends in a report, on every worker: an exception would end the
engine, or leave the other workers in an exchange."""

import json
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from tests.receive.site import NotedEngine, Site, Weights
from tests.receive.workers import Team, everywhere
from tests.rigs.threads import no_free_thread
from tests.rigs.trainer_handle import wait_until
from titan_grpo.errors import PeerError
from titan_grpo.protocol.messages import Applied
from titan_grpo.receive.checkpoint import INDEX, CheckpointNames
from titan_grpo.receive.commit import Engine, EngineSide, WorkerDevice, tensor_views
from titan_grpo.sync.link import LaneLink

pytestmark = pytest.mark.e2e

WAIT_S = 60.0
WEIGHTS = Weights(1.0)


class CheckedEngine(Engine):
    """An engine that compares names with a real checkpoint folder and keeps nothing."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.loads = folder, 0

    def refuses(self, manifest: Any) -> str:
        return CheckpointNames(str(self.folder), None, tied=False).problem(manifest)

    def load(self, tensors: Iterator[Any]) -> None:
        self.loads += 1
        list(tensors)


class TeamSite(Site):
    """A site whose engine has two workers, each with a checkpoint folder of its own."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.side.close()
        self.team = Team(2)
        self.engines = [CheckedEngine(folder / str(rank)) for rank in range(2)]
        for engine in self.engines:
            engine.folder.mkdir()
        self.sides = [
            EngineSide(engine, member, "")
            for engine, member in zip(self.engines, self.team.members, strict=True)
        ]
        self.side = self.sides[0]

    def hello(self, data: dict[str, Any]) -> None:
        self.everywhere(lambda side: side.hello(data))

    def everywhere(self, call: Callable[[EngineSide], Any]) -> list[Any]:
        """What each worker's call returns or raises."""
        return everywhere(2, lambda rank: call(self.sides[rank]))

    def commit(self, link: LaneLink, number: int = 1) -> list[Applied]:
        """Each worker's report on a transfer of WEIGHTS: none has raised."""
        staged = link.send(number, 1, WEIGHTS.image, WEIGHTS.digests, WEIGHTS.fingerprint)
        data = link.commit(staged).to_dict()
        reports = self.everywhere(lambda side: side.commit(data))
        assert all(isinstance(report, Applied) for report in reports), reports
        return reports

    def mapped(self) -> list[bool]:
        """Whether each worker keeps a mapping of the receiver's memory."""
        return [side._mapping is not None for side in self.sides]


@pytest.fixture
def site() -> Iterator[Site]:
    """Over tcp alone: a commit is the engine's side, whichever way the bytes came."""
    made = Site()
    yield made
    made.close()


@pytest.fixture
def team(tmp_path: Path) -> Iterator[TeamSite]:
    site = TeamSite(tmp_path)
    yield site
    site.close()


@pytest.mark.parametrize("worker", [0, 1])
def test_a_damaged_checkpoint_of_one_worker_is_a_report_of_all_and_the_next_commit_works(
    team: TeamSite, worker: int
) -> None:
    link = team.connect(WEIGHTS)
    index = team.engines[worker].folder / INDEX
    index.write_text("no json")
    for report in team.commit(link):
        assert (report.ok, report.intact, report.loaded) == (False, True, 0)
        assert "safetensors" in report.error
    assert not link.wait_applied(1, WAIT_S).ok
    index.unlink()
    assert all(report.ok for report in team.commit(link, 2))
    assert [engine.loads for engine in team.engines] == [1, 1]


@pytest.mark.parametrize("broken", ["refuses", "load"])
def test_any_error_of_one_workers_engine_is_a_report_of_all(
    team: TeamSite, broken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> Any:
        raise AssertionError

    link = team.connect(WEIGHTS)
    monkeypatch.setattr(team.engines[1], broken, fail)
    for report in team.commit(link):
        assert (report.ok, report.intact) == (False, broken == "refuses")
        assert "AssertionError" in report.error


def test_an_engine_that_loads_beside_its_weights_keeps_its_version_if_a_load_fails(
    site: Site,
) -> None:
    """As vLLM does with adapters, which it may be unable to write: paused for a whole version, the
    server would be lost to a run whose next versions fail like this one."""
    w = Weights(1.0)
    link = site.connect(w)
    assert site.deliver(link, 1, 1, w).ok
    site.engine.in_place, site.engine.breaks_at = False, "b"
    report = site.deliver(link, 2, 2, w)
    assert (report.ok, report.intact) == (False, True)
    assert "planted failure" in report.error


def test_a_version_that_is_loaded_beside_the_weights_makes_an_engine_intact_again(
    site: Site,
) -> None:
    """It was not if its workers lost each other before they knew what comes."""
    w = Weights(1.0)
    link = site.connect(w)
    site.engine.breaks_at = "b"
    assert not site.deliver(link, 1, 1, w).intact
    site.engine.in_place, site.engine.breaks_at = False, ""
    staged = link.send(2, 2, w.image, w.digests, w.fingerprint)
    report = site.side.commit(link.commit(staged).to_dict())
    assert report is not None
    assert (report.ok, report.intact) == (True, True)
    assert link.wait_applied(2, 60.0).ok


def test_a_load_that_leaves_tensors_out_without_an_error_is_no_commit(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = site.connect(WEIGHTS)
    monkeypatch.setattr(site.engine, "load", next)
    report = site.deliver(link, 1, 1, WEIGHTS)
    assert (report.ok, report.intact, report.fingerprint) == (False, False, "")
    assert report.error == "the engine loaded 1 of 2 tensors"


def test_a_commit_that_is_refused_leaves_half_loaded_weights_as_they_are(site: Site) -> None:
    link = site.connect(WEIGHTS)
    site.engine.breaks_at = "b"
    staged = link.send(1, 1, WEIGHTS.image, WEIGHTS.digests, WEIGHTS.fingerprint)
    commit = link.commit(staged).to_dict()
    for data, error in (commit, "planted failure"), (commit | {"fingerprint": "x"}, "staged is"):
        report = site.side.commit(data)
        assert report is not None
        assert error in report.error
        assert (report.ok, report.intact) == (False, False)


def test_workers_that_lose_each_other_report_an_engine_that_is_not_intact(team: TeamSite) -> None:
    link = team.connect(WEIGHTS)
    team.team.barrier.abort()
    for report in team.commit(link):
        assert (report.ok, report.intact) == (False, False)
        assert "lost each other" in report.error


def test_workers_that_lose_each_other_at_a_hello_do_not_raise(team: TeamSite) -> None:
    team.team.barrier.abort()
    assert team.everywhere(lambda side: side.hello({})) == [None, None]


def test_all_workers_keep_the_mapping_at_a_refused_hello_and_none_at_the_next_one(
    team: TeamSite,
) -> None:
    team.commit(team.connect(WEIGHTS))
    assert team.mapped() == [True, True]
    team.probe()
    assert team.mapped() == [True, True]
    with pytest.raises(PeerError, match="not newer"):
        team.greet(WEIGHTS, epoch=1).wait_joined(WAIT_S)
    assert team.mapped() == [True, True]
    team.connect(WEIGHTS)
    assert team.mapped() == [False, False]


@pytest.mark.parametrize("data", [{}, {"version": 3}, [], None, json.loads("7")])
def test_what_is_no_commit_is_refused_without_an_exception(site: Any, data: Any) -> None:
    assert site.side.commit(data) is None
    site.side.hello(data)
    assert site.engine.value() == 0.0


def test_views_of_an_image_share_its_memory() -> None:
    w = Weights(2.0)
    for (name, view), spec in zip(
        tensor_views(w.image, w.manifest), w.manifest.tensors, strict=True
    ):
        assert (name, tuple(view.shape)) == (spec.name, spec.shape)
        assert view.unique().tolist() == [2.0]
        assert view.data_ptr() == w.image.data_ptr() + spec.offset


class Pins:
    """Stands in for the call that pins, which needs a GPU: notes when it is made, and may stall."""

    def __init__(self) -> None:
        self.noted: list[str] = []
        self.goes_on = threading.Event()
        self.goes_on.set()
        self._changed = threading.Condition()

    def note(self, what: str) -> None:
        with self._changed:
            self.noted.append(what)
            self._changed.notify_all()

    def wait(self, what: str) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: what in self.noted, WAIT_S), self.noted

    def pin(self, _: WorkerDevice, image: torch.Tensor) -> Any:
        self.note(f"pin {image.numel()}")
        assert self.goes_on.wait(WAIT_S)
        return lambda: self.note("unpin")


@pytest.fixture
def pins(monkeypatch: pytest.MonkeyPatch) -> Iterator[Pins]:
    made = Pins()
    monkeypatch.setattr(WorkerDevice, "pin", lambda device, image: made.pin(device, image))
    yield made
    made.goes_on.set()


PIN = f"pin {WEIGHTS.manifest.total_bytes}"


@pytest.fixture
def noted(pins: Pins) -> Iterator[Site]:
    """A site whose engine notes its loads among the pins."""
    made = Site(engine=NotedEngine(pins.note))
    yield made
    made.close()


def attach(site: Site) -> LaneLink:
    """A lane that has joined, and has had its memory mapped."""
    link = site.connect(WEIGHTS)
    site.side.hello({"attach": link.attach().to_dict()})
    return link


def test_the_image_is_pinned_before_the_first_version_is_sent_and_once_in_an_epoch(
    pins: Pins, noted: Site
) -> None:
    link = attach(noted)
    pins.wait(PIN)
    assert noted.deliver(link, 1, 1, WEIGHTS).ok
    assert noted.deliver(link, 2, 2, WEIGHTS).ok
    assert pins.noted == [PIN, "load", "load"]
    noted.side.close()
    pins.wait("unpin")
    assert pins.noted[-1] == "unpin"


def test_the_manifest_is_hashed_before_the_first_commit_and_not_in_its_pause(noted: Site) -> None:
    attach(noted)
    assert noted.side._mapping is not None
    mapped = noted.side._mapping[1].result(WAIT_S)
    assert "digest" in vars(mapped.manifest)


def test_what_replaces_no_receiver_moves_no_mapping_into_the_pause_of_the_next_commit(
    pins: Pins, noted: Site
) -> None:
    link = attach(noted)
    pins.wait(PIN)
    assert noted.probe().ok
    later = noted.greet(WEIGHTS, run_id="ffffffffffff-00000000", epoch=1, take_over=False)
    with pytest.raises(PeerError, match="has this server"):
        later.wait_joined(WAIT_S)
    noted.side.hello({})
    for wrong in ({}, link.attach().to_dict() | {"epoch": 9}):
        noted.side.hello({"attach": wrong})
    assert noted.deliver(link, 1, 1, WEIGHTS).ok
    assert pins.noted == [PIN, "load"]


def test_memory_for_whose_mapping_no_thread_starts_is_mapped_by_the_first_commit(
    pins: Pins, noted: Site
) -> None:
    link = noted.connect(WEIGHTS)

    with no_free_thread():
        noted.side.hello({"attach": link.attach().to_dict()})
    assert noted.deliver(link, 1, 1, WEIGHTS).ok
    assert pins.noted == [PIN, "load"]


def test_a_commit_waits_for_memory_that_is_still_being_pinned(pins: Pins, noted: Site) -> None:
    pins.goes_on.clear()
    link = attach(noted)
    staged = link.send(1, 1, WEIGHTS.image, WEIGHTS.digests, WEIGHTS.fingerprint)
    call = threading.Thread(target=noted.side.commit, args=(link.commit(staged).to_dict(),))
    call.start()
    pins.goes_on.set()
    call.join(WAIT_S)
    assert link.wait_applied(1, WAIT_S).ok
    assert pins.noted == [PIN, "load"]


def test_an_image_that_could_not_be_compared_at_first_is_pinned_once_and_unpinned(
    pins: Pins, noted: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = noted.connect(WEIGHTS)
    with monkeypatch.context() as damaged:
        damaged.setattr(noted.engine, "refuses", lambda _: 1 / 0)
        assert not noted.deliver(link, 1, 1, WEIGHTS).ok
    assert noted.deliver(link, 2, 1, WEIGHTS).ok
    noted.side.close()
    assert pins.noted == [PIN, "load", "unpin"]


def test_a_hello_lets_go_of_what_is_still_being_pinned_and_does_not_wait(
    pins: Pins, noted: Site
) -> None:
    pins.goes_on.clear()
    link = attach(noted)
    pins.wait(PIN)
    link = noted.connect(WEIGHTS)
    pins.goes_on.set()
    pins.wait("unpin")
    assert noted.deliver(link, 1, 1, WEIGHTS).ok


@pytest.mark.skipif(torch.version.cuda is not None, reason="this torch has CUDA's runtime")
def test_memory_that_cannot_be_pinned_is_said_and_loaded_from_all_the_same(
    caplog: pytest.LogCaptureFixture,
) -> None:
    device = WorkerDevice()
    device.name = "cuda:0"
    assert device.pin(torch.zeros(8, dtype=torch.uint8)) is None
    (said,) = caplog.messages
    assert said.startswith("8 bytes of staged weights could not be pinned (torch must have loaded")
    assert "ulimit -l does not limit it" in said


def staging_images() -> int:
    """Images of receivers that this process, as the engine, has mapped."""
    return Path("/proc/self/maps").read_text().count("titan_grpo staging")


@pytest.mark.parametrize("end", ["bye", "close", "kill"])
def test_an_engine_lets_go_of_the_memory_of_a_receiver_that_has_ended(
    pins: Pins, noted: Site, end: str
) -> None:
    """Else a server that goes on without its trainer would keep a version's size of memory."""
    before = staging_images()
    link = attach(noted)
    assert noted.deliver(link, 1, 1, WEIGHTS).ok
    assert staging_images() > before
    receiver = noted.receiver_pid
    if end == "bye":
        link.bye(WAIT_S)
    elif end == "close":
        link.close()
    else:
        os.kill(receiver, signal.SIGKILL)
    pins.wait("unpin")
    assert wait_until(lambda: staging_images() <= before, WAIT_S)
    assert wait_until(lambda: not psutil.pid_exists(receiver), WAIT_S), "it is a zombie"
    assert noted.deliver(noted.connect(WEIGHTS), 1, 2, WEIGHTS).ok


def test_every_worker_lets_go_of_the_memory_of_a_receiver_that_has_ended(team: TeamSite) -> None:
    link = team.connect(WEIGHTS)
    team.commit(link)
    assert team.mapped() == [True, True]
    link.bye(WAIT_S)
    assert wait_until(lambda: team.mapped() == [False, False], WAIT_S)


def test_a_load_keeps_the_memory_of_a_receiver_that_ends_meanwhile(pins: Pins, noted: Site) -> None:
    link = attach(noted)
    loads, goes_on, load = threading.Event(), threading.Event(), noted.engine.load

    def slow(tensors: Any) -> None:
        loads.set()
        assert goes_on.wait(WAIT_S)
        load(tensors)

    noted.engine.load = slow
    staged = link.send(1, 1, WEIGHTS.image, WEIGHTS.digests, WEIGHTS.fingerprint)
    call = threading.Thread(target=noted.side.commit, args=(link.commit(staged).to_dict(),))
    call.start()
    assert loads.wait(WAIT_S)
    os.kill(noted.receiver_pid, signal.SIGKILL)
    assert noted.receiver_status() == -signal.SIGKILL
    goes_on.set()
    call.join(WAIT_S)
    pins.wait("unpin")
    assert pins.noted == [PIN, "load", "unpin"]


def test_an_epoch_that_is_not_in_force_has_nothing_mapped(pins: Pins, noted: Site) -> None:
    old = noted.connect(WEIGHTS)
    link = noted.connect(WEIGHTS)
    for data in (old.attach().to_dict(), {}, None, {"run_id": 3}):
        noted.side.hello({"attach": data})
    assert noted.side._mapping is None
    assert noted.deliver(link, 1, 1, WEIGHTS).ok
