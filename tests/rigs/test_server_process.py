"""What the verdicts of soak and fault matrix rest on: what the engine-less server says of its own
memory."""

from collections.abc import Iterator

import pytest
import torch

from tests.rigs.server_process import CopiedModel


def tensors(value: float) -> dict[str, torch.Tensor]:
    return {name: torch.full((8, 4), value) for name in ("up", "down", "norm")}


def test_a_load_that_breaks_off_is_seen_in_the_memory() -> None:
    model = CopiedModel()
    model.load(iter(tensors(1.0).items()))
    before = model.digest()

    def half() -> Iterator[tuple[str, torch.Tensor]]:
        yield from list(tensors(2.0).items())[:2]
        raise RuntimeError("planted")

    with pytest.raises(RuntimeError):
        model.load(half())
    assert model.digest() != before
