"""An engine that is a dict of tensors, a real receiver process beside it, and real lanes."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from titan_grpo.layout.digest import block_digests, fingerprint
from titan_grpo.layout.manifest import Manifest
from titan_grpo.protocol.messages import Applied, Joined, new_run_id
from titan_grpo.receive.commit import EngineSide, OneWorker
from titan_grpo.runkey import Key
from titan_grpo.sync.link import LaneLink, LinkOptions, Probe

BLOCK, BUCKET = 4096, 16384
SHAPES = {"a": (torch.bfloat16, (64, 1024)), "b": (torch.float32, (1000,))}


class DictEngine:
    """The smallest engine there is: named tensors that are copied into."""

    def __init__(self) -> None:
        self.tensors = {
            name: torch.zeros(shape, dtype=dtype) for name, (dtype, shape) in SHAPES.items()
        }
        self.breaks_at = ""
        self.loads = 0
        self.kept: list[torch.Tensor] = []

    def refuses(self, manifest: Manifest) -> str:
        unknown = {spec.name for spec in manifest.tensors} ^ set(self.tensors)
        return f"unknown or missing tensors: {sorted(unknown)}" if unknown else ""

    def load(self, tensors: Iterator[tuple[str, torch.Tensor]]) -> int:
        count = 0
        for name, tensor in tensors:
            if name == self.breaks_at:
                raise RuntimeError("planted failure in the middle of a load")
            self.tensors[name].copy_(tensor)
            self.kept.append(tensor)
            count += 1
        self.loads += 1
        return count

    def value(self) -> float:
        """The one number all weights have in these tests; fails if they are mixed."""
        values = {float(v) for t in self.tensors.values() for v in (t.min(), t.max())}
        assert len(values) == 1, f"mixed weights: {values}"
        return values.pop()


class Weights:
    """A version image in which every element of every tensor is ``value``."""

    def __init__(
        self, value: float, names: tuple[str, ...] = ("a", "b"), key: bytes | None = None
    ) -> None:
        entries = [(n, str(SHAPES[n][0]).removeprefix("torch."), SHAPES[n][1]) for n in names]
        self.manifest = Manifest.build(entries, BLOCK)
        self.image = torch.zeros(self.manifest.total_bytes, dtype=torch.uint8)
        for spec in self.manifest.tensors:
            data = torch.full(spec.shape, value, dtype=getattr(torch, spec.dtype))
            self.image[spec.offset : spec.offset + spec.nbytes] = data.flatten().view(torch.uint8)
        self.digests = block_digests(
            memoryview(self.image.numpy()), self.manifest, "blake3" if key else "xxh3", key
        )
        self.fingerprint = fingerprint(self.manifest.digest, self.digests)


class Site:
    """One engine with its plugin half, and the lanes that a test opens to it."""

    def __init__(self, run_key: Key | None = None) -> None:
        self.run_key = run_key
        self.engine = DictEngine()
        self.side = EngineSide(self.engine, OneWorker(), "", run_key)
        self.run_id = new_run_id(1_700_000_000.0)
        self.epoch = 0
        self.links: list[LaneLink] = []

    def link(
        self, weights: Weights, run_id: str | None = None, epoch: int | None = None
    ) -> LaneLink:
        """A lane of the next epoch, not opened."""
        self.epoch = self.epoch + 1 if epoch is None else epoch
        options = LinkOptions(
            "gloo", "127.0.0.1", "xxh3", BUCKET, timeout_s=20.0, run_key=self.run_key
        )
        link = LaneLink(run_id or self.run_id, self.epoch, weights.manifest, options)
        self.links.append(link)
        return link

    def connect(self, weights: Weights) -> LaneLink:
        """A lane of the next epoch that has joined and handed its manifest over."""
        link = self.link(weights)
        self.side.hello(link.open().to_dict())
        link.wait_joined(60.0)
        assert link.send_manifest(20.0).ok
        return link

    def deliver(self, link: LaneLink, number: int, version: int, weights: Weights) -> Applied:
        """One transfer and its commit; the report that the lane reads back."""
        staged = link.send(number, version, weights.image, weights.digests, weights.fingerprint)
        assert staged.ok, staged
        self.side.commit(link.commit(staged).to_dict())
        return link.wait_applied(number, 10.0)

    def probe(self) -> Joined:
        """What a doctor asks."""
        probe = Probe("127.0.0.1", 60.0)
        self.side.hello(probe.hello.to_dict())
        return probe.wait()

    def close(self) -> None:
        for link in self.links:
            link.close()
        self.side.close()


@pytest.fixture(scope="module")
def make_site() -> type[Site]:
    return Site


@pytest.fixture
def site() -> Iterator[Site]:
    made = Site()
    yield made
    made.close()


@pytest.fixture
def weights() -> type[Weights]:
    return Weights


@pytest.fixture
def rogue() -> Iterator[Callable[[Site, str], subprocess.Popen[str]]]:
    """Start a sender process of the next epoch, let it join, and return when it has done what its
    mode says."""
    started: list[subprocess.Popen[str]] = []

    def start(site: Site, mode: str) -> subprocess.Popen[str]:
        site.epoch += 1
        script = Path(__file__).with_name("sender_process.py")
        process = subprocess.Popen(
            [sys.executable, str(script), site.run_id, str(site.epoch), mode],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        assert process.stdout is not None
        site.side.hello(json.loads(process.stdout.readline()))
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()
