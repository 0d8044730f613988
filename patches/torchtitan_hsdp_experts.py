"""Let replicas of a sharded MoE (HSDP) read and write Hugging Face files. Needed on every
device."""

from typing import Any

from torch.distributed.tensor import Replicate

from titan_grpo.patches.versions import Range, require

WHY = (
    "torchtitan's MoEStateDictAdapter asks each placement of the experts for its dimension, and"
    " Replicate has none: with HSDP every rank ends by an AttributeError when it reads the model's"
    " files or writes such a checkpoint"
)
APPLIES_TO: Range = ("torchtitan", "0.2.2", "0.4")
DELETE_WHEN = "torchtitan leaves Replicate out there, as the function that calls it does"


def apply() -> None:
    """Make the adapters leave replicas out where they look which experts a rank has. Idempotent.

    Raises:
        UpstreamError: torchtitan's version is not in ``APPLIES_TO``.
    """
    require(APPLIES_TO, __name__)
    from torchtitan.models.utils import MoEStateDictAdapter

    original = MoEStateDictAdapter._caculate_indices_from_placements
    if hasattr(original, "titan_grpo_original"):
        return

    def indices(
        self: Any, dim: int, dim_size: int, dtensor_placements: Any, device_mesh: Any
    ) -> tuple[int, int]:
        cut = {
            name: placement
            for name, placement in zip(device_mesh.mesh_dim_names, dtensor_placements, strict=True)
            if not isinstance(placement, Replicate)
        }
        if not cut:
            return 0, dim_size
        shards: tuple[int, int] = original(
            self, dim, dim_size, tuple(cut.values()), device_mesh[tuple(cut)]
        )
        return shards

    indices.titan_grpo_original = original  # type: ignore[attr-defined]
    MoEStateDictAdapter._caculate_indices_from_placements = indices
