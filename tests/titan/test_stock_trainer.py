"""torchtitan's own trainer with our patches, on CPU ranks over gloo."""

from collections.abc import Callable

import pytest

from tests.titan.conftest import StockRun
from titan_grpo.titan.tiny import Kind

pytestmark = pytest.mark.e2e

# A rank imports torchtitan for ten seconds of a core, so the runs without ``long`` are those that
# show most: four ranks that shard and replicate, experts over ranks, and tensors over ranks.

LEARNS_BELOW = 4.2
"""Random tokens of 16 out of 128 words: the loss starts near ln 128 = 4.85 and falls towards ln 16
= 2.77."""


@pytest.mark.long
@pytest.mark.parametrize("kind", ["llama3", "qwen3_untied", "qwen3_moe"])
def test_the_stock_trainer_learns_on_two_ranks(stock: Callable[..., StockRun], kind: Kind) -> None:
    run = stock(kind, 2)
    assert run.returncode == 0, run.log[-20000:]
    assert len(run.losses) == 3
    assert run.losses[0] == pytest.approx(4.85, abs=0.15)
    assert run.losses[-1] < LEARNS_BELOW


@pytest.mark.parametrize(
    ("ranks", "arguments"),
    [
        pytest.param(1, (), id="one rank", marks=pytest.mark.long),
        pytest.param(
            2,
            ("--activation_checkpoint.mode=full", "--compile.enable", "--compile.components=model"),
            id="activation checkpointing and compile",
            marks=pytest.mark.long,
        ),
        pytest.param(
            4,
            (
                "--parallelism.data_parallel_replicate_degree=2",
                "--parallelism.data_parallel_shard_degree=2",
            ),
            id="HSDP",
        ),
    ],
)
def test_losses_and_gradients_do_not_depend_on_how_the_model_is_split(
    stock: Callable[..., StockRun], ranks: int, arguments: tuple[str, ...]
) -> None:
    run = stock("qwen3", ranks, *arguments)
    assert run.returncode == 0, run.log[-20000:]
    # Made by two FSDP ranks on the same rows and weights.
    assert run.losses == pytest.approx((4.787126, 4.421617, 3.832816), abs=2e-3)
    assert run.norms == pytest.approx((4.638714, 4.278379, 2.132652), rel=5e-3)


def test_expert_parallel_ranks_train_like_sharded_ones(stock: Callable[..., StockRun]) -> None:
    run = stock("qwen3_moe", 2, "--parallelism.expert_parallel_degree=2")
    assert run.returncode == 0, run.log[-20000:]
    # Made by two FSDP ranks without expert parallelism.
    assert run.losses == pytest.approx((4.866627, 4.398954, 3.846181), abs=2e-3)
    assert run.norms == pytest.approx((4.424476, 4.027486, 2.263861), rel=5e-3)


def test_tensor_parallel_llama3_trains(stock: Callable[..., StockRun]) -> None:
    run = stock("llama3", 2, "--parallelism.tensor_parallel_degree=2")
    assert run.returncode == 0, run.log[-20000:]
    assert run.losses[-1] < LEARNS_BELOW


@pytest.mark.long
@pytest.mark.parametrize(
    ("skip", "kind", "ranks", "complaint"),
    [
        ("premul", "qwen3", 2, "Cannot use ReduceOp.PREMUL_SUM with Gloo"),
        ("tied", "qwen3", 2, "is shared with a parameter already managed by another FSDP group"),
        ("histc", "qwen3_moe", 1, '"histogram_cpu" not implemented for'),
    ],
)
def test_without_the_patch_torchtitan_fails_as_the_patch_says(
    stock: Callable[..., StockRun], skip: str, kind: Kind, ranks: int, complaint: str
) -> None:
    run = stock(kind, ranks, skip=skip)
    assert run.returncode != 0
    assert complaint in run.log
