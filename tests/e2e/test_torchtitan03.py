"""The trainer on torchtitan 0.3, in the environment that scripts/setup.sh --torchtitan 0.3 makes;
without it these tests are skipped."""

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from scripts.common import RECIPE
from tests.e2e.conftest import Runs
from tests.rigs.sockets import free_port
from tests.rigs.titan_ranks import assert_alike, trained
from titan_grpo.titan.tiny import Kind, write_tiny_model

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]


@pytest.fixture(scope="session")
def python03(root: Path) -> str:
    python = root / ".venv-titan03/bin/python"
    if not python.exists():
        pytest.skip("no environment with torchtitan 0.3: scripts/setup.sh --torchtitan 0.3")
    return str(python)


@pytest.fixture(scope="session")
def ask(root: Path, python03: str) -> Callable[[Path, str], Any]:
    """``ask(folder, code)``: the JSON that Python code with torchtitan 0.3 prints last."""

    def run(folder: Path, code: str) -> Any:
        paths = f"{root}{os.pathsep}{os.environ['PYTHONPATH']}"
        env = {**os.environ, "PYTHONPATH": paths, "CUDA_VISIBLE_DEVICES": ""}
        done = subprocess.run(
            [python03, "-c", code], cwd=folder, env=env, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr[-4000:]
        return json.loads(done.stdout.splitlines()[-1])

    return run


QUICK = Path("titan_grpo/titan/recipes/quickstart_cpu.toml").resolve()

REFUSED = {
    "--parallelism.expert_tensor_parallel_degree=2": "parallelism.expert_tensor_parallel_degree",
    "--parallelism.enable_async_tensor_parallel": "parallelism.enable_async_tensor_parallel",
    "--grpo.ptx_mixin_batchsize=32": "grpo.ptx_mixin_batchsize",
    "--activation_checkpoint.mode=memory_budget": "activation_checkpoint.mode",
    "--model.name=deepseek_v3": "model.name",
    "--parallelism.pipeline_parallel_degree=2 --model.flavor=grpo_tiny_untied": (
        "parallelism.pipeline_parallel_degree"
    ),
    "--model.flavor=grpo_tiny_moe --parallelism.tensor_parallel_degree=2": (
        "parallelism.expert_parallel_degree must be greater than 1 where grpo_tiny_moe has experts"
    ),
    "--model.flavor=grpo_tiny_moe --parallelism.tensor_parallel_degree=2"
    " --parallelism.expert_parallel_degree=2 --compile.enable --compile.components=model": (
        "compile.enable must be false, or compile.components without model, where grpo_tiny_moe"
    ),
    "--training.seq_len=1048576": "training.seq_len must be at most",
    "--parallelism.context_parallel_load_balancer=": "load_balancer cannot be an empty string",
}
"""What 0.3 does not take -> words of the message."""

FOUND = f"""
import json
import os
from math import prod
import torch
from titan_grpo.titan import compat
compat.prepare()
from titan_grpo.errors import ConfigError
from titan_grpo.layout.infer import infer_layout
from titan_grpo.titan import upstream03
from titan_grpo.titan.jobconfig import parse
from titan_grpo.titan.jobfile import JobConfig
parts = {{}}
pairs = (("qwen3", "grpo_tiny"), ("qwen3", "grpo_tiny_untied"), ("llama3", "grpo_tiny"))
for name, flavor in pairs:
    spec = upstream03.get_spec(name)
    args = spec.model_args[flavor]
    model = spec.model_cls(args)
    torch.manual_seed(0)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)
    to_hf = spec.state_dict_adapter(args, None).to_hf
    parameters = dict(model.named_parameters())
    layout = infer_layout(to_hf, {{n: p.shape for n, p in parameters.items()}}, upstream03.TIED)
    upstream = spec.state_dict_adapter(args, None).to_hf(model.state_dict())
    ours = {{t.name: parameters[t.fqn].flatten(0, -2)[t.row_ids()].reshape(t.shape)
             if parameters[t.fqn].ndim > 1 else parameters[t.fqn][t.row_ids()]
             for t in layout.tensors}}
    parts[f"{{name}}/{{flavor}}"] = {{
        "fused": sum(upstream03.FUSED in fqn for fqn in parameters),
        "parameters": sum(p.numel() for p in parameters.values()),
        "exported": sum(prod(t.shape) for t in layout.tensors),
        "equal": ours.keys() == upstream.keys()
        and all(torch.equal(ours[n], upstream[n]) for n in ours),
    }}
kinds = {{type(each.attention.inner_attention).__qualname__
         for each in upstream03.get_spec("qwen3").model_args["0.6B"].config.layers}}
made = upstream03.translated(JobConfig())
said = []
for option in {REFUSED!r}:
    try:
        parse(["--job.config_file", {str(QUICK)!r}, *option.split()])
        said.append("")
    except ConfigError as error:
        said.append(str(error))
start = parse(["--job.config_file", {str(QUICK)!r}, "--checkpoint.initial_load_path=model"])
start = upstream03.translated(start)["checkpoint"].initial_load_path == os.path.abspath("model")
graphs, backend = made["training"].disable_cuda_graphs, made["parallelism"].spmd_backend
print(json.dumps([parts, [sorted(kinds), graphs, backend], said, start]))
"""


@pytest.fixture(scope="module")
def found(ask: Callable[[Path, str], Any], tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Answers of one process: its imports take most of the time."""
    return ask(tmp_path_factory.mktemp("found"), FOUND)


def test_every_element_of_a_fused_projection_reaches_the_servers(found: Any) -> None:
    assert len(found[0]) == 3
    for each in found[0].values():
        assert each["fused"] == 2, "0.3 fuses q, k and v of each layer"
        assert each["parameters"] == each["exported"] > 500_000
        assert each["equal"], "as upstream's own state dict splits them"


def test_attention_is_plain_causal_attention_and_cuda_graphs_are_off(found: Any) -> None:
    # Not 0.3's spmd types, with which tensor parallel weights are plain tensors that hold a part.
    assert found[1] == [["ScaledDotProductAttention.Config"], True, "partial_dtensor"]


@pytest.mark.parametrize("option", REFUSED)
def test_what_03_cannot_run_is_refused_by_its_name_in_one_line(found: Any, option: str) -> None:
    text = found[2][list(REFUSED).index(option)]
    assert REFUSED[option] in text
    assert "0.3" in text
    assert "\n" not in text


def test_a_relative_path_of_first_weights_is_one_of_the_folder_that_the_run_starts_in(
    found: Any,
) -> None:
    assert found[3]


@pytest.mark.long
def test_a_trainer_on_03_fences_each_optimizer_step_counts_tokens_once_and_saves_its_job(
    ask: Callable[[Path, str], Any], tmp_path: Path
) -> None:
    write_tiny_model("qwen3", tmp_path / "model", seed=1)
    arguments = [
        f"--job.config_file={QUICK}",
        f"--model.hf_assets_path={tmp_path / 'model'}",
        f"--job.dump_folder={tmp_path / 'run'}",
        "--checkpoint.no-enable",
        "--checkpoint.no-initial_load_in_hf",
        "--grpo.num_microbatches=2",
        "--job.save_config_file=job.json",
    ]
    rank = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    rank["MASTER_PORT"] = str(free_port())
    found = ask(
        tmp_path,
        f"""
import json, os
os.environ |= {rank}
from tests.titan.pipeline_rank import train_to
from titan_grpo.sync.publisher import Publisher
from titan_grpo.titan.jobconfig import parse
from titan_grpo.titan.trainer import GRPOTrainer
trainer = GRPOTrainer(parse({arguments}, 1))
trainer.controller = None
order = []
fence, step = Publisher.fence, trainer.optimizers.step
Publisher.fence = lambda publisher: (order.append("fence"), fence(publisher))
trainer.optimizers.step = lambda: (order.append("step"), step())
train_to(trainer, 2)
trainer.close()
counted = trainer.ntokens_seen / trainer.metrics_processor.ntokens_since_last_log
print(json.dumps([order, os.path.exists("run/checkpoint"), counted]))
""",
    )
    assert found[:2] == [["fence", "step"] * 4, False]
    assert found[2] == 1, "a token is seen once per step, in however many passes"
    assert json.loads((tmp_path / "run/job.json").read_text())["grpo"]["num_microbatches"] == 2


@pytest.mark.long
def test_the_learning_rate_of_a_resumed_run_is_the_one_that_its_step_takes(
    ask: Callable[[Path, str], Any], tmp_path: Path
) -> None:
    write_tiny_model("qwen3", tmp_path / "model", seed=1)
    keys = [f"--model.hf_assets_path={tmp_path / 'model'}", f"--job.dump_folder={tmp_path}/run"]
    rates = []
    for steps, rate in ((1, 1e-3), (2, 5e-3)):
        port, arguments = str(free_port()), [*keys, f"--optimizer.lr={rate}"]
        code = f"""
import json
from tests.titan.pipeline_rank import job_of, train_to
from titan_grpo.titan.trainer import GRPOTrainer
trainer = GRPOTrainer(job_of(0, 1, {port!r}, *{arguments}))
trainer.controller = None
trainer.checkpointer.load(-1)
said, taken, step = trainer.learning_rate(), [], trainer.optimizers.step
adam = trainer.optimizers.optimizers[0]
trainer.optimizers.step = lambda: (taken.append(adam.param_groups[0]["lr"]), step())
train_to(trainer, {steps})
trainer.close()
print(json.dumps([said, *taken]))
"""
        rates.append(ask(QUICK.parents[3], code))
    assert rates == [[5e-4, 5e-4], [5e-3, 5e-3]]


TP = "--parallelism.tensor_parallel_degree=2"

SPLIT: dict[str, tuple[Kind, int, str, str]] = {
    "FSDP2": ("qwen3", 2, "", ""),
    "HSDP": (
        "qwen3",
        4,
        "--parallelism.data_parallel_replicate_degree=2 --parallelism.data_parallel_shard_degree=2",
        "",
    ),
    "TP, head in float32": (
        "llama3",
        2,
        f"{TP} --grpo.fp32_lm_head",
        "",
    ),
    "EP": ("qwen3_moe", 2, "--parallelism.expert_parallel_degree=2", ""),
    "LoRA": ("qwen3", 2, "--lora.rank=4", ""),
    "LoRA, FSDP2 and TP": ("llama3", 4, f"--lora.rank=4 {TP}", ""),
    "qwen3, TP": ("qwen3", 2, "", TP),
    "MoE, TP and EP, router replay": (
        "qwen3_moe",
        2,
        "--grpo.router_replay",
        f"{TP} --parallelism.expert_parallel_degree=2",
    ),
}
"""(model, ranks, keys, keys that 0.2.2 cannot run on a CPU: it has one rank without them)."""


@pytest.mark.long
@pytest.mark.parametrize("job", SPLIT.values(), ids=SPLIT)
def test_ranks_train_the_same_on_both_torchtitans_and_on_03_also_resumed(
    tmp_path: Path, python03: str, job: tuple[Kind, int, str, str]
) -> None:
    kind, ranks, keys, more = job
    (older,) = trained(tmp_path, ("older", 1 if more else ranks, 2, keys), kind=kind).values()
    keys = f"{keys} {more}"
    both = ("whole", ranks, 4, keys), ("parts", ranks, 2, keys)
    whole, first = trained(tmp_path, *both, kind=kind, python=python03).values()
    assert_alike(first, older)
    for each in (older, whole, first):
        assert each["elements"] == each["in_image"]
        assert each["same_as_export"], "the image is what the checkpoint exports"
        assert each["adapters_alone_trained"] == ("--lora.rank=4" in keys)
    (second,) = trained(tmp_path, ("parts", ranks, 4, keys), kind=kind, python=python03).values()
    assert [*first["said"], *second["said"]] == whole["said"]
    assert second["digest"] == whole["digest"] != first["digest"]


OF_BOTH = ("test_modules", "test_recipes")
"""Tests of tests/titan that hold with either torchtitan."""


@pytest.mark.long
@pytest.mark.parametrize("name", OF_BOTH)
def test_models_of_03_pass_the_tests_of_022s(root: Path, python03: str, name: str) -> None:
    paths = f"{root}{os.pathsep}{os.environ['PYTHONPATH']}"
    env = {**os.environ, "PYTHONPATH": paths, "CUDA_VISIBLE_DEVICES": ""}
    words = [python03, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"tests/titan/{name}.py"]
    done = subprocess.run(words, cwd=root, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:]


STEPS = 12


def run_script(root: Path, *words: str) -> str:
    """What a script says with torchtitan 0.3, which must succeed."""
    said = subprocess.run(
        [f"scripts/{words[0]}", "--torchtitan", "0.3", *words[1:]],
        cwd=root,
        capture_output=True,
        text=True,
        timeout=580,
    )
    assert said.returncode == 0, said.stdout[-3000:] + said.stderr[-3000:]
    return said.stdout


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.usefixtures("vllm_python", "sglang_python")
@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_the_quickstart_learns_on_03_and_exports_what_the_server_had(
    engine: str, root: Path, runs: Runs, python03: str, tmp_path: Path
) -> None:
    out, exported = tmp_path / "run", tmp_path / "exported"
    words = ("--engine", engine, "--steps", str(STEPS), "--out", str(out))
    run_script(root, "quickstart.sh", *words)
    summary = runs.summary(out)
    print({key: summary[key] for key in ("reward_first", "reward_last", "logprob_gap_on_policy")})
    assert (summary["steps"], summary["digest_mismatches"]) == (STEPS, 0)
    assert summary["reward_last"] > 2 * summary["reward_first"]
    assert [each["last"] for each in summary["versions_committed"].values()] == [STEPS]
    assert summary["logprob_gap_on_policy"]["mean"] <= 0.01
    job = [f"--job.config_file={RECIPE}", f"--job.dump_folder={out}"]
    job += [f"--model.hf_assets_path={out / 'model'}"]
    command = [python03, "-m", "titan_grpo.cli", "export", f"--version={STEPS}", *job]
    done = subprocess.run([*command, f"--out={exported}"], cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    served, written = runs.weights(out / "hf"), runs.weights(exported)
    assert served.keys() == written.keys()
    assert all(torch.equal(served[name], written[name]) for name in served)


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.usefixtures("vllm_python", "python03")
def test_a_server_is_shown_to_serve_the_very_weights_of_ranks_on_03(
    root: Path, tmp_path: Path
) -> None:
    found = tmp_path / "result.json"
    words = ["--device=cpu", "--steps=4", f"--json={found}", f"--out={tmp_path / 'run'}"]
    said = run_script(root, "verify_grpo_2gpu.sh", *words)
    result = json.loads(found.read_text())
    assert result["passed"], said
    assert result["violations"] == []
    assert len({run["final_digest"] for run in result["runs"]}) == 1
