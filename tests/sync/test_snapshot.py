"""Snapshots: the image holds the bytes of to_hf(full tensors) cast to the wire dtype, however the
weights are sharded."""

import itertools
import runpy
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.rigs.ranks import run_ranks
from titan_grpo.errors import ProtocolError, SyncError
from titan_grpo.layout.cuda_runtime import loaded_library
from titan_grpo.layout.infer import infer_layout
from titan_grpo.layout.manifest import Manifest
from titan_grpo.layout.plan import Chunk, assign_writers, copy_ops
from titan_grpo.sync.publisher import CudaCopy, Snapshotter

RANKS = Path(__file__).with_name("snapshot_ranks.py")
CPU = torch.device("cpu")
KINDS = ["llama3", "qwen3", "qwen3_untied", "qwen3_moe"]


def spans(size: int, parts: int) -> list[tuple[int, int]]:
    """(offset, size) of each part as FSDP2 cuts a dimension: equal ones first, then a short one,
    then empty ones."""
    each = -(-size // parts)
    return [(min(i * each, size), min(each, max(0, size - i * each))) for i in range(parts)]


def rows_of(shape: tuple[int, ...]) -> list[Chunk]:
    """Three ranks with row shards: 131 rows become 44, 44, 43, and 2 become 1, 1, 0."""
    return [((o,) + (0,) * (len(shape) - 1), (n,) + shape[1:]) for o, n in spans(shape[0], 3)]


def columns_of(shape: tuple[int, ...]) -> list[Chunk]:
    """Two ranks of tensor parallelism: columns cut, vectors replicated."""
    if len(shape) == 1:
        return [((0,), shape)] * 2
    return [((0,) * (len(shape) - 1) + (o,), shape[:-1] + (n,)) for o, n in spans(shape[-1], 2)]


def grid_of(shape: tuple[int, ...]) -> list[Chunk]:
    """Four ranks: rows over two, columns over two."""
    if len(shape) == 1:
        parts: list[Chunk] = [((o,), (n,)) for o, n in spans(shape[0], 2)]
        return parts * 2
    cuts = itertools.product(spans(shape[0], 2), spans(shape[-1], 2))
    middle = shape[1:-1]
    return [((r, *(0,) * len(middle), c), (m, *middle, n)) for (r, m), (c, n) in cuts]


def cut(full: torch.Tensor, chunk: Chunk) -> torch.Tensor:
    return full[tuple(slice(o, o + n) for o, n in zip(*chunk, strict=True))].clone()


@pytest.fixture(scope="module")
def build() -> Callable[[str], tuple[torch.nn.Module, Any]]:
    found: Callable[[str], tuple[torch.nn.Module, Any]] = runpy.run_path(str(RANKS))["build"]
    return found


@pytest.mark.parametrize("wire", ["bfloat16", "float32"])
@pytest.mark.parametrize("shard", [rows_of, columns_of, grid_of])
@pytest.mark.parametrize("kind", KINDS)
def test_shards_of_every_model_make_the_bytes_of_its_hf_export(
    build: Callable[[str], Any],
    kind: str,
    shard: Callable[[tuple[int, ...]], list[Chunk]],
    wire: str,
) -> None:
    torch.manual_seed(3)
    model, adapter = build(kind)
    names = {
        fqn: p
        for fqn, p in model.named_parameters()
        if not (kind == "qwen3" and fqn == "output.weight")
    }
    full = {fqn: torch.randn(p.shape) for fqn, p in names.items()}
    layout = infer_layout(adapter.to_hf, {fqn: tuple(t.shape) for fqn, t in full.items()})
    manifest = layout.manifest(wire, 4096)
    per_rank = [
        dict(zip(full, chunks, strict=True))
        for chunks in zip(*(shard(tuple(t.shape)) for t in full.values()), strict=True)
    ]
    image = torch.zeros(manifest.total_bytes, dtype=torch.uint8)
    for chunks, written in zip(per_rank, assign_writers(per_rank, layout.shapes), strict=True):
        ops = {fqn: copy_ops(layout, manifest, fqn, *chunks[fqn]) for fqn in written}
        shards = {fqn: cut(full[fqn], chunks[fqn]) for fqn in written}
        Snapshotter(ops, [image], CPU, 1 << 12).start(shards, 0).wait(60.0)
    assert image.numpy().tobytes() == exported(adapter.to_hf(full), manifest, getattr(torch, wire))


def exported(tensors: Mapping[str, torch.Tensor], manifest: Manifest, wire: torch.dtype) -> bytes:
    """The whole image, padding included, from full tensors: written with numpy, not with the
    plan."""
    image = bytearray(manifest.total_bytes)
    assert [t.name for t in manifest.tensors] == list(tensors)
    for name, value in tensors.items():
        spec = manifest.spec(name)
        assert spec.shape == tuple(value.shape)
        image[spec.offset : spec.offset + spec.nbytes] = (
            value.to(wire).contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        )
    return bytes(image)


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("kind", "world"),
    # Four ranks of llama3 make these bytes and those of adapters in tests/titan/test_lora.py.
    [
        pytest.param("llama3", 2, marks=pytest.mark.long),
        ("qwen3_moe", 2),
        pytest.param("llama3", 4, marks=pytest.mark.long),
    ],
)
def test_real_dtensors_on_gloo_ranks_make_the_bytes_of_the_hf_export(
    kind: str, world: int, tmp_path: Path
) -> None:
    outputs = run_ranks(RANKS, world, str(world), kind, str(tmp_path))
    assert outputs[0].count("wrong []") == 2


