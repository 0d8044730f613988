"""Servers that a reload would corrupt in silence are refused at joining: the plugins' rules, asked
of real configuration objects in the engines' own environments; and what SGLang's plugin does with
its messages and memory. No server runs."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from titan_grpo.patches import sglang_cpu
from titan_grpo.receive.checkpoint import difference, essential
from titan_grpo.receive.vllm_http import SALTED
from titan_grpo.titan.flavors import FLAVORS
from titan_grpo.titan.tiny import write_tiny_model

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(400)]

ROPE = """
ROPE = {"rope_type": "yarn", "rope_theta": 7.0, "factor": 4.0,
        "original_max_position_embeddings": 256}
"""

VLLM = (
    ROPE
    + """
import json, sys
from pathlib import Path
from types import SimpleNamespace
import torch
from vllm.config import WatermarkConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.entrypoints.launchers.app import build_app
from vllm.model_executor.model_loader.reload import (
    initialize_layerwise_reload, record_metadata_for_reloading
)
try:
    from vllm.entrypoints.common.cli_args import make_arg_parser
except ImportError:  # before 0.33
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser
from titan_grpo.layout.manifest import Manifest
from titan_grpo.receive.checkpoint import essential
from titan_grpo.receive import vllm_http
from titan_grpo.receive.commit import LoadedModel
from titan_grpo.receive.vllm_plugin import (
    VllmModel, model_problem, problem_of, sends_routes, unloaded
)

class Once(torch.nn.Module):
    def process_weights_after_loading(self): ...

def configured(model=sys.argv[1], **options):
    options = {"logprobs_mode": "processed_logprobs", **options}
    args = EngineArgs(model=model, max_model_len=64, enforce_eager=True, **options)
    return args.create_engine_config()

def in_place(name):
    model = VllmModel.__new__(VllmModel)  # its constructor wants a worker
    model._owner = SimpleNamespace(vllm_config=configured())
    model.names = SimpleNamespace(shapes={}, problem=lambda _: "")
    model.refuses(Manifest.build([(name, "bfloat16", (4, 4))], 4096))
    return model.in_place

def adapters(**options):
    tensors = [(f"base_model.model.m.q_proj.lora_{end}.weight", "bfloat16", shape)
               for end, shape in (("A", (16, 4)), ("B", (4, 16)))]
    sent = Manifest.build(tensors, 4096)
    return vllm_http.adapter_problem(sent, configured(**options).lora_config, {})

def problem(parallel=None, quantization=None, device="cuda", kind="qwen3", watermark=None,
            **options):
    config = configured(**options)
    config.model_config.hf_text_config.model_type = kind
    # set late: a machine without a GPU refuses them
    config.device_config.device_type = device
    for name, value in (parallel or {}).items():
        setattr(config.parallel_config, name, value)
    config.model_config.quantization, config.watermark_config = quantization, watermark
    return problem_of(config)

def dense_replica():
    config = configured(data_parallel_size=2)
    # as vLLM does in the process of a replica of a model without experts
    config.parallel_config.reconfigure_for_independent_dp_rank()
    return problem_of(config)

def with_processor():
    folder = Path(sys.argv[1]).with_name("packages")
    folder.joinpath("biased-1.dist-info").mkdir(parents=True)
    folder.joinpath("biased-1.dist-info", "METADATA").write_text("Name: biased\\nVersion: 1\\n")
    folder.joinpath("biased-1.dist-info", "entry_points.txt").write_text(
        "[vllm.logits_processors]\\nbiased = module:Processor\\n"
    )
    sys.path.append(str(folder))
    try:
        return problem()
    finally:
        sys.path.remove(str(folder))

def bounded():
    file = Path(sys.argv[1]).with_name("bounded") / "generation_config.json"
    file.parent.mkdir()
    file.write_text('{"max_new_tokens": 3}')
    return str(file.parent)

def kv(connector, **options):
    return {"kv_connector": connector, "kv_role": "kv_both", "kv_connector_extra_config": options}

def fields(model, **options):
    return essential(LoadedModel(configured(model, **options).model_config, "", False).config)

