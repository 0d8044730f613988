"""An engine that is a dict of tensors, a real receiver process beside it, and real lanes."""

from collections.abc import Callable
from dataclasses import fields
from typing import Any

import torch

from tests.rigs.present import present
from titan_grpo.config import WeightSync
from titan_grpo.layout.image import Hashing, fingerprint
from titan_grpo.layout.manifest import Manifest
from titan_grpo.protocol.messages import PROBE, Applied, Joined, new_run_id
from titan_grpo.receive.commit import Engine, EngineSide, Workers
from titan_grpo.receive.process import ReceiverHandle
from titan_grpo.receive.window import Tensors
from titan_grpo.runkey import Key
from titan_grpo.subprocesses import wait_process
from titan_grpo.sync.link import LaneLink, LinkOptions
from titan_grpo.sync.probe import ask_receiver

BLOCK, BUCKET = 4096, 16384
SHAPES = {"a": (torch.bfloat16, (64, 1024)), "b": (torch.float32, (1000,))}


class Version:
    """A version image of ``tensors``, with its digests."""

    def __init__(self, tensors: dict[str, torch.Tensor], key: Key | None = None) -> None:
        self.tensors = tensors
        self.manifest = Manifest.build(
            [(n, str(t.dtype).removeprefix("torch."), tuple(t.shape)) for n, t in tensors.items()],
            BLOCK,
        )
        self.image = torch.zeros(self.manifest.total_bytes, dtype=torch.uint8)
        for spec in self.manifest.tensors:
            self.image[spec.offset : spec.offset + spec.nbytes] = (
                tensors[spec.name].flatten().view(torch.uint8)
            )
        hashing = Hashing("blake3" if key else "xxh3", key)
        self.blocks = hashing.blocks(self.image.numpy().data, self.manifest)
        self.digests = b"".join(self.blocks)
        self.fingerprint = fingerprint(self.manifest.digest, self.blocks)


class Weights(Version):
    """A version in which every element of every tensor is ``value``."""

    def __init__(
        self, value: float, names: tuple[str, ...] = ("a", "b"), key: Key | None = None
    ) -> None:
        super().__init__(
            {n: torch.full(SHAPES[n][1], value, dtype=SHAPES[n][0]) for n in names}, key
        )


class DictEngine(Engine):
    """The smallest engine there is: named tensors that are copied into."""

    def __init__(self) -> None:
        self.tensors = {
            name: torch.zeros(shape, dtype=dtype) for name, (dtype, shape) in SHAPES.items()
        }
        self.breaks_at = ""
        self.loads = 0

    def load(self, tensors: Tensors) -> None:
        for name, tensor in tensors:
            if name == self.breaks_at:
                raise RuntimeError("planted failure in the middle of a load")
            self.tensors[name].copy_(tensor)
        self.loads += 1

    def value(self) -> float:
        """The one number all weights have in these tests; fails if they are mixed."""
        values = {float(v) for t in self.tensors.values() for v in (t.min(), t.max())}
        assert len(values) == 1, f"mixed weights: {values}"
        return values.pop()


class NotedEngine(DictEngine):
    """Says when it loads."""

    def __init__(self, note: Callable[[str], object]) -> None:
        super().__init__()
        self._note = note

    def load(self, tensors: Tensors) -> None:
        self._note("load")
        super().load(tensors)


class Site:
    """One engine with its plugin half, and the lanes that a test opens to it."""

    def __init__(self, run_key: Key | None = None, engine: Any = None, **options: Any) -> None:
        """``options``: of LinkOptions, or of its config."""
        self.run_key = run_key
        self.engine: Any = engine or DictEngine()
        self.side = EngineSide(self.engine, Workers(), "", run_key)
        self.run_id = new_run_id(1_700_000_000.0)
        self.epoch = 0
        self.transport = options.get("transport", "tcp")
        self.links: list[LaneLink] = []
        self.joined: Joined
        """Of the last lane that connected."""
        self._options = {"run_key": run_key} | options

    @property
    def receiver(self) -> ReceiverHandle:
        """Of the epoch in force."""
        assert self.side.receiver is not None
        return self.side.receiver

    @property
    def receiver_pid(self) -> int:
        return present(self.receiver._serving).pid

    def receiver_status(self) -> int:
        """Exit status of the receiver, once it has ended."""
        return wait_process(present(self.receiver._serving)._process, 60.0)

    def link(
        self,
        version: Version,
        run_id: str | None = None,
        epoch: int | None = None,
        **options: Any,
    ) -> LaneLink:
        """A lane of the next epoch, not opened."""
        self.epoch = self.epoch + 1 if epoch is None else epoch
        own = {"transport": "tcp", "bind_host": "127.0.0.1"} | self._options | options
        config: dict[str, Any] = {"bucket_bytes": BUCKET, "lane_deadline_s": 60.0}
        config |= {key: own.pop(key) for key in set(own) - {f.name for f in fields(LinkOptions)}}
        made = LinkOptions(WeightSync(**config), **own)
        link = LaneLink(run_id or self.run_id, self.epoch, version.manifest, made)
        self.links.append(link)
        return link

    def greet(self, version: Version, **options: Any) -> LaneLink:
        """A lane of the next epoch whose hello has been sent."""
        link = self.link(version, **options)
        self.hello(link.open().to_dict())
        return link

    def hello(self, data: dict[str, Any]) -> None:
        """Send the engine a hello, as its HTTP route does."""
        self.side.hello(data)

    def connect(self, version: Version) -> LaneLink:
        """A lane of the next epoch that has joined and handed its manifest over."""
        link = self.greet(version)
        self.joined = link.wait_joined(180.0)
        assert link.send_manifest().ok
        return link

    def deliver(self, link: LaneLink, number: int, version: int, weights: Version) -> Applied:
        """One transfer and its commit; the report that the lane reads back."""
        staged = link.send(number, version, weights.image, weights.digests, weights.fingerprint)
        assert staged.ok, staged
        self.side.commit(link.commit(staged).to_dict())
        return link.wait_applied(number, 60.0)

    def probe(self, key: Key | None = None) -> Joined:
        return ask_receiver(self.hello, "127.0.0.1", 60.0, key, transport=PROBE)

    def close(self) -> None:
        for link in self.links:
            link.close()
        self.side.close()
