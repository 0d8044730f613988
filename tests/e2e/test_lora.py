"""Adapters. Merged on the trainer: a real server serves them, the base stays as it was, and a
checkpoint goes on and is exported. As versions: a real vLLM loads each by its own LoRA under the
version's label, and computes what base and adapter do together."""

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint import FileSystemReader
from transformers import AutoModelForCausalLM

from tests.conformance.engine import furthest
from tests.conformance.reference import Reference
from tests.e2e.conftest import API_KEY, Replay, Runs, Site, running
from titan_grpo.config import LINEAR
from titan_grpo.engines.generation import Sampling
from titan_grpo.engines.http import Call
from titan_grpo.engines.launch import ServerSpec
from titan_grpo.layout.peft import tensor_name

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

RANK, ALPHA = 4, 10.0
STEPS = ["--training.steps=4", "--checkpoint.interval=2", "--optimizer.lr=2e-2"]
LORA = [f"--lora.rank={RANK}", f"--lora.alpha={ALPHA}"]
ADAPTER = "--lora.sync=adapter"
PROBE = [1, *range(20, 52)]


@pytest.fixture(scope="module")
def arguments(small_replay: Replay) -> list[str]:
    return [*small_replay.arguments, *STEPS, *LORA]


@pytest.fixture(scope="module")
def whole(
    runs: Runs, site: Site, arguments: list[str], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, tuple[float, ...]]:
    """Its folder after four steps on two ranks, and what the server then gives to a sequence."""
    out = tmp_path_factory.mktemp("whole")
    summary = runs.complete(out, [site.url], *arguments, nproc=2)
    assert (summary["digest_mismatches"], site.label().version) == (0, 4)
    return out, site.driver.run(site.speak.score(PROBE, 30.0))


EXPORTS = """
import contextlib, io, json, sys
from titan_grpo import cli
for argv in json.loads(sys.argv[1]):
    with contextlib.redirect_stderr(io.StringIO()) as said:
        code = cli.main(argv)
    print(json.dumps([code, said.getvalue()]))
"""
"""``titan-grpo`` several times in one interpreter: each start costs seconds."""


def exported(root: Path, commands: list[list[str]]) -> list[Any]:
    """Exit code and complaints of each command."""
    done = subprocess.run(
        [sys.executable, "-c", EXPORTS, json.dumps(commands)],
        cwd=root,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]


def export(out: Path, whole: Path, runs: Runs, arguments: list[str], *options: str) -> list[str]:
    """Command that writes the last version."""
    job = [f"--job.config_file={runs.recipe}", f"--job.dump_folder={whole}"]
    job += [f"--model.hf_assets_path={runs.model}", *map(str, arguments)]
    return ["export", "--version=4", f"--out={out}", *options, *job]


def test_a_server_of_other_weights_gives_the_merged_models_log_probabilities(
    runs: Runs, whole: tuple[Path, tuple[float, ...]]
) -> None:
    out, served = whole
    trained, before = (Reference(folder).logprobs(PROBE) for folder in (out / "hf", runs.model))
    assert furthest(trained, before) > 0.1, "training must have changed the policy"
    assert furthest(trained, served) < 0.01


def test_only_the_weights_with_adapters_move_and_only_adapters_have_optimizer_state(
    runs: Runs, whole: tuple[Path, tuple[float, ...]]
) -> None:
    out, _ = whole
    base, trained = runs.weights(runs.model), runs.weights(out / "hf")
    moved = {name for name in base if not torch.equal(base[name], trained[name])}
    assert moved == {name for name in base if name.split(".")[-2] in LINEAR}
    stored = FileSystemReader(out / "checkpoint" / "step-4").read_metadata().state_dict_metadata
    states = [name for name in stored if name.endswith("exp_avg")]
    assert len(states) == len(LINEAR) * 2 * 2
    assert all(name.removesuffix(".exp_avg").endswith(("lora_a", "lora_b")) for name in states)


