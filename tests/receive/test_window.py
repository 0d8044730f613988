"""Several workers walk through one window in step, and leave it together."""

from collections.abc import Iterator

import pytest
import torch

from tests.receive.workers import Team, everywhere
from titan_grpo.errors import PeerError, TransferFailed
from titan_grpo.layout.manifest import Manifest
from titan_grpo.receive.window import WindowReader, window_bytes

BUCKET = 1024
MANIFEST = Manifest.build(
    [("a", "uint8", (3000,)), ("b", "uint8", (7000,)), ("c", "uint8", (10,))], 512
)
RING = window_bytes(MANIFEST.total_bytes, BUCKET)


class Source:
    """What a receiver does: a bucket at a time, only where the ring has room; breaks off after
    ``until`` bytes."""

    def __init__(self, until: int) -> None:
        self.image = torch.randint(
            0, 256, (MANIFEST.total_bytes,), generator=torch.Generator().manual_seed(1)
        ).byte()
        self.ring, self._until = torch.zeros(RING, dtype=torch.uint8), until

    def take(self, consumed: int) -> int:
        stop = min(consumed + BUCKET, MANIFEST.total_bytes)
        if stop > self._until:
            raise PeerError("planted end")
        # whatever was consumed is gone: a reader that still needed it would read these
        self.ring.fill_(255)
        at = consumed % RING
        self.ring[at : at + stop - consumed] = self.image[consumed:stop]
        return stop


def run(source: Source, size: int, fails: int = -1) -> list[tuple[dict[str, torch.Tensor], str]]:
    """Per worker: the tensors it got and how it ended; worker ``fails`` breaks off after its first
    tensor."""
    team = Team(size)

    def work(rank: int) -> tuple[dict[str, torch.Tensor], str]:
        member = team.members[rank]
        reader = WindowReader(source.ring, MANIFEST, member, source.take)
        got: dict[str, torch.Tensor] = {}
        try:
            for name, tensor in reader.tensors():
                got[name] = tensor
                if rank == fails:
                    member.gather("planted failure")
                    return got, "failed"
        except TransferFailed as error:
            return got, str(error)
        return got, reader.broken

    return everywhere(size, work)


def expected(image: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    for spec in MANIFEST.tensors:
        yield spec.name, image[spec.offset : spec.offset + spec.nbytes]


@pytest.mark.parametrize("size", [1, 2])
def test_every_worker_gets_every_tensor_in_memory_of_its_own(size: int) -> None:
    source = Source(MANIFEST.total_bytes)
    for got, end in run(source, size):
        assert end == ""
        assert list(got) == ["a", "b", "c"]
        assert all(torch.equal(tensor, got[name]) for name, tensor in expected(source.image))


def test_a_transfer_that_ends_early_ends_for_every_worker_with_its_reason() -> None:
    for got, end in run(Source(5000), 2):
        assert list(got) == ["a"]
        assert "planted end" in end


def test_a_worker_that_breaks_off_takes_the_others_with_it() -> None:
    (_, first), (_, second) = run(Source(MANIFEST.total_bytes), 2, fails=1)
    assert first == "planted failure"
    assert second == "failed"
