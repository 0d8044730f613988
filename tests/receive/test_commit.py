"""What can go wrong in a commit ends in a report, on every worker: an exception would end the
engine, or leave the other workers in an exchange."""

import json
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.receive.workers import Team
from titan_grpo.protocol.messages import Applied
from titan_grpo.receive.checkpoint import INDEX, CheckpointNames
from titan_grpo.receive.commit import EngineSide, tensor_views

pytestmark = pytest.mark.e2e


class CheckedEngine:
    """An engine that compares names with a real checkpoint folder and loads nothing."""

    config: Mapping[str, Any] = {}

    def __init__(self, folder: Path) -> None:
        self.folder, self.loads = folder, 0

    def refuses(self, manifest: Any) -> str:
        return CheckpointNames(str(self.folder), None, tied=False).problem(manifest)

    def load(self, tensors: Iterator[Any]) -> int:
        self.loads += 1
        return len(list(tensors))


@pytest.fixture
def team(make_site: Any, tmp_path: Path) -> Iterator[Any]:
    """A site whose engine has two workers, each with a checkpoint folder of its own."""
    site = make_site()
    site.side.close()
    site.team = Team(2)
    site.engines = [CheckedEngine(tmp_path / str(rank)) for rank in range(2)]
    for engine in site.engines:
        engine.folder.mkdir()
    site.sides = [
        EngineSide(engine, member, "")
        for engine, member in zip(site.engines, site.team.members, strict=True)
    ]
    site.side = site.sides[0]
    yield site
    site.close()


def commit(site: Any, data: dict[str, Any]) -> list[Applied | BaseException]:
    """Each worker's report."""
    ends: list[Any] = [None] * len(site.sides)

    def work(rank: int) -> None:
        try:
            ends[rank] = site.sides[rank].commit(data)
        except BaseException as error:  # noqa: BLE001 - the test compares it with a report
            ends[rank] = error

    threads = [threading.Thread(target=work, args=(rank,), daemon=True) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60.0)
    return ends


DAMAGED = ["{}", "[]", '{"weight_map": []}', '{"weight_map": {"a": 3}}', "no json"]


@pytest.mark.parametrize("text", DAMAGED)
@pytest.mark.parametrize("worker", [0, 1])
def test_a_damaged_checkpoint_of_one_worker_is_a_report_of_all_and_the_next_commit_works(
    team: Any, weights: Any, text: str, worker: int
) -> None:
    w = weights(1.0)
    link = team.connect(w)
    index = team.engines[worker].folder / INDEX
    index.write_text(text)
    staged = link.send(1, 1, w.image, w.digests, w.fingerprint)
    for report in commit(team, link.commit(staged).to_dict()):
        assert isinstance(report, Applied), report
        assert (report.ok, report.intact, report.loaded) == (False, True, 0)
        assert "safetensors" in report.error
    assert not link.wait_applied(1, 10.0).ok
    index.unlink()
    staged = link.send(2, 1, w.image, w.digests, w.fingerprint)
    assert [report.ok for report in commit(team, link.commit(staged).to_dict())] == [True, True]
    assert [engine.loads for engine in team.engines] == [1, 1]


@pytest.mark.parametrize("broken", ["refuses", "load"])
@pytest.mark.parametrize("error", [KeyError("k"), AttributeError("a"), AssertionError(), OSError()])
def test_any_error_of_one_workers_engine_is_a_report_of_all(
    team: Any, weights: Any, broken: str, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> Any:
        raise error

    w = weights(1.0)
    link = team.connect(w)
    monkeypatch.setattr(team.engines[1], broken, fail)
    staged = link.send(1, 1, w.image, w.digests, w.fingerprint)
    for report in commit(team, link.commit(staged).to_dict()):
        assert isinstance(report, Applied), report
        assert (report.ok, report.intact) == (False, broken == "refuses")
        assert type(error).__name__ in report.error


def test_workers_that_lose_each_other_report_an_engine_that_is_not_intact(
    team: Any, weights: Any
) -> None:
    w = weights(1.0)
    link = team.connect(w)
    staged = link.send(1, 1, w.image, w.digests, w.fingerprint)
    team.team.barrier.abort()
    for report in commit(team, link.commit(staged).to_dict()):
        assert isinstance(report, Applied), report
        assert (report.ok, report.intact) == (False, False)
        assert "lost each other" in report.error


@pytest.mark.parametrize("data", [{}, {"version": 3}, [], None, json.loads("7")])
def test_what_is_no_commit_is_refused_without_an_exception(site: Any, data: Any) -> None:
    assert site.side.commit(data) is None
    site.side.hello(data)
    assert site.engine.value() == 0.0


def test_views_of_an_image_share_its_memory(weights: Any) -> None:
    w = weights(2.0)
    for (name, view), spec in zip(
        tensor_views(w.image, w.manifest), w.manifest.tensors, strict=True
    ):
        assert (name, tuple(view.shape)) == (spec.name, spec.shape)
        assert view.unique().tolist() == [2.0]
        assert view.data_ptr() == w.image.data_ptr() + spec.offset


def staging_maps() -> set[str]:
    """This process's mappings of receivers' staging images."""
    return {line for line in Path("/proc/self/maps").read_text().splitlines() if "staging" in line}


def test_the_staged_image_is_mapped_once_per_epoch_and_let_go_of_at_the_next_hello(
    site, weights
) -> None:
    others = staging_maps()
    link = site.connect(weights(1.0))
    assert site.deliver(link, 1, 1, weights(1.0)).ok
    first = staging_maps() - others
    assert len(first) == 1
    assert site.deliver(link, 2, 2, weights(2.0)).ok
    assert staging_maps() - others == first
    assert site.engine.value() == 2.0
    link = site.connect(weights(3.0))
    assert not first & staging_maps()
    assert site.deliver(link, 1, 3, weights(3.0)).ok
    assert len(staging_maps() - others) == 1
    assert site.engine.value() == 3.0
