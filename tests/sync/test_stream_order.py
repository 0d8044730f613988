"""In every legal order of a device's streams an image holds the weights of its publish; without one
of the waits that this rests on, it does not. Without a GPU; test_cuda_order.py is with one."""

import weakref
from functools import partial

import pytest
import torch

from tests.sync.fake_cuda import Device, Event, Lazy, Runtime, Stream, fake_cuda
from titan_grpo.layout.infer import infer_layout
from titan_grpo.layout.peft import MergedRows
from titan_grpo.layout.plan import copy_ops
from titan_grpo.sync.publisher import Copy, CudaCopy, Snapshotter, _CudaSide

SHAPES = {"cast": (8, 6), "gather": (8, 6), "vector": (7,)}
"""A cast, rows in another order, and bytes that fill no row."""

STAGING = 64
"""Bytes: each tensor goes through it in several pieces."""

VERSIONS, SLOTS, SEEDS = 6, 2, range(40)


class Trainer:
    """Steps that add 1 to every weight, and a copy after each."""

    def __init__(self, device: Device) -> None:
        order = torch.arange(SHAPES["gather"][0] - 1, -1, -1)
        layout = infer_layout(
            lambda s: {k: v[order] if k == "gather" else v for k, v in s.items()}, SHAPES
        )
        manifest = layout.manifest("bfloat16", 4096)
        ops = {f: copy_ops(layout, manifest, f, (0,) * len(s), s) for f, s in SHAPES.items()}
        self.images = [torch.zeros(manifest.total_bytes, dtype=torch.uint8) for _ in range(SLOTS)]
        cpu = torch.device("cpu")
        self._snapshotter = Snapshotter(ops, self.images, cpu, STAGING)
        self._snapshotter._cuda = _CudaSide(self.images, cpu, STAGING)  # as for a CUDA device
        self.close = self._snapshotter.close
        self._device, self._manifest = device, manifest
        self._weights = {f: torch.zeros(shape) for f, shape in SHAPES.items()}

    def held(self, slot: int) -> set[float]:
        """The values that a slot's image has."""
        values: set[float] = set()
        for spec in self._manifest.tensors:
            flat = self.images[slot][spec.offset : spec.offset + spec.nbytes]
            values |= set(flat.view(torch.bfloat16).tolist())
        return values

    def step(self, slot: int) -> Copy:
        """Enqueue a step and the copy of what it makes."""
        with Lazy(self._device):
            for weight in self._weights.values():
                weight.add_(1.0)
            return self._snapshotter.start(self._weights, slot)

    def wrong_versions(self) -> list[int]:
        """Train, and look at each image when its copy is waited for: as late as its slot allows."""
        wrong: list[int] = []
        under_way: dict[int, tuple[int, Copy]] = {}
        for version in range(1, VERSIONS + 1):
            slot = version % SLOTS
            if slot in under_way:
                before, copy = under_way.pop(slot)
                copy.wait(60.0)
                wrong += [before] * (self.held(slot) != {float(before)})
            copy = self.step(slot)
            under_way[slot] = version, copy
            self._device.some()
            copy.fence()
        for slot, (version, copy) in under_way.items():
            copy.wait(60.0)
            wrong += [version] * (self.held(slot) != {float(version)})
        return wrong


def orders_that_fail(monkeypatch: pytest.MonkeyPatch) -> int:
    """In how many of the orders some image is wrong."""
    failed = 0
    for seed in SEEDS:
        with monkeypatch.context() as patch, fake_cuda(patch, seed) as device:
            failed += bool(Trainer(device).wrong_versions())
    return failed


