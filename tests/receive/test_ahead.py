"""The memory of an epoch is mapped and pinned before its first commit, beside the engine's work."""

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.receive.site import DictEngine, Weights
from titan_grpo.receive.device import WorkerDevice

pytestmark = pytest.mark.e2e

WAIT_S = 60.0


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


class NotedEngine(DictEngine):
    """Notes its loads among the pins."""

    def __init__(self, pins: Pins) -> None:
        super().__init__()
        self._pins = pins

    def load(self, tensors: Any) -> int:
        self._pins.note("load")
        return super().load(tensors)


@pytest.fixture
def pins(monkeypatch: pytest.MonkeyPatch) -> Iterator[Pins]:
    made = Pins()
    monkeypatch.setattr(WorkerDevice, "pin", lambda device, image: made.pin(device, image))
    yield made
    made.goes_on.set()


def test_the_image_is_pinned_before_the_first_version_is_sent_and_once_in_an_epoch(
    make_site: Any, pins: Pins
) -> None:
    site, weights = make_site(engine=NotedEngine(pins)), Weights(1.0)
    link = site.connect(weights)
    site.side.hello({"attach": link.attach().to_dict()})
    pin = f"pin {weights.manifest.total_bytes}"
    pins.wait(pin)
    assert site.deliver(link, 1, 1, weights).ok
    assert site.deliver(link, 2, 2, weights).ok
    assert pins.noted == [pin, "load", "load"]
    site.side.close()
    assert pins.noted[-1] == "unpin"


def test_a_commit_waits_for_memory_that_is_still_being_pinned(make_site: Any, pins: Pins) -> None:
    site, weights = make_site(engine=NotedEngine(pins)), Weights(1.0)
    link = site.connect(weights)
    pins.goes_on.clear()
    site.side.hello({"attach": link.attach().to_dict()})
    staged = link.send(1, 1, weights.image, weights.digests, weights.fingerprint)
    call = threading.Thread(target=site.side.commit, args=(link.commit(staged).to_dict(),))
    call.start()
    pins.goes_on.set()
    call.join(WAIT_S)
    assert link.wait_applied(1, WAIT_S).ok
    assert pins.noted == [f"pin {weights.manifest.total_bytes}", "load"]


def test_a_hello_lets_go_of_what_is_still_being_pinned_and_does_not_wait(
    make_site: Any, pins: Pins
) -> None:
    site, weights = make_site(engine=NotedEngine(pins)), Weights(1.0)
    link = site.connect(weights)
    pins.goes_on.clear()
    site.side.hello({"attach": link.attach().to_dict()})
    pins.wait(f"pin {weights.manifest.total_bytes}")
    link = site.connect(weights)
    pins.goes_on.set()
    pins.wait("unpin")
    assert site.deliver(link, 1, 1, weights).ok


def test_an_epoch_that_is_not_in_force_has_nothing_mapped(make_site: Any, pins: Pins) -> None:
    site, weights = make_site(engine=NotedEngine(pins)), Weights(1.0)
    old = site.connect(weights)
    link = site.connect(weights)
    for data in (old.attach().to_dict(), {}, None, {"run_id": 3}):
        site.side.hello({"attach": data})
    assert site.side._ahead is None
    assert site.deliver(link, 1, 1, weights).ok
