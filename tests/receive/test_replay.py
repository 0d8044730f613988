"""A load that is plain copies is repeated by them, to the byte; one that is more than that is found
out."""

import ctypes
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import nn

from titan_grpo.receive.replay import Copies, Written, differ, learn

HIDDEN, ROWS, PADDED = 16, 30, 32
SHAPES = {
    "q": (8, HIDDEN),
    "k": (4, HIDDEN),
    "v": (4, HIDDEN),
    "o": (HIDDEN, 8),
    "embedding": (ROWS, HIDDEN),
    "norm": (HIDDEN,),
}

Load = Callable[[], None]


class Checkpoint:
    """Tensors in one block of memory, as a version is staged."""

    def __init__(self) -> None:
        sizes = {name: 2 * torch.Size(shape).numel() for name, shape in SHAPES.items()}
        self.memory = torch.empty(sum(sizes.values()), dtype=torch.uint8)
        self.tensors, at = dict[str, torch.Tensor](), 0
        for name, shape in SHAPES.items():
            block = self.memory[at : at + sizes[name]]
            self.tensors[name] = block.view(torch.bfloat16).view(shape)
            at += sizes[name]
        self.fill(0)

    def fill(self, seed: int) -> None:
        """Other bytes, NaN among them, at the same place."""
        self.memory.random_(0, 256, generator=torch.Generator().manual_seed(seed))

    @property
    def sources(self) -> list[torch.Tensor]:
        return list(self.tensors.values())


class Model(nn.Module):
    """Fused, sliced (as the second of two workers), padded, cast and repeated parameters; two that
    lie in one block of memory."""

    packed: bytes

    def __init__(self) -> None:
        super().__init__()

        def made(*shape: int, dtype: torch.dtype = torch.bfloat16) -> nn.Parameter:
            return nn.Parameter(torch.zeros(shape, dtype=dtype), requires_grad=False)

        both = torch.zeros(16 * HIDDEN + HIDDEN * 4, dtype=torch.bfloat16)
        self.o = nn.Parameter(both[: HIDDEN * 4].view(HIDDEN, 4), requires_grad=False)
        self.qkv = nn.Parameter(both[HIDDEN * 4 :].view(16, HIDDEN), requires_grad=False)
        self.gates = made(2, HIDDEN)
        self.embedding = made(PADDED, HIDDEN)
        self.norm = made(HIDDEN, dtype=torch.float32)
        self.bias: torch.Tensor
        self.register_buffer("bias", torch.zeros(HIDDEN, dtype=torch.bfloat16))
        self.derived = self.constant = torch.empty(0)

    def load(self, version: Checkpoint) -> None:
        """As an engine's loader does it."""
        loaded, at = version.tensors, 0
        self.qkv.data.narrow(0, 2, 8).copy_(loaded["q"])  # replaced by what follows
        for name in ("q", "k", "v"):
            rows = len(loaded[name])
            self.qkv.data.narrow(0, at, rows).copy_(loaded[name])
            at += rows
        self.o.data.copy_(loaded["o"].narrow(1, 4, 4))
        self.embedding[:ROWS].data.copy_(loaded["embedding"])
        self.embedding[ROWS:].data.fill_(0)
        self.norm.data.copy_(loaded["norm"])
        self.gates.data.copy_(loaded["norm"])
        self.gates.data.copy_(self.gates.data)
        self.bias.copy_(loaded["norm"])
        self.constant = torch.empty(4).zero_()

    def load_by_layer(self, version: Checkpoint) -> None:
        """As vLLM reloads: into new memory, which takes the place of the last layer's."""
        kept = dict(self.named_parameters())
        for name, parameter in kept.items():
            blank = nn.Parameter(torch.empty_like(parameter), requires_grad=False)
            setattr(self, name, blank)
        self.load(version)
        for name, parameter in kept.items():
            parameter.data.copy_(getattr(self, name))
            setattr(self, name, parameter)

    @property
    def content(self) -> list[list[int]]:
        """The bytes of all parameters and buffers."""
        tensors = [*self.parameters(), *self.buffers()]
        return [t.detach().flatten().view(torch.uint8).tolist() for t in tensors]


