"""The server of a verification: its devices, and the plugin that records its commits."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from titan_grpo.engines.launch import ServerSpec
from titan_grpo.errors import ConfigError
from titan_grpo.verify import recording

STARTUP_S = 300.0
GPU_SHARE = "0.3"
"""Share of a GPU's memory: on two GPUs the server shares the second with a trainer rank."""

GPU_ARGUMENTS: dict[str, list[str]] = {
    "vllm": ["--gpu-memory-utilization", GPU_SHARE, "--enforce-eager"],
    "sglang": ["--mem-fraction-static", GPU_SHARE],
}


@dataclass(frozen=True, slots=True)
class Devices:
    """Devices of trainer and server. With CUDA the server gets ``server_gpu``, which is rank 0's
    only where there is no other."""

    kind: str
    server_gpu: int = 0
    one_nccl: bool = True
    """Whether trainer and server have one version of NCCL."""

    @property
    def transport(self) -> str:
        """The lane's transport. NCCL refuses two ranks on one GPU, and rank 0 has GPU 0."""
        return "nccl" if self.server_gpu > 0 and self.one_nccl else "auto"

    def trainer_environment(self, env: Mapping[str, str]) -> dict[str, str]:
        """Return ``env`` with the settings for torchrun."""
        out = {**env, "OMP_NUM_THREADS": "1"}
        return out | ({"CUDA_VISIBLE_DEVICES": ""} if self.kind == "cpu" else {})


def choose_devices(wanted: str, gpus: int, ranks: int) -> Devices:
    """Return the devices for ``wanted`` (auto, cpu or cuda) on a host with ``gpus`` GPUs. Pure.
    Raises ConfigError if CUDA cannot be used.

    >>> [choose_devices("cuda", n, n).server_gpu for n in (1, 2)]
    [0, 1]
    """
    if wanted == "cpu" or (wanted == "auto" and gpus < 2):
        return Devices("cpu")
    if gpus < ranks:
        raise ConfigError(
            f"--device cuda needs a GPU per rank ({ranks}), this host has {gpus}: use --device cpu"
        )
    return Devices("cuda", min(ranks, gpus - 1))


def server_spec(spec: ServerSpec, out: Path, devices: Devices) -> ServerSpec:
    """Return a server on its device that records its commits to ``recorded(out)``. Writes the
    plugin into ``out``."""
    plugin, cpu = out / "server_plugin", devices.kind == "cpu"
    recording.install(plugin.resolve(), recorded(out).resolve())
    paths = (str(plugin.resolve()), os.environ.get("PYTHONPATH", ""))
    env = {**spec.env, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    if not cpu:
        number, visible = devices.server_gpu, os.environ.get("CUDA_VISIBLE_DEVICES")
        # torch counts the GPUs that this process may use.
        env["CUDA_VISIBLE_DEVICES"] = visible.split(",")[number].strip() if visible else str(number)
    args = spec.args if cpu else (*GPU_ARGUMENTS[spec.engine], *spec.args)
    return replace(spec, cpu=cpu, args=args, env=env)


def recorded(out: Path) -> Path:
    """Return the file that the server's recorder writes."""
    return out / "server_commits.jsonl"