def of_one_matrix() -> Snapshotter:
    """Of a rank that writes "w", 4 rows of 8."""
    layout = infer_layout(dict, {"w": (4, 8)})
    manifest = layout.manifest("bfloat16", 4096)
    ops = copy_ops(layout, manifest, "w", (0, 0), (4, 8))
    image = torch.zeros(manifest.total_bytes, dtype=torch.uint8)
    return Snapshotter({"w": ops}, [image], CPU, 1 << 20)


def test_a_copy_by_the_cpu_says_how_long_it_took() -> None:
    snapshotter, began = of_one_matrix(), time.perf_counter()
    copy_s = snapshotter.start({"w": torch.ones(4, 8)}, 0).wait(60.0)
    assert 0.0 < copy_s < time.perf_counter() - began


def test_a_missing_or_changed_shard_is_a_protocol_error() -> None:
    snapshotter = of_one_matrix()
    with pytest.raises(ProtocolError, match=r"missing are \['w'\] of 1"):
        snapshotter.start({}, 0)
    with pytest.raises(ProtocolError, match=r"rows \(4, 8\) as planned, got \(1, 8\)"):
        snapshotter.start({"w": torch.ones(1, 8)}, 0)


def test_a_rank_that_writes_nothing_makes_an_empty_copy() -> None:
    image = torch.zeros(256, dtype=torch.uint8)
    Snapshotter({"w": []}, [image], CPU, 1 << 20).start({}, 0).wait(60.0)
    assert not image.any()


def test_the_runtime_library_is_found_where_torch_loaded_it(tmp_path: Path) -> None:
    maps = tmp_path / "maps"
    maps.write_bytes(
        b"7f00-7f01 r-xp 00000000 08:01 12    /lib/a b/libcudart.so.12\n7f02-7f03 rw-p 0 00:00 0\n"
        b"7f04-7f05 r--p 0 08:01 13 /no text \xff\n"
    )
    assert loaded_library("libcudart", maps) == "/lib/a b/libcudart.so.12"
    assert loaded_library("libnone", maps) is None
    maps.write_text("7f00-7f01 r-xp 0 08:01 12 /site/torch.libs/libcudart-1b2c3d4e.so.12\n")
    assert loaded_library("libcudart", maps) == "/site/torch.libs/libcudart-1b2c3d4e.so.12"


GPU = torch.device("cuda", 3)


class Device:
    """Stands for an event of a device that is there on GPUs only: done when the test says so."""

    def __init__(self, error: str = "") -> None:
        self.done, self._error = threading.Event(), error
        self.entered = threading.local()

    @contextmanager
    def guard(self, device: torch.device) -> Iterator[None]:
        """In place of torch.cuda.device, of which a build without CUDA has none."""
        self.entered.device = device
        yield

    def synchronize(self) -> None:
        assert self.entered.device == GPU, "CUDA would make a context on another GPU"
        assert self.done.wait(60.0)
        if self._error:
            raise RuntimeError(self._error)

    def elapsed_time(self, _: "Device") -> float:
        return 250.0


def test_a_device_copy_is_waited_for_on_its_device_up_to_a_deadline_and_may_be_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    event = Device()
    monkeypatch.setattr(torch.cuda, "device", event.guard)
    copy = CudaCopy(event, event, [], GPU)  # type: ignore[arg-type]
    with pytest.raises(SyncError, match=r"must end within 0\.01 s"):
        copy.wait(0.01)
    event.done.set()
    assert copy.wait(60.0) == 0.25


def test_an_error_of_the_device_reaches_who_waits_for_the_copy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    event = Device("an illegal address")
    monkeypatch.setattr(torch.cuda, "device", event.guard)
    event.done.set()
    with pytest.raises(RuntimeError, match="illegal address"):
        CudaCopy(event, event, [], GPU).wait(5.0)  # type: ignore[arg-type]
