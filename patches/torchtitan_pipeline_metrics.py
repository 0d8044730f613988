"""Write TensorBoard and W&B metrics of pipeline-parallel runs on rank 0. Needed on every device."""

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
    """Make rank 0 write metrics, and turn off the warning that the loss is not visible.

    Raises:
        UpstreamError: torchtitan's version is not in ``APPLIES_TO``.
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