@pytest.fixture
def version() -> Checkpoint:
    return Checkpoint()


@pytest.fixture
def model() -> Model:
    return Model()


def learnt(load: Load, model: Model, version: Checkpoint) -> Copies:
    found = learn(load, model, version.sources)
    assert isinstance(found, Copies), found
    return found


@pytest.mark.parametrize("by_layer", [False, True])
def test_copies_give_the_bytes_that_the_loader_gives(
    by_layer: bool, model: Model, version: Checkpoint
) -> None:
    load = model.load_by_layer if by_layer else model.load
    copies = learnt(lambda: load(version), model, version)
    version.fill(1)
    copies.repeat()
    repeated = model.content
    for parameter in model.parameters():
        parameter.data[..., :2] = 7.0
    model.bias.zero_()
    load(version)
    assert repeated == model.content
    assert copies.fit(model)


def test_memory_that_only_a_cycle_holds_is_given_back(model: Model, version: Checkpoint) -> None:
    class Layer:
        pass

    def load() -> None:
        layer: Any = Layer()
        layer.itself, layer.memory = layer, torch.empty(8, HIDDEN, dtype=torch.bfloat16)
        layer.memory.copy_(version.tensors["q"])
        model.load(version)
        model.qkv.data[:8].copy_(layer.memory)

    assert isinstance(learn(load, model, version.sources), Copies)


def test_a_parameter_that_is_a_view_of_another_is_filled_with_it(
    model: Model, version: Checkpoint
) -> None:
    """As vLLM keeps the halves of a latent attention's projection."""
    model.part = nn.Parameter(model.qkv.data[5:11].t(), requires_grad=False)
    copies = learnt(lambda: model.load(version), model, version)
    version.fill(1)
    copies.repeat()
    wanted = model.qkv.data[5:11].t()
    assert model.part.data_ptr() == wanted.data_ptr()
    assert not differ(copies.pairs)


@pytest.mark.parametrize("value", [0.0, 0.1])
def test_a_constant_keeps_its_value_and_is_not_copied(
    value: float, model: Model, version: Checkpoint
) -> None:
    def load() -> None:
        model.load(version)
        model.norm.data.fill_(value)

    copies = learnt(load, model, version)
    assert model.norm.data_ptr() not in [target.data_ptr() for target, _ in copies.pairs]


def zeroed(version: Checkpoint) -> None:
    version.tensors["q"].zero_()


def increased(version: Checkpoint) -> None:
    version.tensors["norm"] += 1.0


def written_after_a_computation(version: Checkpoint) -> None:
    (version.tensors["q"] * 2).sum()
    version.tensors["k"][1:].mul_(3)


def written_by_name(version: Checkpoint) -> None:
    torch.neg(torch.ones(8, HIDDEN, dtype=torch.bfloat16), out=version.tensors["q"])


def written_with_others(version: Checkpoint) -> None:
    torch._foreach_mul_([torch.ones(2), version.tensors["norm"]], 2.0)


@torch.library.custom_op("titan_grpo_tests::copy_into", mutates_args={"target"})
def copy_into(source: torch.Tensor, target: torch.Tensor) -> None:
    target.copy_(source)


def written_by_a_kernel_of_the_engine(version: Checkpoint) -> None:
    copy_into(torch.ones(8, HIDDEN, dtype=torch.bfloat16), version.tensors["q"])


def written_and_not_said(version: Checkpoint) -> None:
    with suppress(RuntimeError):
        version.tensors["q"].zero_()


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize(
    "write",
    [
        zeroed,
        increased,
        written_after_a_computation,
        written_by_name,
        written_with_others,
        written_by_a_kernel_of_the_engine,
        written_and_not_said,
    ],
    ids=lambda write: write.__name__,
)
def test_a_loader_is_stopped_before_it_writes_to_what_it_loads(
    write: Callable[[Checkpoint], None], known: bool, model: Model, version: Checkpoint
) -> None:
    before = version.memory.clone()

    def load() -> None:
        model.load(version)
        write(version)

    with pytest.raises(Written, match="writes to a tensor that is loaded"):
        learn(load, model if known else None, version.sources)
    assert version.memory.equal(before)