def salted():
    args = make_arg_parser(FlexibleArgumentParser()).parse_args([])
    routes = build_app(args, ("generate",)).routes
    bodies = [(route.path, route.body_field) for route in routes if hasattr(route, "body_field")]
    kinds = {path: body.field_info.annotation for path, body in bodies if body}
    fields = {path: getattr(kind, "model_fields", ()) for path, kind in kinds.items()}
    return [path for path, names in fields.items() if "cache_salt" in names]

def layer():
    made = torch.nn.Linear(4, 4, bias=False)
    made.register_buffer("frequencies", torch.ones(4), persistent=False)
    return made

def stale():
    model = torch.nn.ModuleDict({name: layer() for name in ("right", "stale", "tied", "partial")})
    model["tied"].weight = model["right"].weight
    model["only_buffers"] = torch.nn.BatchNorm1d(4, affine=False)
    model["partial"].bias = torch.nn.Parameter(torch.zeros(4))
    record_metadata_for_reloading(model)
    with torch.no_grad():
        initialize_layerwise_reload(model)
        for name in ("right", "partial"):
            parameter = model[name].weight
            parameter.weight_loader(parameter, torch.ones(4, 4))
        model["stale"].weight.copy_(torch.ones(4, 4))  # it is on the meta device
    return list(unloaded(model))

class Router(torch.nn.Module):
    def __init__(self, named):
        super().__init__()
        self.named = named
        self.experts = torch.nn.ModuleDict({"gate": torch.nn.Linear(4, 4, bias=False)})
        self.gate = self.experts["gate"]

    def load_weights(self, tensors):
        for name, tensor in tensors:
            parameter = self.get_parameter(name)
            parameter.weight_loader(parameter, tensor)
        return self.named

def router(named):
    made = Router(named)
    record_metadata_for_reloading(made)
    engine = VllmModel.__new__(VllmModel)  # its constructor wants a worker
    engine.in_place, engine._repair = True, False
    config = SimpleNamespace(quantization=None, dtype=torch.float32)
    engine._owner = SimpleNamespace(model=made, model_config=config)
    engine.load([("gate.weight", torch.ones(4, 4))])
    return made.gate.weight.unique().tolist()

vllm_http.WeightsMiddleware(None)  # makes the folder that adapters are taken from
tokens = {"num_speculative_tokens": 2}
ngram = {"method": "ngram", **tokens}
draft = {"method": "draft_model", "model": sys.argv[1], **tokens}
loose = {"rejection_sample_method": "synthetic", "synthetic_acceptance_length": 2.0, **ngram}
two_hosts = {"nnodes": 2, "tensor_parallel_size": 2, "master_addr": "127.0.0.1"}
routed = configured()
# set late, as above
routed.aux_output_config.enable_return_routed_experts = True
def said(quantization):
    config = configured().model_config
    config.quantization = quantization  # set late, as above
    return LoadedModel(config, "", False).quantization

