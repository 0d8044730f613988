"""Learning a layout through to_hf: what it finds, and what it refuses by name."""

from collections.abc import Callable

import pytest
import torch

from titan_grpo.errors import ConfigError
from titan_grpo.layout.infer import infer_layout, strip_prefixes

State = dict[str, torch.Tensor]


def each(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[State], State]:
    """An adapter that renames every parameter and applies ``change``."""
    return lambda state: {f"hf.{fqn}": change(value) for fqn, value in state.items()}


def test_rows_that_keep_their_order_are_a_range() -> None:
    layout = infer_layout(each(lambda t: t), {"w": (6, 4), "b": (5,), "s": ()})
    assert [(t.name, t.shape, t.rows) for t in layout.tensors] == [
        ("hf.w", (6, 4), range(6)),
        ("hf.b", (5,), range(5)),
        ("hf.s", (), range(1)),
    ]


def test_permuted_rows_are_a_list() -> None:
    layout = infer_layout(each(lambda t: t[torch.tensor([2, 0, 1])]), {"w": (3, 4)})
    (tensor,) = layout.tensors
    assert tensor.row_ids().tolist() == [2, 0, 1]


def test_every_other_row_is_a_range_with_a_step() -> None:
    layout = infer_layout(lambda s: {"even": s["w"][::2], "odd": s["w"][1::2]}, {"w": (6, 4)})
    assert [t.rows for t in layout.tensors] == [range(0, 5, 2), range(1, 6, 2)]


def test_stacked_experts_become_one_tensor_each() -> None:
    layout = infer_layout(
        lambda s: {f"e{i}": part.squeeze(0) for i, part in enumerate(s["w"].split(1))},
        {"w": (3, 2, 5)},
    )
    assert [(t.name, t.shape, t.rows) for t in layout.tensors] == [
        ("e0", (2, 5), range(2)),
        ("e1", (2, 5), range(2, 4)),
        ("e2", (2, 5), range(4, 6)),
    ]


def test_a_reshape_that_keeps_rows_whole_is_followed() -> None:
    layout = infer_layout(each(lambda t: t.reshape(2, 3, 4)), {"w": (6, 4)})
    assert layout.tensors[0].shape == (2, 3, 4)
    assert layout.tensors[0].rows == range(6)


def test_a_big_embedding_is_probed_without_its_memory() -> None:
    layout = infer_layout(each(lambda t: t), {"embedding": (4_000_000, 1_000_000)})
    assert layout.tensors[0].rows == range(4_000_000)


def test_a_lost_parameter_is_named_unless_it_is_tied() -> None:
    def drop_output(state: State) -> State:
        return {k: v for k, v in state.items() if k != "output.weight"}

    shapes = {"w": (2, 2), "output.weight": (2, 2)}
    with pytest.raises(ConfigError, match=r"output\.weight becomes none"):
        infer_layout(drop_output, shapes)
    layout = infer_layout(drop_output, shapes, tied={"output.weight"})
    assert layout.by_fqn["output.weight"] == []
    with pytest.raises(ConfigError, match=r"output\.weight becomes none"):
        infer_layout(drop_output, shapes, tied={"w"})


def test_a_wrapper_prefix_is_never_lost_in_silence() -> None:
    def knows_its_names(state: State) -> State:
        return {f"hf.{k}": v for k, v in state.items() if k == "layers.0.w"}

    wrapped = "layers.0._checkpoint_wrapped_module._orig_mod.w"
    with pytest.raises(ConfigError, match="strip wrapper prefixes"):
        infer_layout(knows_its_names, {wrapped: (2, 2)})
    assert (
        infer_layout(knows_its_names, {strip_prefixes(wrapped): (2, 2)}).tensors[0].name
        == "hf.layers.0.w"
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.t().contiguous(), "keep the columns of w in place"),
        (lambda t: t.flip(1), "keep the columns of w in place"),
        (lambda t: t[:2], "each of the 3 rows of w .* got 2 rows"),
        (lambda t: t[:0], "each of the 3 rows of w .* got 0 rows"),
        (lambda t: torch.cat([t, t[:1]]), "each of the 3 rows of w .* got 4 rows"),
        (lambda t: t + 1, "keep the columns of w in place|each of the 3 rows"),
        (lambda t: t.float(), r"got torch\.float32"),
        (lambda t: torch.cat([t[:, :2], t.roll(1, 0)[:, 2:]], 1), "keep the columns of w in place"),
        (lambda t: t[:, :2].contiguous(), r"whole rows of w \(3 columns\)|columns of w"),
    ],
)
def test_an_adapter_that_does_more_than_move_rows_is_refused(
    change: Callable[[torch.Tensor], torch.Tensor], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        infer_layout(each(change), {"w": (3, 3)})


def test_an_adapter_that_raises_is_named_with_its_parameter() -> None:
    with pytest.raises(
        ConfigError, match=r"must convert other \(2, 2\) on its own, it raised KeyError"
    ):
        infer_layout(lambda s: {"hf": s["w"]}, {"other": (2, 2)})


@pytest.mark.parametrize("shape", [(0, 4), (4, 0), (0,), (2, 0, 3)])
def test_a_parameter_without_elements_is_named(shape: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match="every dimension of empty must be 1 or greater"):
        infer_layout(dict, {"w": (2, 2), "empty": shape})


def test_two_parameters_with_one_hf_name_are_refused() -> None:
    with pytest.raises(
        ConfigError, match="HF tensor same must come from one parameter, got a and b"
    ):
        infer_layout(lambda s: {"same": next(iter(s.values()))}, {"a": (2, 2), "b": (2, 2)})


def test_the_manifest_keeps_the_adapters_order_and_the_dtypes_asked_for() -> None:
    layout = infer_layout(each(lambda t: t), {"w": (2, 2), "bias": (3,)})
    manifest = layout.manifest("bfloat16", 4096, keep_dtype={"bias": "float32"})
    assert [(t.name, t.dtype) for t in manifest.tensors] == [
        ("hf.w", "bfloat16"),
        ("hf.bias", "float32"),
    ]
