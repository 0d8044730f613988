"""Let selective checkpointing of single operations hold FSDP's modules. Needed on every device."""

from titan_grpo.patches.versions import Range, require

WHY = (
    "torch 2.13 counts a profiler's markers as operations of a selectively checkpointed region, and"
    " FSDP sets more of them as it computes again: under expert parallelism, whose experts are a"
    " module of FSDP in each layer, the first backward ends in a RuntimeError"
)
APPLIES_TO: Range = ("torch", "2.11", "2.16")
DELETE_WHEN = "torch.utils.checkpoint.SAC_IGNORED_OPS has them"


def apply() -> None:
    """Leave the markers out of what is counted. Idempotent.

    Raises:
        UpstreamError: torch's version is not in ``APPLIES_TO``.
    """
    require(APPLIES_TO, __name__)
    import torch
    from torch.utils.checkpoint import SAC_IGNORED_OPS

    markers = torch.ops.profiler
    SAC_IGNORED_OPS |= {
        markers._record_function_enter_new.default,
        markers._record_function_exit._RecordFunction,
    }
