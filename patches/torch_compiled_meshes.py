"""Let layers that are computed again in the backward, or kept to a memory budget, be compiled under
tensor parallelism. Needed on every device."""

from typing import Any

from titan_grpo.patches.versions import Range, require

WHY = (
    "compiled layers with tensor parallelism save their mesh of devices for the backward. Where"
    " activation checkpointing has a memory budget, torch asks for the mesh's size, which it cannot"
    " know. On a CPU, where it also saves a state of random numbers for an attention that is"
    " computed again, it puts that state behind the mesh and looks for it before. Either ends every"
    " rank in the first forward"
)
APPLIES_TO: Range = ("torch", "2.11", "2.16")
DELETE_WHEN = "torch's partitioners put these states before meshes, and give a mesh no size"


def apply(on_cpu: bool) -> None:
    """Count a mesh as of no size, and on a CPU save no state of random numbers: no model of
    torchtitan draws any. Idempotent.

    Raises:
        UpstreamError: torch's version is not in ``APPLIES_TO``.
    """
    require(APPLIES_TO, __name__)
    from torch._functorch import config
    from torch._functorch import partitioners as modules

    partitioners: Any = modules

    if hasattr(config, "unsafe_treat_script_objects_as_zero_size"):
        config.unsafe_treat_script_objects_as_zero_size = True
    if on_cpu:
        partitioners.has_recomputable_rng_ops = _none


def _none(_graph: Any) -> bool:
    return False