def scaled(model: Model, version: Checkpoint) -> None:
    model.norm.data.copy_(version.tensors["norm"] * 2)


def scaled_afterwards(model: Model, version: Checkpoint) -> None:
    model.norm.data.mul_(2)


def scaled_on_the_way(model: Model, version: Checkpoint) -> None:
    memory = torch.empty(HIDDEN, dtype=torch.bfloat16)
    memory.copy_(version.tensors["norm"])
    memory.mul_(2)
    model.norm.data.copy_(memory)


def mixed_on_the_way(model: Model, version: Checkpoint) -> None:
    memory = torch.empty(8, HIDDEN, dtype=torch.bfloat16)
    memory.copy_(version.tensors["q"])
    memory[:2].copy_(torch.ones(2, HIDDEN))
    model.qkv.data[:8].copy_(memory)


def derived(model: Model, version: Checkpoint) -> None:
    model.derived = model.o.data.t().contiguous()


def read_as_a_number(model: Model, version: Checkpoint) -> None:
    model.norm.data.fill_(version.tensors["norm"][0].item())


def filled_with_an_element(model: Model, version: Checkpoint) -> None:
    model.norm.data.fill_(version.tensors["norm"][0])


def copied_from_elsewhere(model: Model, version: Checkpoint) -> None:
    model.norm.data.copy_(torch.ones(HIDDEN))


def kept_in_an_attribute(model: Model, version: Checkpoint) -> None:
    model.derived = torch.empty(HIDDEN, dtype=torch.bfloat16)
    model.derived.copy_(version.tensors["norm"])


def transposed(model: Model, version: Checkpoint) -> None:
    model.qkv.data.t().copy_(square_of(version).t())


def square_of(version: Checkpoint) -> torch.Tensor:
    """A square view of the version's bytes."""
    return version.memory[: 2 * 16 * HIDDEN].view(torch.bfloat16).view(16, HIDDEN)


def copied_on_in_part(model: Model, version: Checkpoint) -> None:
    whole = torch.empty(ROWS, HIDDEN, dtype=torch.bfloat16)
    whole.copy_(version.tensors["embedding"])
    model.embedding.data[:8].copy_(whole[1:9])


def rearranged(model: Model, version: Checkpoint) -> None:
    square = torch.empty(16, HIDDEN, dtype=torch.bfloat16)
    square.copy_(square_of(version))
    model.qkv.data.copy_(square.t())


def cast_on_the_way(model: Model, version: Checkpoint) -> None:
    same = torch.empty(HIDDEN, dtype=torch.bfloat16)
    same.copy_(version.tensors["norm"])
    model.norm.data.copy_(same)


def copied_within(model: Model, version: Checkpoint) -> None:
    model.qkv.data[:4].copy_(model.qkv.data[4:8])


def left_a_gap(model: Model, version: Checkpoint) -> None:
    blank = nn.Parameter(torch.zeros_like(model.norm), requires_grad=False)
    blank.data[:4].copy_(version.tensors["norm"][:4])
    blank.data[8:].copy_(version.tensors["norm"][8:])
    model.norm = blank


def copied_as_bytes(model: Model, version: Checkpoint) -> None:
    model.norm.data.view(torch.uint8).copy_(version.memory[: 4 * HIDDEN])


def strided_alone(model: Model, version: Checkpoint) -> None:
    apart = torch.empty(HIDDEN, 2)
    apart[:, :1].copy_(version.tensors["norm"][:, None])
    model.norm = nn.Parameter(apart[:, 0], requires_grad=False)


