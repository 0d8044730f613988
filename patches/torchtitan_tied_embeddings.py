"""Tied embeddings under FSDP2 with torch >= 2.12. Needed on every device."""

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
    """One FSDP group for the three modules, with the policies that the original would have used."""
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    modules = [getattr(model, name) for name in _MODULES]
    options: dict[str, Any] = (
        {"offload_policy": CPUOffloadPolicy()} if kwargs.get("cpu_offload") else {}
    )
    policy = MixedPrecisionPolicy(
        param_dtype=kwargs["param_dtype"], reduce_dtype=kwargs["reduce_dtype"]
    )
    # The group holds the first and the last layer, so its weights are needed again at once: do not
    # reshard by default.
    reshard = kwargs.get("reshard_after_forward_policy", "default") == "always"
    fully_shard(modules, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard, **options)
    return modules


def _grouping(original: Any) -> Any:
    def apply_fsdp(model: Any, dp_mesh: Any, **kwargs: Any) -> None:
        if not getattr(model, "enable_weight_tying", False):
            original(model, dp_mesh, **kwargs)
            return
        modules = _shard_together(model, dp_mesh, kwargs)
        # The original skips modules that are None; the root group is then left with nothing of
        # theirs to manage.
        for name in _MODULES:
            setattr(model, name, None)
        try:
            original(model, dp_mesh, **kwargs)
        finally:
            for name, module in zip(_MODULES, modules, strict=True):
                setattr(model, name, module)
        # The original turned gradient division off while it could not see these three.
        for module in modules:
            module.set_gradient_divide_factor(1.0)

    apply_fsdp.titan_grpo_original = original  # type: ignore[attr-defined]
    return apply_fsdp


def apply() -> bool:
    """Shard the tied trio as one group in torchtitan's qwen3; nothing with torch < 2.12, which
    accepts the original.

    Imports torchtitan: on a machine without an accelerator the CPU patches come first.

    Raises:
        UpstreamError: the version of torchtitan, or of torch, is one that this was not written for.
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