print(json.dumps({
    "problems": {case: eval(case) for case in json.load(sys.stdin)},
    "stale": stale(),
    "router": [router({"gate.weight"}), router(None)],
    "salted": salted(),
    "quantised": [said(None), said("fp8_per_tensor")],
    "in place": [in_place("m.weight"), in_place("base_model.model.m.lora_A.weight")],
    "routes": [sends_routes(configured()), sends_routes(routed)],
    "fields": {model: fields(model) for model in sys.argv[1:]},
    "other rope": fields(sys.argv[1], hf_overrides={"rope_parameters": ROPE}),
}))
"""
)

BOUNDED = "every completion would end at 3 tokens"
OLDER_PREFIXES = "from prefixes of older weights"
ONE_HOST = "tensor parallelism on one host"
REPLICAS = "start one server per replica"
PROCESSED = "start it with --logprobs-mode processed_logprobs"
OFFLOADED = "without --cpu-offload-gb and --offload-group-size"
ALIKE = "completions of a prompt would be alike"

OF_VLLM = {
    "problem()": "",
    "problem(speculative_config=ngram)": "",
    'problem(speculative_config=ngram, device="cpu", enable_chunked_prefill=False)': (
        "memory that holds no temperature"
    ),
    "problem(speculative_config=draft)": "draft_model would keep its old draft weights",
    "problem(speculative_config=loose)": "use standard or block",
    'problem(device="cpu", enable_chunked_prefill=False)': "",
    'problem(device="cpu", enable_chunked_prefill=True)': "with --no-enable-chunked-prefill",
    "problem(skip_tokenizer_init=True)": "without --skip-tokenizer-init",
    'problem(override_generation_config={"max_new_tokens": 3})': BOUNDED,
    "problem(generation_config=bounded())": BOUNDED,
    'problem(override_generation_config={"temperature": 0.5, "top_k": 2})': "",
    'problem(logits_processors=["module:Processor"])': "start the server without --logits-proc",
    "with_processor()": "uninstall the package of biased = module:Processor",
    "problem(watermark=WatermarkConfig(key=1))": ALIKE,
    'problem(load_format="ipc_cache")': "into the memory of vLLM's weight cache",
    'problem(load_format="ipc_cache", model_loader_extra_config={"mode": "copy"})': "",
    "model_problem(torch.nn.Linear(2, 2))": "",
    "model_problem(Once())": "Once computes with its weights once",
    'problem({"enable_eplb": True})': "--enable-eplb",
    "problem(pipeline_parallel_size=2)": ONE_HOST,
    "problem(data_parallel_size=2)": REPLICAS,
    "dense_replica()": REPLICAS,
    'problem({"_api_process_count": 2})': "start the server with --api-server-count 1",
    'problem({"enable_expert_parallel": True, "tensor_parallel_size": 2})': "",
    'problem(distributed_executor_backend="mp", **two_hosts)': ONE_HOST,
    'problem(tensor_parallel_size=2, distributed_executor_backend="external_launcher")': ONE_HOST,
    'problem({"distributed_executor_backend": "ray"})': ONE_HOST,
    'problem({"distributed_executor_backend": "mp"})': "",
    'problem(quantization="fp8_per_tensor")': "",
    'problem(quantization="fp8_per_tensor", device="cpu")': (
        "fp8_per_tensor cannot be made anew on a CPU"
    ),
    'problem(quantization="awq")': "awq cannot be made anew from whole weights",
    'problem(kind="gpt_oss")': "vLLM's loader of gpt_oss gives nothing to its experts",
    "problem(cpu_offload_gb=1)": OFFLOADED,
    "problem(offload_group_size=2)": OFFLOADED,
    'problem(kv_transfer_config=kv("OffloadingConnector"))': "",
    'problem(kv_transfer_config=kv("LMCacheConnectorV1"))': OLDER_PREFIXES,
    'problem(kv_transfer_config=kv("MultiConnector", connectors=[kv("HF3FSKVConnector")]))': (
        OLDER_PREFIXES
    ),
    'problem(kv_transfer_config=kv("FlexKVConnectorV1"))': OLDER_PREFIXES,
    "problem(logprobs_mode=EngineArgs.logprobs_mode)": PROCESSED,
    'problem(logprobs_mode="processed_logits")': PROCESSED,
    "adapters(enable_lora=True, max_lora_rank=16)": "",
    "adapters(enable_lora=True, max_lora_rank=8)": "start it with --max-lora-rank 16",
    "adapters()": "start it with --enable-lora --max-lora-rank 16",
}
"""What a server is configured to, in the words of the script -> words of its refusal; none: it is
served."""

SGLANG = (
    ROPE
    + """
import json, sys
import torch
from sglang.srt.layers.quantization.compressed_tensors import compressed_tensors, schemes
from sglang.srt.layers.quantization.fp8 import Fp8LinearMethod
from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.environ import envs
from sglang.srt.lora.layers import BaseLayerWithLoRA
from sglang.srt.server_args import ServerArgs
from titan_grpo.layout.manifest import Manifest
from titan_grpo.receive.checkpoint import CheckpointNames, essential
from titan_grpo.receive.commit import LoadedModel
from titan_grpo.receive.sglang_plugin import (
    LOADER, SglangModel, compatibility, model_problem, sends_routes
)