def left_half(model: Model, version: Checkpoint) -> None:
    blank = nn.Parameter(torch.zeros_like(model.o), requires_grad=False)
    blank.data[:8].copy_(version.tensors["o"][:8, 4:])
    model.o = blank


def on_a_thread(model: Model, version: Checkpoint) -> None:
    blank = nn.Parameter(torch.zeros_like(model.norm), requires_grad=False)
    thread = threading.Thread(target=blank.data.copy_, args=(version.tensors["norm"],))
    thread.start()
    thread.join(60)
    model.norm = blank


def behind_torch(model: Model, version: Checkpoint) -> None:
    model.norm.data.numpy()[3] += 1.0


def behind_a_constant(model: Model, version: Checkpoint) -> None:
    model.norm.data.zero_()
    model.norm.data.view(torch.int16).numpy()[3] = 1


def behind_another_constant(model: Model, version: Checkpoint) -> None:
    model.norm.data.fill_(0.1)
    model.norm.data.view(torch.int16).numpy()[3] = 1


def whole_in_inference_mode(model: Model, version: Checkpoint) -> None:
    """Its ``contiguous`` is one operation there, and copies."""
    with torch.inference_mode():
        model.derived = version.tensors["o"].t().contiguous()


def block() -> torch.Tensor:
    """So much memory that it is mapped when it is made, and unmapped when it is given back: more
    than a heap keeps free (64 MiB). Little of it is touched."""
    return torch.empty(1 << 30, dtype=torch.uint8).view(torch.bfloat16).view(-1, HIDDEN)


def copied_from_memory_that_was_given_back_and_used_again(
    model: Model, version: Checkpoint
) -> None:
    """The allocator hands out the same address: what was written there before is gone."""
    first = block()
    first[8:16].copy_(version.tensors["q"])  # for nothing
    address = first.data_ptr()
    del first
    again = block()
    assert again.data_ptr() == address
    again[:8].copy_(version.tensors["q"])
    model.qkv.data.copy_(again[:16])


def kept_where_what_was_copied_on_had_been(model: Model, version: Checkpoint) -> None:
    first = block()
    first[:8].copy_(version.tensors["q"])
    model.qkv.data[:8].copy_(first[:8])
    address = first.data_ptr()
    del first
    model.derived = block()
    assert model.derived.data_ptr() == address
    model.derived[:8].copy_(version.tensors["q"])


def kept_beside_the_parameters(model: Model, version: Checkpoint) -> None:
    model.derived = torch.empty(8, HIDDEN, dtype=torch.bfloat16)
    model.derived.copy_(version.tensors["q"])
    model.qkv.data[:8].copy_(model.derived)


SHARED = torch.zeros(2 * HIDDEN, dtype=torch.bfloat16)


def kept_beside_a_parameter_in_its_memory(model: Model, version: Checkpoint) -> None:
    SHARED[:HIDDEN].copy_(version.tensors["norm"])
    SHARED[HIDDEN:].copy_(version.tensors["norm"])
    model.norm = nn.Parameter(SHARED[:HIDDEN], requires_grad=False)


def taken_unseen_from_memory_that_was_given_back(model: Model, version: Checkpoint) -> None:
    """As vLLM packs the linear layers of a CPU without AMX, and drops their weights."""
    weight = torch.empty(8, HIDDEN, dtype=torch.bfloat16)
    weight.copy_(version.tensors["q"])
    model.packed = ctypes.string_at(weight.data_ptr(), weight.nbytes)


KEPT = "1 tensors are loaded that are neither parameters nor buffers"
GONE = "1 tensors are loaded into memory that is gone, and nothing copied them on"


