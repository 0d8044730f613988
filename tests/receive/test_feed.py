"""Several workers walk through one window in step, and leave it together."""

import threading
from collections.abc import Iterator

import pytest
import torch

from titan_grpo.errors import PeerError, TransferFailed
from titan_grpo.layout.manifest import Manifest
from titan_grpo.receive.commit import Feed
from titan_grpo.receive.window import copy_out, window_bytes

BUCKET = 1024
MANIFEST = Manifest.build(
    [("a", "uint8", (3000,)), ("b", "uint8", (7000,)), ("c", "uint8", (10,))], 512
)
RING = window_bytes(MANIFEST.total_bytes, BUCKET)


class Team:
    """The exchanges of workers that are threads of one process."""

    def __init__(self, size: int) -> None:
        self.size, self.barrier = size, threading.Barrier(size, timeout=20.0)
        self.values: list = [None] * size


class Member:
    """One worker of a team."""

    def __init__(self, team: Team, rank: int) -> None:
        self._team, self.rank, self.size = team, rank, team.size

    def gather(self, value: str) -> list[str]:
        self._team.values[self.rank] = value
        self._team.barrier.wait()
        values = list(self._team.values)
        self._team.barrier.wait()
        return values

    def share(self, value):
        return self.gather(value)[0]


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
        # whatever was consumed is gone: a feed that still needed it would read these
        self.ring.fill_(255)
        at = consumed % RING
        self.ring[at : at + stop - consumed] = self.image[consumed:stop]
        return stop


def run(source: Source, size: int, fails: int = -1) -> list[tuple[dict[str, torch.Tensor], str]]:
    """Per worker: the tensors it got and how it ended; worker ``fails`` breaks off after its first
    tensor."""
    team = Team(size)
    results: list = [None] * size

    def work(rank: int) -> None:
        member = Member(team, rank)
        feed = Feed(source.ring, MANIFEST, member, source.take)
        got: dict[str, torch.Tensor] = {}
        try:
            for name, tensor in feed.tensors():
                got[name] = tensor
                if rank == fails:
                    member.gather("planted failure")
                    results[rank] = (got, "failed")
                    return
        except TransferFailed as error:
            results[rank] = (got, str(error))
            return
        results[rank] = (got, feed.broken)

    threads = [threading.Thread(target=work, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30.0)
    return results


def expected(image: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    for spec in MANIFEST.tensors:
        yield spec.name, image[spec.offset : spec.offset + spec.nbytes]


@pytest.mark.parametrize("size", [1, 2])
def test_every_worker_gets_every_tensor_in_memory_of_its_own(size):
    source = Source(MANIFEST.total_bytes)
    for got, end in run(source, size):
        assert end == ""
        assert list(got) == ["a", "b", "c"]
        assert all(torch.equal(tensor, got[name]) for name, tensor in expected(source.image))


def test_a_transfer_that_ends_early_ends_for_every_worker_with_its_reason():
    for got, end in run(Source(5000), 2):
        assert list(got) == ["a"]
        assert "planted end" in end


def test_a_worker_that_breaks_off_takes_the_others_with_it():
    (_, first), (_, second) = run(Source(MANIFEST.total_bytes), 2, fails=1)
    assert first == "planted failure"
    assert second == "failed"


def test_bytes_are_read_across_the_end_of_the_ring():
    into = torch.zeros(4, dtype=torch.uint8)
    copy_out(torch.arange(8, dtype=torch.uint8), 6, into)
    assert into.tolist() == [6, 7, 0, 1]