def test_in_every_order_each_image_holds_the_weights_of_its_publish(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert orders_that_fail(monkeypatch) == 0


MISSING = {
    "the copy does not wait for the optimizer": (Stream, "wait_stream", lambda *_: None),
    "the optimizer does not wait for the copy": (CudaCopy, "fence", lambda _: None),
    "the image is looked at before the copy is over": (CudaCopy, "wait", lambda *_: 0.0),
}


@pytest.mark.parametrize("case", MISSING)
def test_without_one_of_the_waits_some_order_makes_a_wrong_image(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, name, nothing = MISSING[case]
    monkeypatch.setattr(owner, name, nothing)
    assert orders_that_fail(monkeypatch) > 0


FLAT = torch.arange(128.0).bfloat16()
"""Exact in bfloat16: copied without a cast."""


@pytest.mark.parametrize(
    "weight",
    [
        pytest.param(FLAT[:48].view(8, 6), id="whole"),
        pytest.param(FLAT[:80].view(8, 10)[:, 2:8], id="columns of a wider one"),
        pytest.param(FLAT[:48].view(6, 8).t(), id="transposed"),
        pytest.param(FLAT[:96].view(8, 12)[:, ::2], id="every second column"),
        pytest.param(FLAT[:10].view(1, 10)[:, 2:8], id="one row"),
    ],
)
def test_a_weight_has_its_values_in_the_image_however_it_lies_in_memory(
    weight: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape, cpu = tuple(weight.shape), torch.device("cpu")
    layout = infer_layout(lambda state: state, {"w": shape})
    manifest = layout.manifest("bfloat16", 4096)
    image = torch.zeros(manifest.total_bytes, dtype=torch.uint8)
    ops = {"w": copy_ops(layout, manifest, "w", (0, 0), shape)}
    with fake_cuda(monkeypatch, seed=0) as device:
        snapshotter = Snapshotter(ops, [image], cpu, STAGING)
        snapshotter._cuda = _CudaSide([image], cpu, STAGING)
        with Lazy(device):
            copy = snapshotter.start({"w": weight}, 0)
        copy.wait(60.0)
    (spec,) = manifest.tensors
    values = image[spec.offset : spec.offset + spec.nbytes].view(torch.bfloat16).view(shape)
    assert torch.equal(values, weight)


def test_what_the_device_waits_at_a_fence_is_known_once_it_is_past_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with fake_cuda(monkeypatch, seed=0) as device:
        trainer = Trainer(device)  # its images are written to until the end
        copy = trainer.step(0)
        assert copy.fenced_s == 0.0, "there is no fence yet"
        copy.fence()
        assert copy.fenced_s == 0.0, "the device has not got there"
        device.run()
        assert copy.fenced_s == 1.0


def test_a_copy_in_flight_is_over_before_its_memory_is_unpinned(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    held: list[set[float]] = []
    for seed in SEEDS:
        with monkeypatch.context() as patch, fake_cuda(patch, seed) as device:
            trainer = Trainer(device)
            trainer.step(0)
            patch.setattr(Runtime, "unregister", lambda *_, t=trainer: held.append(t.held(0)))
            trainer.close()
    assert held == [{1.0}] * SLOTS * len(SEEDS)


def test_what_only_a_copy_holds_lives_until_the_copy_is_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Such as gathered adapters: torch would give their memory to the next forward."""
    with fake_cuda(monkeypatch, seed=0) as device:
        trainer = Trainer(device)
        merged = MergedRows(torch.zeros(8, 6), torch.ones(8, 2), torch.ones(2, 6), 1.0)
        alive = weakref.ref(merged)
        with Lazy(device):
            copy = trainer._snapshotter.start({**trainer._weights, "cast": merged}, 0)
        del merged
        copy.fence()
        assert alive() is not None
        copy.wait(60.0)
        assert trainer.held(0) == {0.0, 2.0}
        assert alive() is None


def test_memory_that_cannot_be_pinned_is_said_once_for_all_of_its_parts(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    parts = [torch.zeros(4096, dtype=torch.uint8) for _ in range(100)]
    with fake_cuda(monkeypatch, seed=0):
        monkeypatch.setattr(Runtime, "register", lambda *_: "no memory to lock")
        _CudaSide(parts, torch.device("cpu"), STAGING).close()
    (said,) = caplog.messages
    assert said.startswith(
        "409600 bytes of the weight images could not be pinned (no memory to lock)"
    )
    # NVIDIA's kernel module pins pages without a look at RLIMIT_MEMLOCK.
    assert "ulimit -l does not limit it" in said


def event(ended: Event, blocking: bool = False, **_: bool) -> Event:
    """In place of a fresh event at the end of each copy."""
    return ended if blocking else Event()


def orders_that_wait_for_both(monkeypatch: pytest.MonkeyPatch, reused: bool) -> int:
    """In how many of the orders a second version is there as soon as the first is waited for."""
    both = 0
    for seed in SEEDS:
        with monkeypatch.context() as patch, fake_cuda(patch, seed) as device:
            if reused:
                patch.setattr(torch.cuda, "Event", partial(event, Event()))
            trainer = Trainer(device)
            first = trainer.step(0)
            first.fence()
            trainer.step(1)
            first.wait(60.0)
            both += trainer.held(1) == {2.0}
    return both


def test_a_version_is_not_kept_back_by_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    assert orders_that_wait_for_both(monkeypatch, reused=False) < len(SEEDS)


def test_an_event_that_is_used_again_keeps_a_version_back(monkeypatch: pytest.MonkeyPatch) -> None:
    assert orders_that_wait_for_both(monkeypatch, reused=True) == len(SEEDS)
