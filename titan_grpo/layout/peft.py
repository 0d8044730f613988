"""Low-rank adapters: names and configuration as PEFT stores them, and rows of a weight with its
adapter added, made when they are copied."""

from collections.abc import Iterable
from typing import Any

import torch

from titan_grpo.layout.manifest import Manifest

PREFIX = "base_model.model."
"""What PEFT puts before a layer's name in the base model's checkpoint."""


def tensor_name(layer: str, end: str) -> str:
    """Name of A or B (``end``) of a layer.

    >>> tensor_name("model.layers.0.self_attn.q_proj", "A")
    'base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight'
    """
    return f"{PREFIX}{layer}.lora_{end}.weight"


def layer_of(name: str) -> str:
    """Inverse of ``tensor_name``, without the end."""
    return name.removeprefix(PREFIX).rpartition(".lora_")[0]


def has_adapters(manifest: Manifest) -> bool:
    """Whether an image is of adapters, and not of a model."""
    return manifest.tensors[0].name.startswith(PREFIX)


def adapter_config(
    rank: int, alpha: float, targets: Iterable[str], base_model: str = ""
) -> dict[str, Any]:
    """Content of adapter_config.json."""
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        "r": rank,
        "lora_alpha": alpha,
        "target_modules": sorted(targets),
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "modules_to_save": None,
        "init_lora_weights": True,
        "use_rslora": False,
        "use_dora": False,
    }


class MergedRows:
    """``base + scale * up @ down`` of one shard, seen as a matrix of which rows can be picked.

    The sum is made in float64, a few rows at a time: its rounding to the image's type is then the
    same however the rows are cut over ranks and pieces, and a shard needs no second copy of itself.
    """

    dtype = torch.float64

    def __init__(
        self, base: torch.Tensor, up: torch.Tensor, down: torch.Tensor, scale: float
    ) -> None:
        """``base`` [m, n]; ``up`` [m, rank]; ``down`` [rank, n]; of any floating-point type, on one
        device."""
        self._base, self._up, self._down, self._scale = base, up, down, scale

    def element_size(self) -> int:
        """Bytes of an element of what is made."""
        return self.dtype.itemsize

    def __getitem__(self, rows: slice | torch.Tensor) -> torch.Tensor:
        """float64 [rows, n]."""
        up = self._up[rows].to(self.dtype)
        return torch.addmm(
            self._base[rows].to(self.dtype), up, self._down.to(self.dtype), alpha=self._scale
        )
