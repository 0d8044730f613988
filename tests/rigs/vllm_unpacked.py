"""A plugin that has vLLM's CPU backend compute with its weights as they are loaded, as it does on
GPUs: without it each layer packs them into memory that no copy reaches."""

import os
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

ROOT = Path(__file__).resolve().parents[2]
NAME = "titan_grpo_unpacked"


def install(folder: Path) -> dict[str, str]:
    """Write the plugin into ``folder``; the environment of a server that uses it."""
    info = folder / f"{NAME}-0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {NAME}\nVersion: 0\n")
    entry = f"[vllm.general_plugins]\n{NAME} = {__name__}:start\n"
    (info / "entry_points.txt").write_text(entry)
    paths = str(folder), str(ROOT), os.environ.get("PYTHONPATH")
    return {"PYTHONPATH": os.pathsep.join(filter(None, paths))}


def start() -> None:
    """In a process of vLLM."""
    from vllm.model_executor.layers import utils
    from vllm.model_executor.layers.fused_moe.experts import cpu_moe

    utils.dispatch_cpu_unquantized_gemm = _keep_linear
    cpu_moe.CPUUnquantizedExperts.process_weights_after_loading = _keep_experts
    cpu_moe.CPUUnquantizedExperts.apply = _apply_experts


def _keep_linear(layer: Any, remove_weight: bool) -> None:
    layer.cpu_linear = functional.linear


def _keep_experts(self: Any, layer: Any) -> None:
    pass


def _apply_experts(
    self: Any, output: torch.Tensor, hidden_states: torch.Tensor, *places: Any, **names: Any
) -> None:
    """Each expert by itself: gate and up projection, SiLU, down projection."""
    given = dict(zip(("w1", "w2", "topk_weights", "topk_ids"), places, strict=False)) | names
    chosen = given["topk_ids"]
    output.zero_()
    for expert in chosen.unique().tolist():
        rows, at = (chosen == expert).nonzero(as_tuple=True)
        gate, up = functional.linear(hidden_states[rows], given["w1"][expert]).chunk(2, -1)
        down = functional.linear(functional.silu(gate) * up, given["w2"][expert])
        output.index_add_(0, rows, down * given["topk_weights"][rows, at, None].to(down.dtype))