def test_a_checkpoint_is_exported_merged_and_as_the_adapter_that_peft_reads(
    root: Path,
    runs: Runs,
    whole: tuple[Path, tuple[float, ...]],
    arguments: list[str],
    tmp_path: Path,
) -> None:
    out, _ = whole
    merged = export(tmp_path / "merged", out, runs, arguments)
    alone = export(tmp_path / "peft", out, runs, arguments, "--adapter", "--dtype=float32")
    plain = export(tmp_path / "none", out, runs, arguments[: -len(LORA)])
    (merged, said), alone, plain = exported(root, [merged, alone, plain])
    assert merged == 0, said
    served = runs.weights(out / "hf")
    again = runs.weights(tmp_path / "merged")
    assert all(torch.equal(served[name], again[name]) for name in served)

    assert alone[0] == 0, alone
    settings = json.loads((tmp_path / "peft" / "adapter_config.json").read_text())
    assert (settings["r"], settings["lora_alpha"], settings["peft_type"]) == (RANK, ALPHA, "LORA")
    adapter = load_file(tmp_path / "peft" / "adapter_model.safetensors")
    base = runs.weights(runs.model)
    for name in (n for n in base if n.split(".")[-2] in settings["target_modules"]):
        layer = f"base_model.model.{name.removesuffix('.weight')}"
        a, b = (adapter.pop(f"{layer}.lora_{end}.weight").double() for end in "AB")
        wanted = base[name].double() + settings["lora_alpha"] / settings["r"] * (b @ a)
        assert torch.equal(wanted.bfloat16(), served[name]), name
    assert adapter == {}

    assert plain[0] == 2
    assert "the adapters that the job's [lora] asks for, it also has" in plain[1]


@pytest.mark.long
def test_a_resumed_run_ends_with_the_very_weights_of_one_in_one_go(
    runs: Runs,
    site: Site,
    whole: tuple[Path, tuple[float, ...]],
    arguments: list[str],
    tmp_path: Path,
) -> None:
    out, _ = whole
    shutil.copytree(out / "checkpoint/step-2", tmp_path / "checkpoint/step-2")
    summary = runs.complete(tmp_path, [site.url], *arguments, nproc=2)
    assert summary["steps"] == 2
    assert runs.same_weights(out, tmp_path)


@pytest.fixture(scope="module")
def lora_site(
    nothing_outlives_the_tests: None,
    tmp_path_factory: pytest.TempPathFactory,
    vllm_python: str,
    runs: Runs,
) -> Iterator[Site]:
    """A server of the trainer's own base model, with vLLM's LoRA."""
    log = str(tmp_path_factory.mktemp("lora_site") / "server.log")
    spec = ServerSpec(vllm_python, str(runs.model), log, lora_rank=RANK, api_key=API_KEY)
    with running(spec) as shared:
        yield shared


def merged(base: Path, adapter: Path, out: Path) -> Path:
    """The base model with what PEFT's files add to it, in float32."""
    settings = json.loads((adapter / "adapter_config.json").read_text())
    tensors = load_file(adapter / "adapter_model.safetensors")
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    for name, parameter in model.named_parameters():
        a, b = (tensors.pop(tensor_name(name.removesuffix(".weight"), end), None) for end in "AB")
        if a is not None and b is not None:
            scale = settings["lora_alpha"] / settings["r"]
            parameter.data += scale * (b.float() @ a.float())
    assert not tensors
    model.save_pretrained(out)
    return out


@pytest.mark.long
def test_a_server_computes_the_base_with_the_adapter_of_its_label_and_has_no_older_one(
    runs: Runs, lora_site: Site, small_replay: Replay, tmp_path: Path
) -> None:
    site, arguments = lora_site, [*small_replay.arguments, *STEPS, *LORA, ADAPTER]
    summary = runs.complete(tmp_path, [site.url], *arguments, nproc=2)
    label = site.label()
    assert (summary["digest_mismatches"], label.version) == (0, 4)
    served = site.driver.run(site.speak.score(PROBE, 30.0))
    whole = merged(runs.model, tmp_path / "adapter", tmp_path / "merged")
    trained, before = (Reference(folder).logprobs(PROBE) for folder in (whole, runs.model))
    assert furthest(trained, before) > 0.1, "training must have changed the policy"
    assert furthest(trained, served) < 0.01
    models = Call("GET", "/v1/models", 10.0, lambda a: [m["id"] for m in a["data"]])
    assert site.driver.run(models)[1:] == [str(label)]
    sampled = site.driver.run(site.speak.generate(PROBE, Sampling(5, ignore_eos=True), 30.0))
    assert sampled.versions == ((str(label), 0, 5),)
