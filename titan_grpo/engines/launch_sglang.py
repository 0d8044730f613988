"""How an SGLang server is started: command line, environment and the file with its keys, as data. Tested with SGLang 0.5.23."""

import json
import os
from collections.abc import Mapping, Sequence

from titan_grpo.engines import sglang
from titan_grpo.engines.launch_spec import ServerSpec, few_threads, without_torchrun
from titan_grpo.patches import sglang_cpu

CPU_ARGUMENTS = (
    # pure torch in every layer: PyPI has no compiled kernels for CPU
    *("--device", "cpu", "--attention-backend", "torch_native", "--sampling-backend", "pytorch", "--grammar-backend", "none"),
    *("--disable-overlap-schedule", "--cuda-graph-backend-decode", "disabled", "--cuda-graph-backend-prefill", "disabled"),
)


def command(spec: ServerSpec, keys_path: str = "") -> list[str]:
    """The server's command line. ``keys_path``: the file with what ``keys`` returns, where there are keys."""
    out = [spec.python, "-m", "sglang.launch_server", "--model-path", spec.model, "--host", spec.host, "--port", str(spec.port)]
    out += ["--dtype", spec.dtype, "--context-length", str(spec.max_model_len)]
    out += ["--max-running-requests", str(spec.max_num_seqs), "--log-level-http", "warning"]
    # An idle scheduler polls, which keeps a core busy; with this it waits for the next message (2 % of a core, not 90 %).
    out += ["--sleep-on-idle"]
    # Each piece of a streamed answer has what is new; without, it has all tokens so far, and their log-probabilities.
    out += ["--incremental-streaming-output"]
    if spec.tensor_parallel > 1:
        out += ["--tp", str(spec.tensor_parallel)]
    if spec.cpu:
        # Without a bound it takes a part of the host's memory for the cache, and takes its time to fill it.
        out += [*CPU_ARGUMENTS, "--max-total-tokens", str(spec.max_num_seqs * spec.max_model_len)]
    if spec.weight_transfer:
        out += ["--custom-weight-loader", sglang.LOADER]
    if keys_path:
        out += ["--config", keys_path]
    return out + list(spec.args)


def keys(spec: ServerSpec) -> str:
    """What goes into a file that only we can read (SGLang knows no other way but the command line, which everybody on the
    host can read); empty without keys. YAML, of which JSON is a part."""
    found = {"api-key": spec.api_key, "admin-api-key": spec.admin_key}
    present = {name: value for name, value in found.items() if value}
    return json.dumps(present) if present else ""


def environment(base: Mapping[str, str], spec: ServerSpec, cores: Sequence[int]) -> dict[str, str]:
    """The server's environment but for the run key, made of ``base``. ``cores``: those that this process may use."""
    out = without_torchrun(base) | {"HF_HUB_OFFLINE": "1"}
    # Otherwise /health generates a token: it would take its turn behind rollouts and call a paused server unhealthy, which then
    # stays so. It answers 503 until the first tokens were generated either way.
    out["SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION"] = "0"
    if spec.cpu:
        out |= {"CUDA_VISIBLE_DEVICES": "", "SGLANG_USE_CPU_ENGINE": "1"}
    if spec.shares_cores:
        out |= few_threads(spec)
    if spec.cpu and spec.tensor_parallel > 1:
        # SGLang wants a NUMA node per rank, or to be told.
        out["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(str(cores[rank % len(cores)]) for rank in range(spec.tensor_parallel))
    out |= dict(spec.env)
    if spec.cpu:
        out["PYTHONPATH"] = os.pathsep.join(filter(None, (sglang_cpu.directory(), out.get("PYTHONPATH", ""))))
    return out
