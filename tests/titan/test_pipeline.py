"""A model cut into pipeline stages trains like a whole one, and each rank publishes its stage. So
do one that ranks share in other ways, and batches and models in other forms together, on both
torchtitans."""

import sys
from pathlib import Path

import pytest

from tests.rigs.titan_ranks import assert_alike, trained
from titan_grpo.titan.tiny import Kind

pytestmark = pytest.mark.e2e

TWO_STAGES = "--parallelism.pipeline_parallel_degree=2"


HSDP = "--parallelism.data_parallel_replicate_degree=2 --parallelism.data_parallel_shard_degree=2"

RECOMPUTED = "--activation_checkpoint.mode=selective --activation_checkpoint.selective_ac_option=op"
EXPERTS = "--parallelism.expert_parallel_degree=2"
Ways = dict[str, tuple[int, str]]
SHARED: dict[str, tuple[Kind, Ways]] = {
    "dense": (
        "llama3",
        {"TP": (2, "--parallelism.tensor_parallel_degree=2"), "stages": (2, TWO_STAGES)},
    ),
    "experts": ("qwen3_moe", {"EP": (2, EXPERTS)}),
}
OF_FOUR: dict[str, tuple[Kind, Ways]] = {
    "dense, four ranks": ("qwen3", {"HSDP": (4, HSDP)}),
    "experts, four ranks": (
        "qwen3_moe",
        {"HSDP": (4, HSDP), "experts that are sharded too": (4, f"{EXPERTS} {RECOMPUTED}")},
    ),
}
"""Each rank starts for 6 s of a core."""


@pytest.mark.parametrize(
    ("kind", "ways"),
    [
        *(pytest.param(*job, id=name) for name, job in SHARED.items()),
        *(pytest.param(*job, id=name, marks=pytest.mark.long) for name, job in OF_FOUR.items()),
    ],
)
def test_ranks_that_share_a_model_train_like_one_rank(
    tmp_path: Path, kind: Kind, ways: Ways
) -> None:
    jobs = [(way, ranks, 3, keys) for way, (ranks, keys) in ways.items()]
    found = trained(tmp_path, ("whole", 1, 3, ""), *jobs, kind=kind)
    for way in ways:
        assert_alike(found[way], found["whole"])
        assert found[way]["same_as_export"]
    if "stages" in ways:
        assert all(found["stages"]["writing"]), "each rank publishes its own stage"


@pytest.mark.long
def test_recomputed_and_compiled_layers_train_like_plain_ones(tmp_path: Path) -> None:
    keys = "--activation_checkpoint.mode=full --compile.enable --compile.components=model"
    found = trained(tmp_path, ("plain", 1, 1, ""), ("compiled", 1, 1, keys), kind="qwen3")
    assert_alike(found["compiled"], found["plain"])


@pytest.mark.long
def test_compiled_layers_may_get_every_kind_of_input(tmp_path: Path) -> None:
    # Rows alone and beside others, with gradients and without, a reference, and adapters.
    terms = "--lora.rank=4 --lora.targets=q_proj --grpo.kl_beta=0.05 --grpo.num_microbatches=2"
    terms += " --training.seq_len=24 --grpo.token_budget=24"
    keys = f"{terms} --compile.enable --compile.components=model --compile.backend=aot_eager"
    found = trained(tmp_path, ("plain", 1, 2, terms), ("compiled", 1, 2, keys), kind="llama3")
    assert_alike(found["compiled"], found["plain"])


@pytest.mark.long
def test_compiled_layers_that_ranks_share_train_like_plain_ones(tmp_path: Path) -> None:
    # Graphs alone, without inductor's code: it takes minutes.
    keys = "--compile.enable --compile.components=model --compile.backend=aot_eager"
    keys += " --parallelism.tensor_parallel_degree=2"
    ways = ("TP", 2, 2, keys), ("FSDP2 and TP", 4, 2, keys)
    found = trained(tmp_path, ("plain", 1, 2, ""), *ways, kind="llama3")
    for way in ("TP", "FSDP2 and TP"):
        assert_alike(found[way], found["plain"])


@pytest.mark.long
def test_compiled_layers_that_are_computed_again_by_ranks_train_like_plain_ones(
    tmp_path: Path,
) -> None:
    keys = "--compile.enable --compile.components=model --compile.backend=aot_eager"
    keys += " --parallelism.tensor_parallel_degree=2 --activation_checkpoint.mode="
    ways = ("full", 2, 1, f"{keys}full"), ("budget", 2, 1, f"{keys}memory_budget")
    found = trained(tmp_path, ("plain", 1, 1, ""), *ways, kind="llama3")
    for way in ("full", "budget"):
        assert_alike(found[way], found["plain"])


