"""Let sharded weights of llama3 read and write Hugging Face files. Needed on every device."""

from importlib import import_module
from typing import Any

from torch.distributed.tensor import DTensor, Replicate

from titan_grpo.patches.versions import Range, inside, require

WHY = (
    "torchtitan's Llama3StateDictAdapter views the rows of wq and wk as heads: with FSDP over more"
    " ranks than divide the heads torch refuses that (Cannot unflatten unevenly sharded tensor),"
    " and with FSDP over TP it takes rows of one place for those of another, so that a wrong k_proj"
    " is loaded, and saved, without an error. 0.3 splits its fused projections whole, and has the"
    " same adapter for separate ones, which LoRA adapters are put on"
)
APPLIES_TO: Range = ("torchtitan", "0.2.2", "0.4")
DELETE_WHEN = "torchtitan's adapter permutes the rows of whole matrices"


def _on_whole(original: Any) -> Any:
    def permute(self: Any, w: Any, *heads_and_sizes: Any) -> Any:
        if not isinstance(w, DTensor):
            return original(self, w, *heads_and_sizes)
        whole = w.redistribute(placements=[Replicate()] * w.device_mesh.ndim)
        # Back to shards of the same rows: a rank reads the files of its own, and has memory for no
        # more than one whole matrix.
        return original(self, whole, *heads_and_sizes).redistribute(placements=w.placements)

    permute.titan_grpo_original = original  # type: ignore[attr-defined]
    return permute


def apply() -> None:
    """Make the adapter permute whole matrices. Idempotent. Imports torchtitan: without an
    accelerator, apply the CPU patches first.

    Raises:
        UpstreamError: torchtitan's version is not in ``APPLIES_TO``.
    """
    three = inside(require(APPLIES_TO, __name__), ("torchtitan", "0.3", "0.4"))
    folder = "llama3" if three else "llama3.model"
    module = import_module(f"torchtitan.models.{folder}.state_dict_adapter")
    Adapter = module.Llama3StateDictAdapter
    if not hasattr(Adapter._permute, "titan_grpo_original"):
        Adapter._permute = _on_whole(Adapter._permute)
        Adapter._reverse_permute = _on_whole(Adapter._reverse_permute)