def problem(**options):
    return compatibility(ServerArgs(sys.argv[1], custom_weight_loader=[LOADER], **options))

def quantised(method, scheme=None):
    layer = torch.nn.Linear(2, 2)
    layer.quant_method = method.__new__(method)  # its constructor asks for a GPU
    layer.scheme = scheme and scheme.__new__(scheme)
    return model_problem(torch.nn.ModuleDict({"layer": layer}))

def derived():
    layer = torch.nn.Linear(2, 2)
    layer._derived_weight_cache_error = "the layer keeps a copy"
    return model_problem(torch.nn.ModuleDict({"layer": layer}))

class Experts(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.w13_weight = torch.nn.Parameter(torch.zeros(2, 4, 2))

def wrapped(layer):
    return model_problem(torch.nn.ModuleDict({"layer": BaseLayerWithLoRA(layer, None)}))

def late(**options):
    args = ServerArgs(sys.argv[1], custom_weight_loader=[LOADER])
    for name, value in options.items():
        setattr(args, name, value)  # late: a machine without (several) GPUs refuses them
    return compatibility(args)

def original():
    with envs.SGLANG_RETURN_ORIGINAL_LOGPROB.override(True):
        return problem()

name = "base_model.model.m.q_proj.lora_A.weight"
adapters = Manifest.build([(name, "bfloat16", (16, 4))], 4096)

def loaded(model, **options):
    return LoadedModel(ModelConfig.from_server_args(ServerArgs(model, **options)), "", False)

def loaded_names(model):
    engine = SglangModel.__new__(SglangModel)  # its constructor wants a scheduler
    engine.names = CheckpointNames(model, None, False)
    return engine

def fields(model, **options):
    return essential(loaded(model, **options).config)

def said(**options):
    return loaded(sys.argv[1], **options).quantization

def preferred(**sampling):
    return problem(preferred_sampling_params=json.dumps(sampling))

moe = compressed_tensors.CompressedTensorsFusedMoEMethod
print(json.dumps({
    "problems": {case: eval(case) for case in json.load(sys.stdin)},
    "quantised": [said(), said(quantization="w8a8_int8")],
    "fields": {model: fields(model) for model in sys.argv[1:]},
    "other rope": fields(
        sys.argv[1], json_model_override_args=json.dumps({"rope_parameters": ROPE})
    ),
    "routes": [
        sends_routes(ServerArgs(sys.argv[1], enable_return_routed_experts=on))
        for on in (False, True)
    ],
}))
"""
)

OF_SGLANG = {
    "problem()": "",
    "problem(enable_eplb=True)": "--enable-eplb",
    "problem(ep_num_redundant_experts=2)": "--enable-eplb",
    'problem(init_expert_location="placement.json")': "--enable-eplb",
    'problem(speculative_algorithm="EAGLE")': "draft model",
    'late(weight_cache_mode="daemon")': "other engines serve the same memory",
    'late(device="cuda", enable_torch_compile=True)': "",
    'late(device="cpu", enable_torch_compile=True)': "without --enable-torch-compile",
    "problem(enable_flexkv=True)": "start the server without --enable-flexkv",
    "late(enable_hierarchical_cache=True, enable_return_routed_experts=False)": "",
    "late(enable_hierarchical_cache=True, enable_return_routed_experts=True)": "of other tokens",
    "preferred(top_k=2, no_stop_trim=True)": "",
    "preferred(top_k=2, stop_token_ids=[9])": "the server's preference of stop_token_ids would",
    "late(enable_watermark=True)": ALIKE,
    "problem(allow_auto_truncate=True)": "start the server without --allow-auto-truncate",
    "original()": "without SGLANG_RETURN_ORIGINAL_LOGPROB",
    "late(dcp_replicate_q_proj=True)": "--no-dcp-replicate-q-proj",
    "derived()": "the layer keeps a copy",
    "late(offload_group_size=2)": "without --offload-group-size",
    "wrapped(torch.nn.Linear(2, 2))": "",
    "wrapped(Experts())": "layer.base_layer.w13_weight would keep its old value",
    "SglangModel.__new__(SglangModel).refuses(adapters)": (
        'send merged weights (lora.sync = "merged")'
    ),
    "loaded_names(sys.argv[1]).unnamed()": "",
    'loaded_names("/nowhere").unnamed()': "/nowhere holds no checkpoint",
    "problem(tp_size=2, ep_size=2)": "",
    "problem(dp_size=2)": REPLICAS,
    "problem(tp_size=2, attn_dp_size=2)": REPLICAS,
    'problem(nnodes=2, dist_init_addr="127.0.0.1:1")': ONE_HOST,
    "problem(pp_size=2)": ONE_HOST,
    "quantised(UnquantizedLinearMethod)": "",
    "quantised(moe, schemes.CompressedTensorsWNA16MoE)": "",
    "quantised(Fp8LinearMethod)": (
        "layer (Fp8LinearMethod) is quantised by a method that cannot restore"
    ),
    "quantised(moe, schemes.CompressedTensorsW8A8Fp8MoE)": "CompressedTensorsW8A8Fp8MoE",
}
"""As OF_VLLM."""


def answers(
    python: str, code: str, cases: dict[str, str], folder: Path, **env: str
) -> dict[str, Any]:
    """What the code prints besides the problems of these cases, for models of all kinds. Their
    configurations, as the engine has them, must be those of their files: a difference would be
    refused."""
    models = [str(write_tiny_model(kind, folder / kind, seed=1)) for kind in FLAVORS]
    done = subprocess.run(
        [python, "-c", code, *models],
        input=json.dumps(list(cases)),
        env={**os.environ, "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "", **env},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    for case, problem in found["problems"].items():
        assert (cases[case] in problem, bool(problem)) == (True, bool(cases[case])), (case, problem)
    trainers = {
        model: essential(json.loads((Path(model) / "config.json").read_text())) for model in models
    }
    rope = difference(trainers[models[0]], found["other rope"])
    assert "rope.rope_theta 7.0" in rope
    assert "rope.rope_type 'yarn' (the trainer: 'default')" in rope
    for model, fields in found["fields"].items():
        own = trainers[model]
        assert difference(own, fields) == "", model
        assert {"model_type", "rms_norm_eps", "rope.rope_theta", "rope.rope_type"} <= fields.keys()
    return found


@pytest.fixture(scope="module")
def of_vllm(vllm_python: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    allowed = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}
    return answers(vllm_python, VLLM, OF_VLLM, tmp_path_factory.mktemp("vllm"), **allowed)


def test_vllm_refuses_what_a_reload_or_a_temperature_would_make_wrong_and_nothing_else(
    of_vllm: dict[str, Any],
) -> None:
    assert of_vllm["routes"] == [False, True]
    assert of_vllm["quantised"] == ["", "fp8_per_tensor"]
    assert of_vllm["in place"] == [True, False], "an adapter is loaded beside the weights"
    assert "/v1/completions" in of_vllm["salted"]
    # others would be answered with prefixes of older weights
    assert set(of_vllm["salted"]) <= SALTED


def test_sglang_refuses_load_balanced_experts_and_weights_that_it_cannot_restore(
    sglang_python: str, tmp_path: Path, root: Path
) -> None:
    paths = os.pathsep.join((sglang_cpu.directory(), str(root), os.environ["PYTHONPATH"]))
    on_cpu = {"PYTHONPATH": paths, "SGLANG_USE_CPU_ENGINE": "1"}
    found = answers(sglang_python, SGLANG, OF_SGLANG, tmp_path, **on_cpu)
    assert found["routes"] == [False, True]
    assert found["quantised"] == ["", "w8a8_int8"]


@pytest.fixture(scope="module")
def scripts(sglang_python: str, root: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What the scripts of this folder printed in SGLang's environment."""
    model = write_tiny_model("qwen3", tmp_path_factory.mktemp("scripts") / "model", seed=1)
    paths = os.pathsep.join((sglang_cpu.directory(), str(root), os.environ["PYTHONPATH"]))
    env = {"PYTHONPATH": paths, "SGLANG_USE_CPU_ENGINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    names = ["sglang_ranks", "sglang_update"]
    names += [f"sglang_replicas={model}", f"sglang_overlap={model}"]
    done = subprocess.run(
        [sglang_python, "-m", "tests.receive.in_sglang", *names],
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=300,
    )
    found = json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else {}
    assert len(found) == len(names), done.stderr[-4000:]
    return found


def test_sglangs_workers_let_go_of_a_receivers_memory_before_the_next_one_takes_its_own(
    scripts: Any,
) -> None:
    """As large as the model, it would be there twice."""
    found = dict(scripts["sglang_ranks"])
    assert found.pop("attached") == [2, False]
    assert found.pop("joined again") == [0, False]
    assert set(map(tuple, found.values())) == {(2, True)}, "no receiver was replaced"


def test_a_load_is_one_message_to_sglangs_schedulers_and_alone_allows_a_label(scripts: Any) -> None:
    updated = scripts["sglang_update"]
    whole = ["message", {"number": 1}, "begin", "load 0", "end, post load False", "r:1:f"]
    assert updated["seen"] == [*whole, *whole]
    assert updated["answers"] == [400, 200, 200, 400]
    assert updated["greeted"] == [200, 503, 200], "no lane has joined"
    assert "begin_weight_update()" in updated["foreign"], "an update of SGLang's own needs its own"
    assert updated["refused"] == [[200], ["message", "nonsense", {}, {}, {}, {}, {}]], (
        "nothing is repacked"
    )


def test_cache_keys_of_one_sglangs_schedulers_agree_and_those_of_two_servers_differ(
    scripts: Any,
) -> None:
    """A storage behind the cache would give the one KV of the other's weights."""
    first, second, other = scripts["sglang_update"]["keys"]
    assert first == second != other


def test_an_sglangs_requests_that_wait_over_a_commit_go_on_from_no_older_prefix(
    scripts: Any,
) -> None:
    """Also those that wait for their grammar."""
    queued = dict(scripts["sglang_update"]["queued"])
    assert queued.pop("with its own") == ["salt", "salt"]
    assert queued.keys() == {"ready", "grammar"}
    for before, after in queued.values():
        assert int(after.split()[-1]) == int(before.split()[-1]) + 1


def test_sglangs_watchdog_ends_no_server_that_is_paused_over_a_long_load(scripts: Any) -> None:
    """It does after 300 s in which a batch is current and none runs."""
    assert scripts["sglang_update"]["watched"] == [True, False]


def test_an_sglang_with_replicas_starts_and_tells_a_trainer_why_it_is_refused(scripts: Any) -> None:
    """Also one that a launcher of several servers has started."""
    assert "start one server per replica" in scripts["sglang_replicas"][0]


def test_an_sglang_whose_model_cannot_be_reloaded_tells_a_trainer_why_it_is_refused(
    scripts: Any,
) -> None:
    assert scripts["sglang_replicas"][1] == "the layer keeps a copy"


def test_a_token_whose_result_waits_over_a_commit_has_the_version_that_sampled_it(
    scripts: Any,
) -> None:
    """SGLang's overlap scheduler reads the last batch's result after the pause."""
    assert scripts["sglang_overlap"] == {
        "decoding": [["v1", 0, 6], ["v2", 6, 9]],
        "prefilled": [["v1", 0, 1], ["v2", 1, 4]],
        "chunked": [["v2", 0, 3]],
        "waiting": [["v1", 0, 4], ["v2", 4, 7]],
    }


def test_vllms_plugin_sees_a_loader_that_writes_to_parameters_without_memory(
    of_vllm: dict[str, Any],
) -> None:
    """vLLM's of gpt_oss: it names all parameters as loaded, and the server would compute with the
    experts that it started with."""
    assert of_vllm["stale"] == ["stale"]


def test_vllms_plugin_takes_a_parameter_that_is_loaded_by_one_of_its_names(
    of_vllm: dict[str, Any],
) -> None:
    """As the router of a mixture of experts with --model-impl transformers."""
    assert of_vllm["router"][0] == [1.0]


def test_vllms_plugin_takes_a_loader_that_does_not_say_what_it_has_loaded(
    of_vllm: dict[str, Any],
) -> None:
    assert of_vllm["router"][1] == [1.0]
