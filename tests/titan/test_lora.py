"""[lora]: which layers get an adapter, what is trained, and that merged rows are the sum of the
whole matrices."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import dtype
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.rigs.ranks import run_ranks
from tests.sync.snapshot_ranks import build
from titan_grpo.config import LINEAR, Lora
from titan_grpo.errors import ConfigError
from titan_grpo.layout.peft import MergedRows
from titan_grpo.titan import jobconfig, lora
from titan_grpo.titan.tiny import Kind

JOB = ["--model.name=qwen3", "--model.flavor=grpo_tiny", "--rollout.servers=http://127.0.0.1:1"]
JOB += ["--training.seq_len=512"]


@pytest.mark.parametrize("kept", [torch.float32, torch.bfloat16])
def test_merged_rows_are_the_sum_in_float64_whichever_rows_are_asked_for(kept: dtype) -> None:
    torch.manual_seed(1)
    w, b, a = (torch.randn(shape).to(kept) for shape in ((37, 19), (37, 5), (5, 19)))
    wanted = w.double() + 2.4 * (b.double() @ a.double())
    merged = MergedRows(w, b, a, 2.4)
    for rows in (slice(0, 37, 1), slice(3, 30, 4), torch.tensor([36, 0, 7, 7])):
        torch.testing.assert_close(merged[rows], wanted[rows], rtol=1e-13, atol=1e-13)
        for wire in (torch.bfloat16, torch.float32):
            assert torch.equal(merged[rows].to(wire), wanted[rows].to(wire))


def test_a_layer_with_an_adapter_computes_what_its_merged_weight_does() -> None:
    torch.manual_seed(2)
    model, adapter = build("llama3")
    lora.put_on(model, adapter.to_hf, Lora(rank=3, alpha=7.0, targets=["k_proj"]))
    (_, layer), *_ = lora.adapted(model)
    with torch.no_grad():
        for p in layer.parameters():
            p.normal_()
    x = torch.randn(4, 96)
    merged = lora.merged_shards(model, {"layers.0.attention.wk.weight"})
    weight = merged["layers.0.attention.wk.weight"][:]
    torch.testing.assert_close(layer(x).double(), x.double() @ weight.T, rtol=1e-4, atol=1e-3)


def test_rows_of_other_lengths_need_no_other_graphs_of_a_tensor_parallel_layer() -> None:
    # torch ends a run at the ninth. Ranks that move no data: the sums are of no interest here.
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        model, adapter = build("llama3")
        lora.put_on(model, adapter.to_hf, Lora(rank=4, targets=["k_proj"]))
        (_, layer), *_ = lora.adapted(model)
        parallelize_module(layer, init_device_mesh("cpu", (2,)), ColwiseParallel())
        graphs: list[torch.fx.GraphModule] = []

        def keep(graph: torch.fx.GraphModule, _inputs: list[torch.Tensor]) -> object:
            graphs.append(graph)
            return graph.forward

        compiled = torch.compile(layer, backend=keep, fullgraph=True)

        def graphs_after(rows: int, length: int) -> int:
            compiled(torch.zeros(rows, length, 96, requires_grad=True))
            return len(graphs)

        for rows, length in ((5, 8), (8, 16), (6, 24), (11, 24)):
            few = graphs_after(rows, length)
        assert [graphs_after(*shape) for shape in ((4, 8), (16, 512), (64, 1024))] == [few] * 3
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("kind", ["llama3", "qwen3", "qwen3_untied"])
def test_every_linear_layer_of_a_block_gets_an_adapter_and_the_rest_none(kind: Kind) -> None:
    model, adapter = build(kind)
    names = lora.put_on(model, adapter.to_hf, Lora(rank=2))
    assert len(names) == len(LINEAR) * 2
    assert {name.rpartition(".")[2] for name in names} == set(LINEAR)
    before = {name for name, _ in build(kind)[0].named_parameters()}
    after = {name for name, _ in model.named_parameters()}
    assert {name for name in after if not lora.is_adapter(name)} == before


def test_the_experts_of_a_mixture_have_no_linear_layers() -> None:
    model, adapter = build("qwen3_moe")
    with pytest.raises(ConfigError, match=r"q_proj, v_proj; experts are none.*got 'gate_proj'"):
        lora.put_on(model, adapter.to_hf, Lora(rank=2))
    assert lora.put_on(model, adapter.to_hf, Lora(rank=2, targets=["q_proj"]))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--lora.rank=0"], "lora.rank must be 1 or greater with a section [lora], got 0"),
        (["--lora.alpha=8"], "lora.rank must be 1 or greater with a section [lora], got 0"),
        (["--lora.rank=-1"], "lora.rank must be 1 or greater, got -1"),
        (["--lora.rank=4", "--lora.alpha=0"], "lora.alpha must be greater than 0"),
        (
            ["--lora.rank=4", "--lora.targets=wq"],
            "lora.targets must name linear layers of the model (down_proj, gate_proj, k_proj,",
        ),
        (["--lora.rank=4", "--checkpoint.last-save-in-hf"], "checkpoint.last_save_in_hf must be"),
        (
            ["--lora.rank=4", "--checkpoint.enable", "--checkpoint.initial_load_path=x"],
            "checkpoint.initial_load_path must be Hugging Face files with [lora]",
        ),
        (
            ["--lora.rank=4", "--lora.sync=adapter", "--rollout.engine=sglang"],
            'lora.sync must be "merged" with SGLang servers',
        ),
        (
            ["--lora.rank=4", "--lora.sync=adapter", "--weight_sync.apply=streamed"],
            'weight_sync.apply must be "staged" with lora.sync',
        ),
        (
            ["--lora.rank=4", "--lora.sync=adapter", "--lora.targets=lm_head"],
            "lora.targets must be of q_proj,",
        ),
        (
            ["--lora.rank=513", "--lora.sync=adapter"],
            'lora.rank must be at most 512 with lora.sync = "adapter"',
        ),
        (
            ["--lora.rank=4", "--grpo.kl_beta=0.1", "--grpo.ref_model_ema=0.5"],
            "grpo.ref_model_ema must be 0 or 1 with [lora]",
        ),
    ],
)
def test_what_lora_cannot_run_with_is_refused_in_one_line(
    arguments: list[str], message: str
) -> None:
    with pytest.raises(ConfigError) as refusal:
        jobconfig.parse([*JOB, *arguments])
    assert str(refusal.value).startswith(message)
    assert "\n" not in str(refusal.value)


def test_a_job_without_the_section_has_no_adapters() -> None:
    assert jobconfig.parse(JOB).lora.rank == 0


@pytest.mark.e2e
@pytest.mark.parametrize("kind", ["llama3", pytest.param("qwen3", marks=pytest.mark.long)])
def test_sharded_ranks_make_the_bytes_of_the_merged_model_and_of_the_adapters(
    kind: str, tmp_path: Path
) -> None:
    outputs = run_ranks(Path(__file__).with_name("lora_rank.py"), 4, "4", kind, str(tmp_path))
    assert outputs[0].count("wrong []") == 4, outputs[0]
    drawn = [line.rpartition("drawn ")[2] for line in outputs[0].splitlines() if "drawn" in line]
    assert len(set(drawn)) == 1, "the start does not depend on how many ranks there are"
