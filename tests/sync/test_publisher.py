"""A rank copies its shards in pieces, fences each copy once, and announces it; the failure of one
is not the end of the others."""

from datetime import timedelta
from typing import Any

import pytest
import torch

from titan_grpo.layout.peft import MergedRows
from titan_grpo.layout.plan import CopyOp
from titan_grpo.sync.publisher import Announcer, Copy, Publisher, Snapshotter, copied_key
from titan_grpo.sync.transports.broadcast import host_store

WAIT_S = 90.0


class BrokenCopy(Copy):
    """A device that fails: what CUDA raises is a RuntimeError."""

    def wait(self, timeout_s: float) -> float:
        raise RuntimeError("an illegal address")


def test_an_error_of_the_device_is_reported_and_later_versions_are_still_announced(
    caplog: pytest.LogCaptureFixture,
) -> None:
    store = host_store("127.0.0.1")
    announcer = Announcer(1, store.port, WAIT_S, WAIT_S)
    announcer(1, 0, BrokenCopy(0.0))
    announcer(2, 1, BrokenCopy(0.0))
    announcer(3, 0, Copy(0.5))
    store.wait([copied_key(3, 1)], timedelta(seconds=WAIT_S))
    assert "weight sync: version 2: an illegal address" in caplog.text
    assert not store.check([copied_key(1, 1)])
    assert "rank 1: an illegal address" in str(announcer.take_error())
    assert announcer.take_error() is None
    announcer.close(WAIT_S)


class Noted(MergedRows):
    """Rows that note how many of them are made at once."""

    def __init__(self, *of: Any) -> None:
        super().__init__(*of)
        self.made: list[int] = []

    def __getitem__(self, rows: slice | torch.Tensor) -> torch.Tensor:
        found = super().__getitem__(rows)
        self.made.append(len(found))
        return found


def test_the_temporary_of_a_copy_fits_into_its_memory_in_the_wider_of_both_types() -> None:
    image, base = torch.zeros(64, dtype=torch.uint8), torch.arange(32.0).view(8, 4).bfloat16()
    shard = Noted(base, torch.zeros(8, 1), torch.zeros(1, 4), 1.0)
    op = CopyOp("w", slice(0, 8, 1), 0, 8, 8, 4, "bfloat16")
    Snapshotter({"w": [op]}, [image], torch.device("cpu"), 64).start({"w": shard}, 0)
    assert shard.made == [2] * 4, "of four float64 numbers each"
    assert torch.equal(image.view(torch.bfloat16).view(8, 4), base)


def test_a_copy_is_fenced_before_the_next_optimizer_step_and_not_again() -> None:
    class Fenced(Copy):
        fences = 0

        def fence(self) -> None:
            self.fences += 1

        @property
        def fenced_s(self) -> float:
            return 0.5 * self.fences

    made = [Fenced(0.0), Fenced(0.0)]
    copies: Any = iter(made)
    snapshotter: Any = type("Copier", (), {"start": lambda *_: next(copies)})()
    publisher = Publisher(snapshotter)
    for copy in made:
        publisher.publish(1, 0, {})
        publisher.fence()
        publisher.fence()
        assert (copy.fences, publisher.take_fenced_s(), publisher.take_fenced_s()) == (1, 0.5, 0.0)
