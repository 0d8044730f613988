"""On a GPU: while AdamW steps on, every image holds the weights of its publish. Each of the three
waits that this rests on is taken away once, and the images are wrong."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import pytest
import torch

from titan_grpo.layout.image import SharedImage
from titan_grpo.layout.infer import infer_layout
from titan_grpo.layout.plan import Chunk, copy_ops
from titan_grpo.sync.publisher import Copy, CudaCopy, Snapshotter

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA")

SHAPES = {
    "cast": (4096, 2048),
    "gather": (4096, 1024),
    "columns": (4096, 1024),
    "same": (4096, 1024),
    "vector": (4097,),
}
"""A cast, rows in another order, columns of which this rank has those from COLUMN on, rows that go
as they are, and bytes that fill no row."""

COLUMN = 256

SLOTS = 6
STAGING = 1 << 20
SLEEP = 200_000_000
"""Cycles before the first step, so that the host has enqueued all versions before the device makes
one: nothing but the fences is between a copy and the next step."""


def shard_of(fqn: str) -> Chunk:
    """What this rank has of a parameter."""
    shape = SHAPES[fqn]
    if fqn == "columns":
        return (0, COLUMN), (shape[0], shape[1] - COLUMN)
    return (0,) * len(shape), shape


class Trainer:
    """Weights, AdamW and the copies of ``SLOTS`` versions in one queue; the host waits at the end
    only."""

    def __init__(self, stack: ExitStack, fused: bool) -> None:
        order = torch.randperm(SHAPES["gather"][0])
        layout = infer_layout(
            lambda s: {k: v[order] if k == "gather" else v for k, v in s.items()}, SHAPES
        )
        self._order = order.cuda()
        self._manifest = layout.manifest("bfloat16", 4096)
        ops = {fqn: copy_ops(layout, self._manifest, fqn, *shard_of(fqn)) for fqn in SHAPES}
        self._images = [
            stack.enter_context(SharedImage.create(self._manifest.total_bytes, f"slot {i}"))
            for i in range(SLOTS)
        ]
        device = torch.device("cuda", 0)
        tensors = [image.tensor() for image in self._images]
        self._snapshotter = Snapshotter(ops, tensors, device, STAGING)
        stack.callback(self._snapshotter.close)
        self._weights = {
            fqn: torch.randn(shard_of(fqn)[1], device=device, dtype=torch.float32) for fqn in SHAPES
        }
        self._weights["same"] = self._weights["same"].bfloat16()
        for weight in self._weights.values():
            weight.grad = torch.randn_like(weight)
        self._adamw = torch.optim.AdamW(
            self._weights.values(), lr=0.1, fused=fused, foreach=not fused
        )

    def publish(self, slot: int) -> Copy:
        return self._snapshotter.start(self._weights, slot)

    def wrong_versions(self) -> list[int]:
        """Publish a version after each step, and look at the images when all are there."""
        self._adamw.step()
        torch.cuda.synchronize()
        wanted, copies = [], []
        torch.cuda._sleep(SLEEP)
        for slot in range(SLOTS):
            self._adamw.step()
            wanted.append({fqn: w.detach().clone() for fqn, w in self._weights.items()})
            copies.append(self.publish(slot))
            copies[-1].fence()
        wrong = []
        for slot, (weights, copy) in enumerate(zip(wanted, copies, strict=True)):
            copy.wait(60.0)
            held = self._images[slot].tensor().clone()
            if not torch.equal(held, self._image(weights)):
                wrong.append(slot)
        return wrong

    def _image(self, weights: dict[str, torch.Tensor]) -> torch.Tensor:
        """The bytes that the image must have."""
        image = torch.zeros(self._manifest.total_bytes, dtype=torch.uint8)
        for fqn, weight in weights.items():
            spec = self._manifest.spec(fqn)
            rows = weight[self._order] if fqn == "gather" else weight
            whole = torch.zeros(spec.shape, dtype=torch.bfloat16)
            whole[..., spec.shape[-1] - rows.shape[-1] :] = rows.bfloat16().cpu()
            flat = whole.view(-1).view(torch.uint8)
            image[spec.offset : spec.offset + spec.nbytes] = flat
        return image


@contextmanager
def trainer(fused: bool) -> Iterator[Trainer]:
    with ExitStack() as stack:
        yield Trainer(stack, fused)
        torch.cuda.synchronize()


@pytest.mark.parametrize("fused", [False, True], ids=["foreach", "fused"])
def test_every_image_holds_the_weights_of_its_publish_while_adamw_steps_on(fused: bool) -> None:
    with trainer(fused) as one:
        for _ in range(5):
            assert one.wrong_versions() == []


def test_the_time_that_the_device_stands_at_the_fence_is_measured() -> None:
    with trainer(fused=True) as one:
        copy = one.publish(slot=0)
        copy.fence()
        copy_s = copy.wait(60.0)
        torch.cuda.synchronize()
        assert 0 < copy.fenced_s <= copy_s + 0.001
        copy = one.publish(slot=1)
        copy.wait(60.0)
        assert copy.fenced_s == 0.0, "nothing was fenced"
        copy.fence()
        torch.cuda.synchronize()
        assert copy.fenced_s < copy_s / 10, "the copy was over before the fence"


@pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.mem_get_info()[1] < 16 << 30,
    reason="needs 7 GiB of device memory",
)
def test_a_shard_of_more_than_2_gib_is_copied_as_it_is() -> None:
    shape = (600_000_000,)
    layout = infer_layout(lambda s: dict(s), {"w": shape})
    manifest = layout.manifest("float32", 4096)
    ops = {"w": copy_ops(layout, manifest, "w", (0,), shape)}
    with SharedImage.create(manifest.total_bytes, "large") as image:
        snapshotter = Snapshotter(ops, [image.tensor()], torch.device("cuda", 0), STAGING)
        weight = torch.arange(shape[0], dtype=torch.float32, device="cuda")
        snapshotter.start({"w": weight}, 0).wait(60.0)
        held = image.tensor()[: shape[0] * 4].view(torch.float32).cuda()
        assert torch.equal(held, weight)
        snapshotter.close()


@pytest.mark.parametrize(
    ("owner", "name", "instead"),
    [
        (CudaCopy, "fence", lambda *_: None),
        (torch.cuda.Stream, "wait_stream", lambda *_: None),
        (CudaCopy, "wait", lambda *_: 0.0),
    ],
    ids=["fence", "wait for the optimizer", "wait for the copy"],
)
def test_without_one_of_the_three_waits_an_image_holds_other_weights(
    monkeypatch: pytest.MonkeyPatch, owner: type, name: str, instead: Callable[..., object]
) -> None:
    monkeypatch.setattr(owner, name, instead)
    with trainer(fused=True) as one:
        assert one.wrong_versions()


ON_THE_SECOND = """
import threading
import torch
from titan_grpo.layout.image import SharedImage
from titan_grpo.layout.infer import infer_layout
from titan_grpo.layout.plan import copy_ops
from titan_grpo.receive.commit import WorkerDevice
from titan_grpo.sync.publisher import Snapshotter

torch.cuda.set_device(1)
layout = infer_layout(dict, {"w": (64, 64)})
manifest = layout.manifest("bfloat16", 4096)
ops = {"w": copy_ops(layout, manifest, "w", (0, 0), (64, 64))}
with SharedImage.create(manifest.total_bytes, "image") as image:
    snapshotter = Snapshotter(ops, [image.tensor()], torch.device("cuda", 1), 1 << 20)
    copy = snapshotter.start({"w": torch.ones(64, 64, device="cuda")}, 0)
    copy.fence()
    thread = threading.Thread(target=copy.wait, args=(60.0,))
    thread.start()
    thread.join(60.0)
    snapshotter.close()
    unpin = WorkerDevice().pin(image.tensor())
    thread = threading.Thread(target=unpin)
    thread.start()
    thread.join(60.0)
assert not torch._C._cuda_hasPrimaryContext(0), "a context on the first GPU"
"""


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_rank_on_another_gpu_takes_no_memory_of_the_first() -> None:
    """A context takes half a gigabyte. New threads have the first GPU as their device."""
    subprocess.run([sys.executable, "-c", ON_THE_SECOND], check=True, timeout=120.0)
