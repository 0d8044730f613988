"""What of [parallelism] is refused in one line: degrees, stages and experts that do not come out,
at which torchtitan would stop every rank with a traceback. Rows fit the degrees that are let in."""

from contextlib import nullcontext

import pytest

from tests.rigs.jobs import job
from tests.titan.conftest import Parse
from titan_grpo.algorithm.balance import TokenCost
from titan_grpo.errors import ConfigError
from titan_grpo.titan import compat

compat.prepare()

from titan_grpo.titan.data import batch_options  # noqa: E402 - torchtitan after its preparation

UNTIED = "--model.flavor=grpo_tiny_untied"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            "--parallelism.pipeline_parallel_degree=2",
            "model.flavor must be one whose embeddings are not tied with pipeline parallelism",
        ),
        (
            "--parallelism.pipeline_parallel_degree=2 --grpo.pack_sequences",
            "grpo.pack_sequences must be false with parallelism.pipeline_parallel_degree > 1",
        ),
        (
            "--parallelism.pipeline_parallel_degree=2 --lora.rank=4",
            "lora.rank must be 0 with parallelism.pipeline_parallel_degree > 1",
        ),
        (
            "--parallelism.pipeline_parallel_degree=2 --grpo.router_replay",
            "grpo.router_replay must be false with parallelism.pipeline_parallel_degree > 1",
        ),
        (
            "--parallelism.pipeline_parallel_degree=2 --grpo.ptx_mixin_batchsize=8",
            "grpo.ptx_mixin_batchsize must be 0 with parallelism.pipeline_parallel_degree > 1",
        ),
        (
            "--parallelism.pipeline_parallel_degree=2"
            " --parallelism.pipeline_parallel_schedule_csv=x.csv",
            "pipeline_parallel_schedule_csv must be empty with .*steps have different ones",
        ),
        (
            "--parallelism.pipeline_parallel_degree=2"
            " --parallelism.pipeline_parallel_microbatch_size=2",
            "pipeline_parallel_microbatch_size must be 1 with .*grpo.token_budget says",
        ),
        (
            "--parallelism.pipeline_parallel_degree=2"
            " --parallelism.pipeline_parallel_schedule=1F2B",
            "pipeline_parallel_schedule must be one of 1F1B, .*, got '1F2B'",
        ),
        (
            f"{UNTIED} --parallelism.pipeline_parallel_degree=8",
            "pipeline_parallel_degree must be one that leaves each stage enough .* 8 stages of 2",
        ),
        (
            f"{UNTIED} --parallelism.pipeline_parallel_degree=2"
            " --parallelism.pipeline_parallel_schedule=Interleaved1F1B"
            " --parallelism.pipeline_parallel_first_stage_less_layers=2",
            "must be one that leaves each stage enough .* 4 stages of 2 layers, and 2 and 1",
        ),
        (
            f"{UNTIED} --parallelism.pipeline_parallel_degree=2"
            " --parallelism.pipeline_parallel_layers_per_stage=1",
            "layers_per_stage must make one stage for each of the 2 ranks with 1F1B",
        ),
        (
            f"{UNTIED} --parallelism.pipeline_parallel_degree=2"
            " --parallelism.pipeline_parallel_layers_per_stage=0",
            "layers_per_stage must make one stage for each of the 2 ranks .* got 0",
        ),
        ("--parallelism.expert_parallel_degree=0", "expert_parallel_degree must be 1 or more"),
        (
            "--model.flavor=grpo_tiny_moe --parallelism.expert_parallel_degree=3",
            "expert_parallel_degree must be a divisor of the experts of a layer \\(8 with",
        ),
        (
            "--parallelism.expert_tensor_parallel_degree=2",
            "expert_tensor_parallel_degree must be 1 or that of .*tensor_parallel_degree \\(1;",
        ),
        (
            "--model.name=llama3 --parallelism.tensor_parallel_degree=2 --lora.rank=1",
            "lora.rank must be at least parallelism.tensor_parallel_degree \\(2; .* got 1",
        ),
        ("--training.seq_len=65", "training.seq_len must be a multiple of 2, twice .*, got 65"),
        (
            "--training.seq_len=66 --parallelism.tensor_parallel_degree=2",
            "training.seq_len must be a multiple of 4, twice .*, got 66",
        ),
        (
            "--model.name=llama3 --parallelism.tensor_parallel_degree=4",
            "tensor_parallel_degree must be a divisor of the 2 key-value heads of 'grpo_tiny'",
        ),
        (
            "--model.name=deepseek_v3 --model.flavor=debugmodel --training.seq_len=66"
            " --parallelism.tensor_parallel_degree=3",
            "tensor_parallel_degree must be a divisor of the 16 key-value heads of 'debugmodel'",
        ),
        (
            "--model.name=deepseek_v3 --model.flavor=debugmodel --training.seq_len=64"
            " --parallelism.tensor_parallel_degree=2 --compile.enable",
            "compile.enable must be false for deepseek_v3 with .*tensor_parallel_degree > 1",
        ),
        ("--grpo.router_replay", "grpo.router_replay must be false with a model without experts"),
        (
            "--parallelism.context_parallel_degree=2",
            "context_parallel_degree must be 1 .* titan/optimizer_step.py makes a batch,"
            " Stepper._batch, and where algorithm/loss.py sums",
        ),
    ],
)
def test_a_broken_rule_is_refused_in_one_line(parse: Parse, arguments: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        parse("", *arguments.split())
    assert "\n" not in str(caught.value)


def test_one_row_of_an_adapter_for_each_tensor_parallel_rank_is_enough(parse: Parse) -> None:
    split = "--parallelism.tensor_parallel_degree=2"
    assert parse("", "--model.name=llama3", split, "--lora.rank=2").lora.rank == 2


@pytest.mark.parametrize(
    ("first", "last", "refused"),
    [
        ('"layers.0"', '"layers.1"', False),
        ('"layers.0", "layers.1"', '"layers.1"', True),
        ('"layers.1"', '"layers.0"', True),
        ('"layers.0"', '"layers.1", "norm"', True),
    ],
)
def test_stages_that_compute_another_model_than_the_servers_are_refused(
    parse: Parse, first: str, last: str, refused: bool
) -> None:
    """Before, a layer of two stages was two layers, of which servers got one."""
    parts = f'[["tok_embeddings", {first}], [{last}, "norm", "output"]]'
    keys = f"pipeline_parallel_degree = 2\nmodule_fqns_per_model_part = {parts}"
    expected = (
        pytest.raises(ConfigError, match="name each module once") if refused else nullcontext()
    )
    with expected:
        parse(f"[parallelism]\n{keys}", UNTIED)


@pytest.mark.parametrize(
    ("ranks", "stages"),
    [
        (4, ""),
        (2, "--parallelism.pipeline_parallel_schedule=LoopedBFS"),
        (2, "--parallelism.pipeline_parallel_layers_per_stage=2"),
    ],
)
def test_stages_that_come_out_are_let_in(parse: Parse, ranks: int, stages: str) -> None:
    degree = f"--parallelism.pipeline_parallel_degree={ranks}"
    assert parse("", UNTIED, degree, *stages.split())


@pytest.mark.parametrize(
    ("arguments", "ranks", "message"),
    [
        (("--parallelism.data_parallel_replicate_degree=2",), 2, "they come out 2 times too small"),
        (("--parallelism.data_parallel_replicate_degree=2",), 3, "number of ranks"),
        (("--parallelism.data_parallel_shard_degree=2",), 4, "number of ranks"),
        (("--parallelism.data_parallel_replicate_degree=2",), 4, ""),
        (
            ("--parallelism.expert_parallel_degree=4",),
            2,
            r"shares? a layer's weights.*\(2\), got 4",
        ),
        (("--parallelism.expert_parallel_degree=2",), 2, ""),
        ((), 1, ""),
    ],
)
def test_parallel_degrees_are_checked_against_the_number_of_ranks(
    parse: Parse, arguments: tuple[str, ...], ranks: int, message: str
) -> None:
    if not message:
        assert parse("", *arguments, world_size=ranks)
        return
    with pytest.raises(ConfigError, match=message):
        parse("", *arguments, world_size=ranks)


@pytest.mark.parametrize("degree", [1, 3, 8, 16])
def test_the_ranks_that_share_a_row_get_equal_parts_of_it(degree: int) -> None:
    split = {"tensor_parallel_degree": degree}
    config = job(parallelism=split, training={"seq_len": 96, "local_batch_size": 1})
    layout = batch_options(config, TokenCost(), 126).layout
    lengths = {layout.shape([length])[1] for length in range(1, 97)}
    assert [length for length in lengths if length % degree or length % 8] == []
    assert max(lengths) == 96