EVERYTHING = (
    "--grpo.kl_beta=0.05 --grpo.ref_model_ema=0.9 --grpo.num_microbatches=2 --grpo.fp32_lm_head"
    " --grpo.entropy_loss_weight=0.01 --grpo.top_entropy_share=0.5 --grpo.logit_loss_weight=0.01"
)
"""What needs the policy before the step, a reference or the whole distribution."""


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "ranks", "sharding", "terms"),
    [
        ("qwen3_untied", 4, "", EVERYTHING),
        ("qwen3_moe", 2, "", ""),
        ("qwen3_moe", 4, "expert_parallel_degree=2", ""),
        ("llama3", 2, "pipeline_parallel_schedule=Interleaved1F1B", ""),
        ("llama3", 2, "pipeline_parallel_schedule=GPipe", ""),
        ("llama3", 2, "pipeline_parallel_schedule=LoopedBFS", ""),
        ("llama3", 2, "pipeline_parallel_schedule=InterleavedZeroBubble", ""),
        ("llama3", 4, "tensor_parallel_degree=2", f"{EVERYTHING} --grpo.m2_threshold=0.01"),
    ],
    ids=[
        *("FSDP and every term", "MoE", "EP"),
        *("Interleaved1F1B", "GPipe", "LoopedBFS", "InterleavedZeroBubble", "TP"),
    ],
)
def test_stages_beside_other_ways_of_sharding_train_like_one_rank(
    tmp_path: Path, kind: Kind, ranks: int, sharding: str, terms: str
) -> None:
    more = f"{TWO_STAGES} {terms} {sharding and '--parallelism.' + sharding}"
    found = trained(tmp_path, ("whole", 1, 3, terms), ("stages", ranks, 3, more), kind=kind)
    assert_alike(found["stages"], found["whole"])
    assert found["stages"]["same_as_export"]
    assert all(found["stages"]["writing"])


@pytest.mark.long
def test_a_run_of_stages_that_stopped_goes_on_bit_for_bit(tmp_path: Path) -> None:
    straight = trained(tmp_path, ("straight", 2, 4, TWO_STAGES), ("halves", 2, 2, TWO_STAGES))[
        "straight"
    ]
    halves = trained(tmp_path, ("halves", 2, 4, TWO_STAGES))["halves"]
    assert halves["said"] == straight["said"][2:]
    assert halves["digest"] == straight["digest"]


REPLAY, LORA, PACKED = "--grpo.router_replay", "--lora.rank=4", "--grpo.pack_sequences"
TOGETHER = {
    "replay, EP": ("qwen3_moe", REPLAY, "--parallelism.expert_parallel_degree=2"),
    "replay, packed": ("qwen3_moe", REPLAY, PACKED),
    "LoRA and replay, EP and packed": (
        "qwen3_moe",
        f"{LORA} --lora.targets=q_proj,v_proj {REPLAY}",
        f"{PACKED} --parallelism.expert_parallel_degree=2",
    ),
    "LoRA, TP": ("llama3", LORA, "--parallelism.tensor_parallel_degree=2"),
    "LoRA, packed": ("llama3", LORA, PACKED),
}


@pytest.mark.long
@pytest.mark.parametrize("job", TOGETHER.values(), ids=TOGETHER)
@pytest.mark.parametrize("version", ["0.2.2", "0.3"])
def test_what_may_be_combined_trains_like_one_rank_that_pads(
    tmp_path: Path, root: Path, job: tuple[Kind, str, str], version: str
) -> None:
    python = sys.executable
    if version == "0.3":
        python = str(root / ".venv-titan03/bin/python")
        if not Path(python).exists():
            pytest.skip("no environment with torchtitan 0.3: scripts/setup.sh --torchtitan 0.3")
    kind, both, more = job
    # One micro-batch, so that it has the sequences of any other's first.
    whole = f"{both} --grpo.token_budget=4096"
    found = trained(
        tmp_path,
        ("whole", 1, 2, whole),
        ("split", 2, 2, f"{both} {more}"),
        kind=kind,
        python=python,
    )
    assert_alike(found["split"], found["whole"])
    if REPLAY in both:
        assert found["split"]["said"][0]["values"]["routes_differ"] > 0
    assert found["split"]["same_as_export"]
