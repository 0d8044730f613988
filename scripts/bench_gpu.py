"""What only a GPU can show; see bench_gpu.sh. Every ratio has its baseline in the same run.

    scripts/bench_gpu.sh --shapes qwen3_0.6b,llama3_8b --json bench_gpu.json

Trainer's half: float32 masters on the GPU, one rank, copied into a pinned image by the real
Snapshotter. Server's half: the real plugin half and receiver process, and an "engine" that copies
every tensor to its own on the GPU.
"""

import mmap
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the checkout, for scripts

from scripts.common import options_of, positive, write_json
from titan_grpo.config import WeightSync
from titan_grpo.layout.cuda_runtime import CudaRuntime
from titan_grpo.layout.image import Hashing, SharedImage, fingerprint
from titan_grpo.layout.infer import infer_layout
from titan_grpo.layout.manifest import Manifest
from titan_grpo.layout.plan import copy_ops
from titan_grpo.protocol.messages import new_run_id
from titan_grpo.receive.commit import Engine, EngineSide, WorkerDevice, Workers
from titan_grpo.receive.replay import Copies
from titan_grpo.sync.link import LaneLink, LinkOptions
from titan_grpo.sync.publisher import Snapshotter

GIB = 2**30
CHUNK = 64 << 20
LONG_S = 300.0

Shapes = dict[str, tuple[int, ...]]


def decoder(layers: int, hidden: int, heads: int, keys: int, ffn: int) -> Shapes:
    """The matrices and norms of a decoder; ``heads`` and ``keys``: rows of q, and of k and v."""
    out: Shapes = {}
    for i in range(layers):
        out |= {
            f"{i}.q": (heads, hidden),
            f"{i}.k": (keys, hidden),
            f"{i}.v": (keys, hidden),
            f"{i}.o": (hidden, heads),
            f"{i}.gate": (ffn, hidden),
            f"{i}.up": (ffn, hidden),
            f"{i}.down": (hidden, ffn),
            f"{i}.norm1": (hidden,),
            f"{i}.norm2": (hidden,),
        }
    return out | {"norm": (hidden,)}


SHAPES: dict[str, Shapes] = {
    "tiny": decoder(2, 128, 128, 64, 512) | {"embed": (128, 128)},
    "qwen3_0.6b": decoder(28, 1024, 2048, 1024, 3072) | {"embed": (151936, 1024)},
    "llama3_8b": decoder(32, 4096, 4096, 1024, 14336)
    | {"embed": (128256, 4096), "head": (128256, 4096)},
}


@dataclass(frozen=True)
class Figure:
    """One line of the table. ``least`` and ``most``: what it should be, where there is a rule."""

    shape: str
    what: str
    value: float
    unit: str
    least: float | None = None
    most: float | None = None

    @property
    def good(self) -> bool:
        """Whether it is as it should be."""
        low = self.least is None or self.value >= self.least
        return low and (self.most is None or self.value <= self.most)

    def line(self) -> str:
        """One line of the table."""
        goal = "" if self.least is None else f">= {self.least:g}"
        goal += "" if self.most is None else f"<= {self.most:g}"
        mark = "" if self.good else "  <-- not as it should be"
        return f"{self.shape:<12} {self.what:<58} {self.value:>9.3f} {self.unit:<6} {goal}{mark}"


@contextmanager
def unpinned() -> Iterator[None]:
    """Refuse to pin, as a limit on locked memory does."""
    register = CudaRuntime.register
    CudaRuntime.register = lambda *_: "pageable on purpose"  # type: ignore[method-assign]
    try:
        yield
    finally:
        CudaRuntime.register = register  # type: ignore[method-assign]


@contextmanager
def longest_mmap() -> Iterator[list[float]]:
    """A list that has, after the block, how many seconds another thread of this process waited at
    most for a page: while the driver pins memory, none may change what the process has mapped."""
    longest, over = [0.0], threading.Event()

    def ask() -> None:
        while not over.wait(0.001):
            began = time.perf_counter()
            mmap.mmap(-1, mmap.PAGESIZE).close()
            longest[0] = max(longest[0], time.perf_counter() - began)

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    try:
        yield longest
    finally:
        over.set()
        thread.join(LONG_S)


def taken() -> int:
    """Bytes of the device's memory that are in use, but not by torch's tensors."""
    free, total = torch.cuda.mem_get_info()
    return total - free - torch.cuda.memory_reserved()


