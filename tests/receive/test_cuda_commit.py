"""Commits into a GPU: what runs before reads the old weights whole, and no copy still reads the
image when it is the receiver's again."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.receive.site import DictEngine, Site, Weights
from titan_grpo.receive.commit import WorkerDevice

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA"),
]

HALF_A_SECOND = 1_000_000_000
"""In cycles of the device."""


class GpuEngine(DictEngine):
    """Loads as an engine that does not wait for its copies."""

    def __init__(self) -> None:
        super().__init__()
        self.tensors = {name: tensor.cuda() for name, tensor in self.tensors.items()}

    def load(self, tensors: Any) -> None:
        torch.cuda._sleep(HALF_A_SECOND)
        for name, tensor in tensors:
            self.tensors[name].copy_(tensor, non_blocking=True)


@pytest.fixture
def gpu() -> Iterator[Site]:
    made = Site(engine=GpuEngine(), transport="tcp")
    assert made.side._device.name == "cuda:0"
    yield made
    made.close()


def overwritten(site: Site) -> float:
    """Commit version 1, have the receiver stage version 2 at once; what the engine then holds."""
    one, two = Weights(1.0), Weights(2.0)
    link = site.connect(one)
    assert site.deliver(link, 1, 1, one).ok
    assert link.send(2, 2, two.image, two.digests, two.fingerprint).ok
    value: float = site.engine.value()
    return value


def test_the_next_transfer_changes_nothing_of_what_was_loaded(gpu: Site) -> None:
    assert overwritten(gpu) == 1.0
    assert gpu.side._mapping is not None
    assert gpu.side._mapping[1].result()._unpin is not None, "the image was not pinned"


def test_without_the_wait_after_the_load_the_next_transfer_gets_into_it(
    gpu: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(WorkerDevice, "synchronize", lambda _: None)
    assert overwritten(gpu) == 2.0


def seen_by_the_last_batch(site: Site) -> float:
    """A batch on a stream of its own was started, and then a version is loaded."""
    site.engine.load = lambda tensors: DictEngine.load(site.engine, tensors)
    weights = Weights(1.0)
    link = site.connect(weights)
    batch = torch.cuda.Stream()
    with torch.cuda.stream(batch):
        torch.cuda._sleep(HALF_A_SECOND)
        seen = site.engine.tensors["a"].clone()
    assert site.deliver(link, 1, 1, weights).ok
    torch.cuda.synchronize()
    assert site.engine.value() == 1.0
    return float(seen.float().mean())


def test_a_batch_that_runs_on_over_the_pause_computes_with_the_old_weights(gpu: Site) -> None:
    assert seen_by_the_last_batch(gpu) == 0.0


def test_without_the_wait_before_the_load_that_batch_meets_the_new_weights(
    gpu: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(WorkerDevice, "synchronize", lambda _: None)
    assert seen_by_the_last_batch(gpu) == 1.0


def test_an_image_is_unpinned_before_the_next_epoch_maps_another(gpu: Site) -> None:
    weights = Weights(1.0)
    for _ in range(3):
        link = gpu.connect(weights)
        assert gpu.deliver(link, 1, 1, weights).ok
        link.close()


def test_a_whole_lane_runs_over_nccl_on_one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trainer and receiver say that they are on two hosts; else NCCL refuses two ranks on a GPU."""
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "lo")
    monkeypatch.setenv("NCCL_HOSTID", "server")
    site = Site(engine=GpuEngine(), transport="nccl", device="cuda:0")
    try:
        weights = Weights(1.0)
        link = site.greet(weights)
        monkeypatch.setenv("NCCL_HOSTID", "trainer")
        link.wait_joined(180.0)
        assert link.send_manifest().ok
        for number in (1, 2, 3):
            weights = Weights(float(number))
            assert site.deliver(link, number, number, weights).ok
            assert site.engine.value() == float(number)
    finally:
        site.close()
