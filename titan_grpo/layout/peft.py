"""Names and configuration of adapters as PEFT stores them. Standard library only."""

from collections.abc import Iterable
from typing import Any

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