def on_device(work: Callable[[], object]) -> float:
    """Seconds of the device from before ``work`` to after it on the current stream."""
    began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    began.record()
    work()
    ended.record()
    ended.synchronize()
    return float(began.elapsed_time(ended)) / 1000


class Trainer:
    """Masters on the GPU, an image, and a Snapshotter."""

    def __init__(self, shapes: Shapes, stack: ExitStack) -> None:
        layout = infer_layout(lambda s: dict(s), shapes)
        self.manifest = layout.manifest("bfloat16", 4 << 20)
        ops = {
            fqn: copy_ops(layout, self.manifest, fqn, (0,) * len(shape), shape)
            for fqn, shape in shapes.items()
        }
        image = stack.enter_context(SharedImage.create(self.manifest.total_bytes, "bench"))
        before, began = taken(), time.perf_counter()
        with longest_mmap() as longest:
            self._snapshotter = Snapshotter(ops, [image.tensor()], torch.device("cuda", 0), CHUNK)
            self.pin_s = time.perf_counter() - began
        (self.mmap_s,), self.pin_bytes = longest, taken() - before
        stack.callback(self._snapshotter.close)
        self.masters = {fqn: torch.empty(s, device="cuda").normal_() for fqn, s in shapes.items()}

    def unpin(self) -> float:
        """Seconds that it takes. The last call."""
        began = time.perf_counter()
        self._snapshotter.close()
        return time.perf_counter() - began

    def publish(self) -> tuple[float, float, float]:
        """(Host's seconds, the copy's, the device's at a fence that comes at once) of a version."""
        torch.cuda.synchronize()
        began = time.perf_counter()
        copy = self._snapshotter.start(self.masters, 0)
        copy.fence()
        blocked_s = time.perf_counter() - began
        copy_s = copy.wait(LONG_S)
        torch.cuda.synchronize()
        return blocked_s, copy_s, copy.fenced_s

    def slowed(self, once: Callable[[], object], copy_s: float, tries: int) -> float:
        """How many times as long the device takes beside a copy for ``once``, again and again: as
        long as the copy, so that all of it is under the copy."""
        on_device(once)
        rounds = max(8, int(0.8 * copy_s / on_device(once)))

        def work() -> None:
            for _ in range(rounds):
                once()

        def beside() -> float:
            torch.cuda.synchronize()
            copy = self._snapshotter.start(self.masters, 0)
            seconds = on_device(work)
            copy.wait(LONG_S)
            return seconds

        pairs = [(on_device(work), beside()) for _ in range(tries)]
        return median([beside_s / alone_s for alone_s, beside_s in pairs])


def raw_rate(nbytes: int, to_host: bool) -> float:
    """GiB/s of one copy between memory that torch pinned and the device."""
    host = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    device = torch.empty(nbytes, dtype=torch.uint8, device="cuda")
    ends = (host, device) if to_host else (device, host)
    times = [on_device(lambda: ends[0].copy_(ends[1], non_blocking=True)) for _ in range(6)]
    return nbytes / GIB / median(times[1:])


def trainer_figures(name: str, versions: int) -> Iterator[Figure]:
    """The price of a version on the trainer."""
    with ExitStack() as stack:
        trainer = Trainer(SHAPES[name], stack)
        gib = trainer.manifest.total_bytes / GIB
        raw = raw_rate(min(trainer.manifest.total_bytes, 2 * GIB), to_host=True)
        trainer.publish()
        runs = [trainer.publish() for _ in range(versions)]
        blocked, copied, fenced = (median([run[i] for run in runs]) for i in range(3))
        yield Figure(name, "image", gib, "GiB")
        yield Figure(name, "pinning it, once", trainer.pin_s, "s")
        what = "meanwhile, the longest wait of another thread for a page"
        yield Figure(name, what, trainer.mmap_s, "s")
        yield Figure(name, "device memory for what is pinned", trainer.pin_bytes / GIB, "GiB")
        yield Figure(name, "publish: the main thread's time (blocked)", blocked, "s", most=0.05)
        yield Figure(name, "publish: the copy's time", copied, "s")
        rate = gib / copied
        yield Figure(name, "copy, cast from float32, pinned", rate, "GiB/s")
        yield Figure(name, "the same / a raw pinned copy", rate / raw, "", least=0.8)
        yield Figure(name, "fence at once: device's stall / copy", fenced / copied, "", most=1.05)
        a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
        slower = trainer.slowed(lambda: a @ a, copied, versions)
        yield Figure(name, "matrix products beside the copy / alone", slower, "", most=1.05)
        b = torch.randn(64 << 20, device="cuda")
        slower = trainer.slowed(lambda: b.mul_(1.0), copied, versions)
        what = "device memory's bandwidth beside the copy / alone"
        yield Figure(name, what, slower, "", most=1.2)
        yield Figure(name, "unpinning the image", trainer.unpin(), "s")
        del trainer
    torch.cuda.empty_cache()
    with unpinned(), ExitStack() as stack:
        trainer = Trainer(SHAPES[name], stack)
        trainer.publish()
        runs = [trainer.publish() for _ in range(3)]
        slow = median([run[0] for run in runs])
        yield Figure(name, "pageable instead: main thread's time", slow, "s")
        rate = gib / median([run[1] for run in runs])
        yield Figure(name, "pageable instead: copy", rate, "GiB/s")


