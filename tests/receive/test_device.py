"""A commit on a GPU: the device is waited for before and after the load, and it is the worker's
own."""

from typing import Any

import pytest
import torch

from tests.receive.site import NotedEngine, Site, Weights
from titan_grpo.receive.commit import WorkerDevice

pytestmark = pytest.mark.e2e


@pytest.fixture
def third_gpu(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """torch's calls on a machine where this process uses GPU 3; what was waited for."""
    waited: list[str] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "synchronize", waited.append)
    return waited


def test_the_device_is_waited_for_before_a_load_and_after_it_also_if_it_breaks_off(
    third_gpu: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(WorkerDevice, "pin", lambda *_: None)  # there is no GPU to pin for
    site = Site(engine=NotedEngine(third_gpu.append))
    weights = Weights(1.0)
    link = site.connect(weights)
    assert site.deliver(link, 1, 1, weights).ok
    assert third_gpu == ["cuda:3", "load", "cuda:3"]
    site.engine.breaks_at = "b"
    assert not site.deliver(link, 2, 2, weights).ok
    assert third_gpu == ["cuda:3", "load", "cuda:3"] * 2
    site.close()


def test_the_receiver_is_told_the_device_of_the_engine(
    third_gpu: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[dict[str, Any]] = []
    site = Site()
    handle = site.receiver
    first = handle._first

    def noted(*args: Any) -> dict[str, Any]:
        sent.append(first(*args))
        return sent[-1]

    monkeypatch.setattr(handle, "_first", noted)
    site.connect(Weights(1.0))
    assert [message["device"] for message in sent] == ["cuda:3"]
    site.close()