@pytest.mark.parametrize(
    ("beside", "why"),
    [
        (scaled, "aten.mul.Tensor computes with weights"),
        (scaled_afterwards, "aten.mul_.Tensor computes with weights"),
        (scaled_on_the_way, "aten.mul_.Tensor computes with weights"),
        (mixed_on_the_way, "something else is copied into weights"),
        (derived, "aten.clone.default computes with weights"),
        (read_as_a_number, "aten._local_scalar_dense.default computes with weights"),
        (filled_with_an_element, "aten.fill_.Tensor computes with weights"),
        (copied_from_elsewhere, "something else is copied into weights"),
        (kept_in_an_attribute, KEPT),
        (kept_beside_the_parameters, KEPT),
        (kept_beside_a_parameter_in_its_memory, KEPT),
        (kept_where_what_was_copied_on_had_been, KEPT),
        (taken_unseen_from_memory_that_was_given_back, GONE),
        (
            copied_from_memory_that_was_given_back_and_used_again,
            "qkv is not filled by copies alone",
        ),
        (transposed, "a block is written with gaps"),
        (copied_on_in_part, "a part of a block is copied on"),
        (rearranged, "a block is rearranged"),
        (cast_on_the_way, "a block is rearranged"),
        (copied_within, "something else is copied into weights"),
        (left_a_gap, "norm is not filled by copies alone"),
        (copied_as_bytes, "norm is not filled by copies alone"),
        (strided_alone, "a block is written with gaps"),
        (left_half, "o is not filled by copies alone"),
        (on_a_thread, "norm is not filled by copies alone"),
        (behind_torch, "parameters differ from what was copied into them"),
        (behind_a_constant, "parameters differ from what was copied into them"),
        (behind_another_constant, "parameters differ from what was copied into them"),
        (whole_in_inference_mode, "aten.contiguous.default computes with weights"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_load_that_is_more_than_copies_is_not_repeated(
    beside: Callable[[Model, Checkpoint], None], why: str, model: Model, version: Checkpoint
) -> None:
    version.memory.view(torch.bfloat16).normal_()  # no NaN, which an addition would leave alone

    def load() -> None:
        model.load(version)
        beside(model, version)

    assert learn(load, model, version.sources) == why


def move_a_parameter(model: Model) -> None:
    model.o = nn.Parameter(model.o.detach().clone(), requires_grad=False)


def move_a_buffer(model: Model) -> None:
    model.bias = model.bias.clone()


@pytest.mark.parametrize("move", [move_a_parameter, move_a_buffer])
def test_copies_do_not_fit_a_model_of_which_something_has_moved(
    move: Callable[[Model], None], model: Model, version: Checkpoint
) -> None:
    copies = learnt(lambda: model.load(version), model, version)
    move(model)
    assert not copies.fit(model)


def test_large_tensors_are_compared_piece_by_piece(model: Model, version: Checkpoint) -> None:
    three_rows = 3 * 2 * HIDDEN
    copies = learnt(lambda: model.load(version), model, version)
    for row in (0, ROWS - 1):
        kept = model.embedding.data[row].clone()
        model.embedding.data[row, 5] = 100.0
        assert differ(copies.pairs, three_rows)
        model.embedding.data[row] = kept
    assert not differ(copies.pairs, three_rows)


def test_tensors_at_odd_places_of_their_memory_are_compared_too() -> None:
    memory, kept = torch.arange(10).bfloat16(), torch.arange(10).bfloat16()
    for first in (0, 1, 4):
        ours, theirs = memory[first : first + 4], kept[:4] + first
        assert not differ([(ours, theirs), (ours, kept[first : first + 4])])
        assert differ([(ours, theirs + 1)])


def test_what_cannot_be_followed_ends_no_load(model: Model, version: Checkpoint) -> None:
    """A sparse tensor has no memory that could be watched."""

    def load() -> None:
        model.load(version)
        torch.eye(2).to_sparse().coalesce()

    why = learn(load, model, version.sources)
    assert isinstance(why, str)
    assert "cannot be followed" in why


def test_a_load_that_fails_is_no_load(model: Model, version: Checkpoint) -> None:
    def load() -> None:
        model.load(version)
        raise RuntimeError("planted")

    with pytest.raises(RuntimeError, match="planted"):
        learn(load, model, version.sources)
    learnt(lambda: model.load(version), model, version)