class GpuModel(Engine):
    """An engine without an engine: its own copy of every tensor, on the GPU."""

    def __init__(self, manifest: Manifest, repeats: bool, device: str) -> None:
        """``repeats``: a load may be repeated as the copies of the first one."""
        self._repeats = repeats
        self.tensors = {
            spec.name: torch.nn.Parameter(
                torch.zeros(spec.shape, dtype=getattr(torch, spec.dtype), device=device), False
            )
            for spec in manifest.tensors
        }

    def filled(self) -> torch.nn.Module | None:
        return torch.nn.ParameterList(self.tensors.values()) if self._repeats else None

    def load(self, tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
        """See Engine. Each copy is waited for, as the weight loaders of engines do."""
        for name, tensor in tensors:
            self.tensors[name].copy_(tensor)


class Server:
    """A lane to a receiver beside a GpuModel."""

    def __init__(
        self,
        manifest: Manifest,
        image: SharedImage,
        stack: ExitStack,
        repeats: bool = False,
        device: str = "cuda",
    ) -> None:
        """``repeats``: see GpuModel."""
        self.image = image
        self.model = GpuModel(manifest, repeats, device)
        self._side = EngineSide(self.model, Workers(), "")
        stack.callback(self._side.close)
        self._options = LinkOptions(
            WeightSync(bucket_bytes=CHUNK, lane_deadline_s=LONG_S), "tcp", "127.0.0.1"
        )
        self._run, self._stack = new_run_id(time.time()), stack
        self._epoch = self._version = 0
        self.connect(manifest)
        digests = Hashing("xxh3").blocks(image.buffer, manifest)
        self._digests = b"".join(digests)
        self._fingerprint = fingerprint(manifest.digest, digests)

    def connect(self, manifest: Manifest) -> float:
        """Open a lane, in place of the one before. Seconds of the engine's thread: it computes
        nothing while it ends the receiver before, and lets go of its memory."""
        self._epoch += 1
        self._link = LaneLink(self._run, self._epoch, manifest, self._options)
        self._stack.callback(self._link.close)
        hello = self._link.open().to_dict()
        began = time.perf_counter()
        self._side.hello(hello)
        seconds = time.perf_counter() - began
        self._link.wait_joined(LONG_S)
        self._link.send_manifest()
        self._side.hello({"attach": self._link.attach().to_dict()})
        self._number = 0
        return seconds

    def repeats(self) -> bool:
        """Whether the last load was the copies of an earlier one, or the next one will be."""
        mapping = self._side._mapping
        return mapping is not None and isinstance(mapping[1].result(LONG_S).copies, Copies)

    def deliver(self, beside: Callable[[], float] | None = None) -> tuple[float, float, float]:
        """(Seconds of the transfer, of the load, what ``beside`` gave during the transfer)."""
        self._number += 1
        self._version += 1
        began, number = time.perf_counter(), self._number
        args = number, self._version, self.image, self._digests, self._fingerprint
        other = 0.0
        if beside is None:
            staged = self._link.send(*args)
        else:
            answers: list[Any] = []
            thread = threading.Thread(target=lambda: answers.append(self._link.send(*args)))
            thread.start()
            other = beside()
            thread.join(LONG_S)
            (staged,) = answers
        fetch_s = time.perf_counter() - began
        assert staged.ok, staged.error
        self._side.commit(self._link.commit(staged).to_dict())
        applied = self._link.wait_applied(number, LONG_S)
        assert applied.ok, applied.error
        return fetch_s, applied.apply_s, other


def server_figures(name: str, versions: int) -> Iterator[Figure]:
    """How long a server stands still, and what a transfer costs what it computes."""
    manifest = infer_layout(lambda s: dict(s), SHAPES[name]).manifest("bfloat16", 4 << 20)
    gib = manifest.total_bytes / GIB
    raw = raw_rate(min(manifest.total_bytes, 2 * GIB), to_host=False)
    with ExitStack() as stack:
        image = stack.enter_context(SharedImage.create(manifest.total_bytes, "bench"))
        image.tensor().view(torch.int64).random_()
        with ExitStack() as inner:
            server = Server(manifest, image, inner)
            first = server.deliver()
            runs = [server.deliver() for _ in range(versions)]
            fetch, pause = (median([run[i] for run in runs]) for i in range(2))
            yield Figure(name, "transfer on one host, checked", gib / fetch, "GiB/s")
            yield Figure(name, "first load (waits for the staged image's pin)", first[1], "s")
            yield Figure(name, "load onto the GPU: the pause", pause, "s")
            yield Figure(name, "load / a raw pinned copy", pause / (gib / raw), "", most=1.3)
            small = torch.randn(16 << 20, device="cuda")
            graph_s = on_device(lambda: small.mul_(1.0))

            def decode() -> float:
                """Many short kernels, as in decoding."""
                count = max(200, int(0.5 * fetch / max(graph_s, 1e-5)))
                return on_device(lambda: [small.mul_(1.0) for _ in range(count)])

            decode()
            pairs = [(decode(), server.deliver(decode)[2]) for _ in range(versions)]
            slower = median([beside / alone for alone, beside in pairs])
            yield Figure(name, "kernels beside a transfer / alone", slower, "", most=1.05)
            spec = manifest.tensors[0]
            view = image.tensor()[spec.offset : spec.offset + spec.nbytes].view(torch.uint8)
            held = server.model.tensors[spec.name].cpu().view(-1).view(torch.uint8)
            assert torch.equal(view, held), "the model does not hold what was sent"
            stopped = server.connect(manifest)
            yield Figure(name, "a new connection: the engine stands still", stopped, "s")
        with ExitStack() as inner:
            server = Server(manifest, image, inner, repeats=True)
            learnt = server.deliver()[1]
            again = median([server.deliver()[1] for _ in range(versions)])
            assert server.repeats(), "the load was not repeated as copies"
            yield Figure(name, "first load, whose copies are learnt and compared", learnt, "s")
            yield Figure(name, "the same repeated as copies", again, "s")
            yield Figure(
                name, "repeated load / a raw pinned copy", again / (gib / raw), "", most=1.3
            )
        pin = WorkerDevice.pin
        WorkerDevice.pin = lambda *_: None  # type: ignore[method-assign]
        try:
            with ExitStack() as inner:
                server = Server(manifest, image, inner)
                server.deliver()
                slow = median([server.deliver()[1] for _ in range(3)])
                yield Figure(name, "pageable instead: load", slow, "s")
                yield Figure(name, "pageable / pinned load", slow / pause, "", least=1.0)
        finally:
            WorkerDevice.pin = pin  # type: ignore[method-assign]


def main(argv: list[str]) -> int:
    """Exit code 1 if a figure is not as it should be, 2 without a GPU."""
    parser = options_of(__doc__)
    parser.add_argument("--shapes", default="qwen3_0.6b,llama3_8b", help=", ".join(SHAPES))
    parser.add_argument("--versions", type=positive, default=7, help="of which medians are taken")
    options = parser.parse_args(argv)
    names = options.shapes.split(",")
    if unknown := set(names) - SHAPES.keys():
        parser.error(f"--shapes must be of {', '.join(SHAPES)}, got {', '.join(sorted(unknown))}")
    if not torch.cuda.is_available():
        print(
            "bench_gpu: this machine has no GPU that torch can use (torch"
            f" {torch.__version__}): nothing was measured",
            file=sys.stderr,
        )
        return 2
    torch.cuda.init()
    machine = f"{torch.cuda.get_device_name(0)}, torch {torch.__version__}"
    print(machine)
    figures: list[Figure] = []
    for name in names:
        for part in (trainer_figures, server_figures):
            for figure in part(name, options.versions):
                figures.append(figure)
                print(figure.line(), flush=True)
            torch.cuda.empty_cache()
    rows = [asdict(figure) | {"good": figure.good} for figure in figures]
    write_json(options.json, {"machine": machine, "figures": rows})
    return 0 if all(figure.good for figure in figures) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
