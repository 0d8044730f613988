"""Adapters, merged on the trainer: a real server serves them, the base stays as it was, and a
checkpoint goes on and is exported."""

import json
import shutil
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint import FileSystemReader
from transformers import AutoModelForCausalLM

from titan_grpo.config.lora import LINEAR

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

RANK, ALPHA = 4, 10.0
STEPS = ["--training.steps=4", "--checkpoint.interval=2", "--optimizer.lr=2e-2"]
LORA = [f"--lora.rank={RANK}", f"--lora.alpha={ALPHA}"]
PROBE = [1, *range(20, 52)]


@pytest.fixture(scope="module")
def arguments(small_replay):
    return [*small_replay.arguments, *STEPS, *LORA]


@pytest.fixture(scope="module")
def whole(runs, site, arguments, tmp_path_factory):
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


def exported(root, commands):
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


def export(out, whole, runs, arguments, *options):
    """Command that writes the last version."""
    job = [f"--job.config_file={runs.recipe}", f"--job.dump_folder={whole}"]
    job += [f"--model.hf_assets_path={runs.model}", *map(str, arguments)]
    return ["export", "--version=4", f"--out={out}", *options, *job]


def test_a_server_of_other_weights_gives_the_merged_models_log_probabilities(runs, whole):
    out, served = whole
    model = AutoModelForCausalLM.from_pretrained(out / "hf", dtype=torch.float32)
    ids = torch.tensor([PROBE])
    with torch.no_grad():
        logprobs = model(ids).logits[0, :-1].log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]
        base = AutoModelForCausalLM.from_pretrained(runs.model, dtype=torch.float32)
        before = base(ids).logits[0, :-1].log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]
    assert float((logprobs - before).abs().max()) > 0.1, "training must have changed the policy"
    assert float((logprobs - torch.tensor(served)).abs().max()) < 0.01


def test_only_the_weights_with_adapters_move_and_only_adapters_have_optimizer_state(runs, whole):
    out, _ = whole
    base, trained = runs.weights(runs.model), runs.weights(out / "hf")
    moved = {name for name in base if not torch.equal(base[name], trained[name])}
    assert moved == {name for name in base if name.split(".")[-2] in LINEAR}
    stored = FileSystemReader(out / "checkpoint" / "step-4").read_metadata().state_dict_metadata
    states = [name for name in stored if name.endswith("exp_avg")]
    assert len(states) == len(LINEAR) * 2 * 2
    assert all(name.removesuffix(".exp_avg").endswith(("lora_a", "lora_b")) for name in states)


def test_a_checkpoint_is_exported_merged_and_as_the_adapter_that_peft_reads(
    root, runs, whole, arguments, tmp_path
):
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
    runs, site, whole, arguments, tmp_path
):
    out, _ = whole
    shutil.copytree(out / "checkpoint/step-2", tmp_path / "checkpoint/step-2")
    summary = runs.complete(tmp_path, [site.url], *arguments, nproc=2)
    assert summary["steps"] == 2
    expected, resumed = runs.weights(out / "hf"), runs.weights(tmp_path / "hf")
    assert all(torch.equal(expected[name], resumed[name]) for name in expected)
