"""Shard tied embeddings by FSDP2 with torch >= 2.12. Needed on every device."""

from importlib import metadata
from typing import Any

from titan_grpo.patches.versions import Range, inside, release, require

WHY = (
    "torchtitan shards tok_embeddings and [norm, output] as two FSDP groups; with tied weights both"
    " manage one parameter, which torch >= 2.12 refuses: Parameter 'None' is shared with a"
    " parameter already managed by another FSDP group"
)
APPLIES_TO: Range = ("torchtitan", "0.2.2", "0.3")
TORCH: Range = ("torch", "2.12", "2.16")
DELETE_WHEN = "torchtitan < 0.3 is no longer supported (0.3 groups the three modules itself)"

_MODULES = ("tok_embeddings", "norm", "output")


def _shard_together(model: Any, mesh: Any, kwargs: dict[str, Any]) -> list[Any]:
    """Shard the three modules as one FSDP group, with the original's policies."""
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    modules = [getattr(model, name) for name in _MODULES]
    options: dict[str, Any] = (
        {"offload_policy": CPUOffloadPolicy()} if kwargs.get("cpu_offload") else {}
    )
    policy = MixedPrecisionPolicy(
        param_dtype=kwargs["param_dtype"], reduce_dtype=kwargs["reduce_dtype"]
    )
    # The group has the first and the last layer: backward begins with it right after forward. Do
    # not reshard by default.
    reshard = kwargs.get("reshard_after_forward_policy", "default") == "always"
    fully_shard(modules, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard, **options)
    return modules


def _grouping(original: Any) -> Any:
    def apply_fsdp(model: Any, dp_mesh: Any, **kwargs: Any) -> None:
        if not getattr(model, "enable_weight_tying", False):
            original(model, dp_mesh, **kwargs)
            return
        modules = _shard_together(model, dp_mesh, kwargs)
        # The original skips modules that are None, and its root group does not get their
        # parameters.
        for name in _MODULES:
            setattr(model, name, None)
        try:
            original(model, dp_mesh, **kwargs)
        finally:
            for name, module in zip(_MODULES, modules, strict=True):
                setattr(model, name, module)
        # The original has turned off gradient division of all modules but these three.
        for module in modules:
            module.set_gradient_divide_factor(1.0)

    apply_fsdp.titan_grpo_original = original  # type: ignore[attr-defined]
    return apply_fsdp


def apply() -> bool:
    """Make torchtitan's qwen3 shard the three tied modules as one group; return whether it does.
    Torch < 2.12 needs no patch.

    Imports torchtitan: without an accelerator, apply the CPU patches first.

    Raises:
        UpstreamError: the version of torchtitan or torch is not in its range.
    """
    version = metadata.version("torch")
    if not inside(version, TORCH) and release(version) < release(TORCH[1]):
        return False
    require(TORCH, __name__)
    require(APPLIES_TO, __name__)
    import torchtitan.models.qwen3.infra.parallelize as parallelize

    if not hasattr(parallelize.apply_fsdp, "titan_grpo_original"):
        parallelize.apply_fsdp = _grouping(parallelize.apply_fsdp)
    return True
