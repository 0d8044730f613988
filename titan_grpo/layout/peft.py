"""Low-rank adapters: names and configuration as PEFT stores them, and rows of a weight merged with
its adapter, computed while they are copied."""

from collections.abc import Iterable
from typing import Any

import torch

from titan_grpo.layout.manifest import Manifest

PREFIX = "base_model.model."
"""PEFT's prefix to a layer's name in the base model's checkpoint."""


def tensor_name(layer: str, end: str) -> str:
    """Return the name of A or B (``end``) of a layer.

    >>> tensor_name("model.layers.0.self_attn.q_proj", "A")
    'base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight'
    """
    return f"{PREFIX}{layer}.lora_{end}.weight"


def layer_of(name: str) -> str:
    """Return the layer of a ``tensor_name``."""
    return name.removeprefix(PREFIX).rpartition(".lora_")[0]


def has_adapters(manifest: Manifest) -> bool:
    """Return whether an image has adapters instead of a model."""
    return manifest.tensors[0].name.startswith(PREFIX)


def adapter_config(
    rank: int, alpha: float, targets: Iterable[str], base_model: str = ""
) -> dict[str, Any]:
    """Return the content of adapter_config.json."""
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
    """``base + scale * up @ down`` of one shard, as a matrix with selectable rows.

    The sum is computed in float64, a few rows at a time: it then rounds to the image's dtype in the
    same way however rows are split over ranks and pieces, and the shard needs no merged copy.
    """

    dtype = torch.float64

    def __init__(
        self, base: torch.Tensor, up: torch.Tensor, down: torch.Tensor, scale: float
    ) -> None:
        """``base`` [m, n]; ``up`` [m, rank]; ``down`` [rank, n]; of any floating-point type, on one
        device."""
        self._base, self._up, self._down, self._scale = base, up, down, scale

    def element_size(self) -> int:
        """Return the bytes of an element of the sum."""
        return self.dtype.itemsize

    def __getitem__(self, rows: slice | torch.Tensor) -> torch.Tensor:
        """Return float64 [rows, n]."""
        up = self._up[rows].to(self.dtype)
        return torch.addmm(
            self._base[rows].to(self.dtype), up, self._down.to(self.dtype), alpha=self._scale
        )
