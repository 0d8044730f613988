"""TensorBoard and W&B of a pipeline-parallel run. Needed on every device."""

from typing import Any

from titan_grpo.patches.versions import Range, require

WHY = (
    "with pipeline parallelism torchtitan writes metrics on the first rank of the last stage, the"
    " only one that knows its loss; titan_grpo shares the loss with every stage, and rank 0 has the"
    " other figures"
)
APPLIES_TO: Range = ("torchtitan", "0.2.2", "0.3")
DELETE_WHEN = "torchtitan < 0.3 is no longer supported"


def apply() -> None:
    """Let rank 0 write metrics, and no rank warn that its loss cannot be seen.

    Raises:
        UpstreamError: the version of torchtitan is one that this was not written for.
    """
    require(APPLIES_TO, __name__)
    import torchtitan.train
    from torchtitan.components import metrics

    def first_rank(*_: Any) -> int:
        return 0

    def nothing(*_: Any) -> None:
        return None

    metrics._get_metrics_rank = first_rank
    torchtitan.train.ensure_pp_loss_visible = nothing
