"""Let FSDP gather a module's weights inside a region under selective checkpointing. Needed on every
device."""

from typing import Any

from titan_grpo.patches.versions import Range, require

WHY = (
    "torch counts what FSDP does to gather weights as operations of a selectively checkpointed"
    " region, and FSDP gathers ahead of some regions as they are computed first and in them as they"
    " are computed again: where the experts of an expert-parallel rank are sharded further, the"
    " first backward ends in a RuntimeError (fsdp.all_gather_copy_in is not found in storage)"
)
APPLIES_TO: Range = ("torch", "2.11", "2.16")
DELETE_WHEN = "torch leaves FSDP's operations out of selective checkpointing"


def apply() -> None:
    """Gather outside the region. Idempotent.

    Raises:
        UpstreamError: torch's version is not in ``APPLIES_TO``.
    """
    require(APPLIES_TO, __name__)
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
    from torch.utils import checkpoint
    from torch.utils._python_dispatch import (
        _disable_current_modes,
        _get_current_dispatch_mode_stack,
    )

    if hasattr(FSDPParamGroup.unshard, "titan_grpo_original"):
        return
    regions = checkpoint._CachingTorchDispatchMode, checkpoint._CachedTorchDispatchMode

    def outside(original: Any) -> Any:
        def gather(*args: Any, **kwargs: Any) -> Any:
            if not any(isinstance(mode, regions) for mode in _get_current_dispatch_mode_stack()):
                return original(*args, **kwargs)
            with _disable_current_modes():
                return original(*args, **kwargs)

        gather.titan_grpo_original = original  # type: ignore[attr-defined]
        return gather

    for name in ("unshard", "wait_for_unshard"):
        setattr(FSDPParamGroup, name, outside(getattr(FSDPParamGroup, name)))
