"""torch.distributed.set_timeout for torch < 2.14: torchtitan 0.3 calls it after the first step."""

from datetime import timedelta
from importlib import metadata

import torch.distributed as dist
from torch.distributed.distributed_c10d import _set_pg_timeout

from titan_grpo.patches.versions import Range, release, require

WHY = "torchtitan 0.3 calls torch.distributed.set_timeout, which came with torch 2.14"
APPLIES_TO: Range = ("torch", "2.13", "2.14")
DELETE_WHEN = "torch < 2.14 is no longer supported with torchtitan 0.3"


def set_timeout(timeout: timedelta, group: dist.ProcessGroup | None = None) -> None:
    """Set the timeout of a process group; None: the default group."""
    _set_pg_timeout(timeout, group)


def apply() -> bool:
    """Add the function, unless torch has it; return whether it is ours.

    Raises:
        UpstreamError: torch is too old for torchtitan 0.3.
    """
    if hasattr(dist, "set_timeout"):
        return dist.set_timeout is set_timeout
    if release(metadata.version("torch")) < release(APPLIES_TO[2]):
        require(APPLIES_TO, __name__)
    dist.set_timeout = set_timeout  # type: ignore[attr-defined]
    return True
