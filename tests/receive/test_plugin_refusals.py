"""Servers that a reload would corrupt in silence are refused at joining: the plugins' rules, asked
of real configuration objects in the engines' own environments. No server runs."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from titan_grpo.patches import sglang_cpu
from titan_grpo.titan.tiny import write_tiny_model

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(400)]

VLLM = """
import json, sys
from vllm.engine.arg_utils import EngineArgs
from titan_grpo.layout.manifest import Manifest
from titan_grpo.receive import vllm_lora
from titan_grpo.receive.vllm_plugin import problem_of

def configured(**options):
    args = EngineArgs(model=sys.argv[1], max_model_len=64, enforce_eager=True, **options)
    return args.create_engine_config()

def adapters(**options):
    tensors = [(f"base_model.model.m.q_proj.lora_{end}.weight", "bfloat16", shape)
               for end, shape in (("A", (16, 4)), ("B", (4, 16)))]
    sent = Manifest.build(tensors, 4096)
    return vllm_lora.problem(sent, configured(**options).lora_config, {})

def problem(eplb=False, **options):
    config = configured(**options)
    config.parallel_config.enable_eplb = eplb  # set late: a machine without a GPU refuses it
    return problem_of(config)

tokens = {"num_speculative_tokens": 2}
print(json.dumps({
    "plain": problem(),
    "ngram": problem(speculative_config={"method": "ngram", **tokens}),
    "draft": problem(speculative_config={"method": "draft_model", "model": sys.argv[1], **tokens}),
    "eplb": problem(eplb=True),
    "adapters": adapters(enable_lora=True, max_lora_rank=16),
    "adapters, low rank": adapters(enable_lora=True, max_lora_rank=8),
    "adapters, no lora": adapters(),
}))
"""

SGLANG = """
import json, sys
import torch
from sglang.srt.layers.quantization.compressed_tensors import compressed_tensors, schemes
from sglang.srt.layers.quantization.fp8 import Fp8LinearMethod
from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod
from sglang.srt.server_args import ServerArgs
from titan_grpo.layout.manifest import Manifest
from titan_grpo.receive.sglang_plugin import LOADER, SglangModel, compatibility, model_problem

def problem(**options):
    return compatibility(ServerArgs(sys.argv[1], custom_weight_loader=[LOADER], **options))

def quantised(method, scheme=None):
    layer = torch.nn.Linear(2, 2)
    layer.quant_method = method.__new__(method)  # its constructor asks for a GPU
    layer.scheme = scheme and scheme.__new__(scheme)
    return model_problem(torch.nn.ModuleDict({"layer": layer}))

name = "base_model.model.m.q_proj.lora_A.weight"
adapters = Manifest.build([(name, "bfloat16", (16, 4))], 4096)
moe = compressed_tensors.CompressedTensorsFusedMoEMethod
print(json.dumps({
    "plain": problem(),
    "eplb": problem(enable_eplb=True),
    "redundant": problem(ep_num_redundant_experts=2),
    "placed": problem(init_expert_location="placement.json"),
    "draft": problem(speculative_algorithm="EAGLE"),
    "adapters": SglangModel.__new__(SglangModel).refuses(adapters),
    "unquantised": quantised(UnquantizedLinearMethod),
    "restores": quantised(moe, schemes.CompressedTensorsWNA16MoE),
    "packs": quantised(Fp8LinearMethod),
    "scheme packs": quantised(moe, schemes.CompressedTensorsW8A8Fp8MoE),
}))
"""


def answers(python: str, code: str, folder: Path, **env: str) -> dict[str, Any]:
    model = write_tiny_model("qwen3", folder / "model", seed=1)
    done = subprocess.run(
        [python, "-c", code, str(model)],
        env={**os.environ, "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "", **env},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_vllm_refuses_load_balanced_experts_and_draft_weights_and_nothing_else(
    vllm_python: str, tmp_path: Path
) -> None:
    found = answers(vllm_python, VLLM, tmp_path, VLLM_ALLOW_RUNTIME_LORA_UPDATING="1")
    fine = [name for name, problem in found.items() if not problem]
    assert fine == ["plain", "ngram", "adapters"]
    assert "start it with --max-lora-rank 16" in found["adapters, low rank"]
    assert "start it with --enable-lora --max-lora-rank 16" in found["adapters, no lora"]
    assert "--enable-eplb" in found["eplb"]
    assert "draft_model would keep its old draft weights" in found["draft"]


def test_sglang_refuses_load_balanced_experts_and_weights_that_it_cannot_restore(
    sglang_python: str, tmp_path: Path, root: Path
) -> None:
    paths = f"{sglang_cpu.directory()}:{root}"
    found = answers(sglang_python, SGLANG, tmp_path, PYTHONPATH=paths, SGLANG_USE_CPU_ENGINE="1")
    fine = [name for name, problem in found.items() if not problem]
    assert fine == ["plain", "unquantised", "restores"]
    assert 'send merged weights (lora.sync = "merged")' in found["adapters"]
    for name in ("eplb", "redundant", "placed"):
        assert "--enable-eplb" in found[name]
    assert "layer (Fp8LinearMethod) is quantised by a method that cannot restore" in found["packs"]
    assert "CompressedTensorsW8A8Fp8MoE" in found["scheme packs"]
