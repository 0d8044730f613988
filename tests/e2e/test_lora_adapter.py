"""Versions that are adapters: a real vLLM loads each one by its own LoRA under the version's label,
and computes what base and adapter do together."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.e2e.conftest import API_KEY, Site
from titan_grpo.engines.generation import Sampling
from titan_grpo.engines.http import Call, SyncDriver
from titan_grpo.engines.launch import Server, ServerSpec
from titan_grpo.layout.peft import tensor_name

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.timeout(400)]

RANK, ALPHA = 4, 10.0
LORA = [f"--lora.rank={RANK}", f"--lora.alpha={ALPHA}", "--lora.sync=adapter"]
STEPS = ["--training.steps=4", "--optimizer.lr=2e-2"]
PROBE = [1, *range(20, 52)]


@pytest.fixture(scope="module")
def lora_site(
    nothing_outlives_the_tests, tmp_path_factory, vllm_python: str, runs
) -> Iterator[Site]:
    """A server of the trainer's own base model, with vLLM's LoRA."""
    log = str(tmp_path_factory.mktemp("lora_site") / "server.log")
    spec = ServerSpec(vllm_python, str(runs.model), log, lora_rank=RANK, api_key=API_KEY)
    with Server(spec) as server, SyncDriver(server.url, API_KEY) as driver:
        server.wait_healthy(280)
        yield Site(server, driver)


def merged(base: Path, adapter: Path) -> torch.nn.Module:
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
    return model


def logprobs(model: torch.nn.Module) -> torch.Tensor:
    ids = torch.tensor([PROBE])
    with torch.no_grad():
        found = model(ids).logits[0, :-1].log_softmax(-1)
    return found.gather(-1, ids[0, 1:, None])[:, 0]


def test_a_server_computes_the_base_with_the_adapter_of_its_label_and_has_no_older_one(
    runs, lora_site, small_replay, tmp_path
) -> None:
    site, arguments = lora_site, [*small_replay.arguments, *STEPS, *LORA]
    summary = runs.complete(tmp_path, [site.url], *arguments, nproc=2)
    label = site.label()
    assert (summary["digest_mismatches"], label.version) == (0, 4)
    served = torch.tensor(site.driver.run(site.speak.score(PROBE, 30.0)))
    trained = logprobs(merged(runs.model, tmp_path / "adapter"))
    before = logprobs(AutoModelForCausalLM.from_pretrained(runs.model, dtype=torch.float32))
    assert float((trained - before).abs().max()) > 0.1, "training must have changed the policy"
    assert float((trained - served).abs().max()) < 0.01
    models = Call("GET", "/v1/models", 10.0, lambda a: [m["id"] for m in a["data"]])
    assert site.driver.run(models)[1:] == [str(label)]
    sampled = site.driver.run(site.speak.generate(PROBE, Sampling(5, ignore_eos=True), 30.0))
    assert sampled.versions == ((str(label), 0, 5),)


def test_a_server_without_lora_is_refused_with_what_to_start(runs, site, small_replay, tmp_path):
    arguments = [*small_replay.arguments, *STEPS, *LORA, "--weight_sync.startup_deadline_s=60"]
    with runs.start(tmp_path, [site.url], *arguments) as training:
        assert training.finish() != 0
    assert "start it with --enable-lora --max-lora-rank 8" in training.log
