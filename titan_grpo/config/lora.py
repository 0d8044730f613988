"""The keys of [lora].

No ``from __future__ import annotations`` in this file: torchtitan's merge reads field types as
objects.
"""

from dataclasses import dataclass, field
from typing import Literal

from titan_grpo.config.rollout import Rules

LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""The linear layers of a block of a dense model, as Hugging Face names them."""


@dataclass
class Lora:
    """Low-rank adapters (arXiv 2106.09685) in place of training every weight: W + alpha / rank *
    B A, of which B and A are trained. A job without this section has none."""

    rank: int = 0
    """Rows of A and columns of B, 1 or more; without the section 0: every weight is trained."""

    alpha: float = 16.0
    """The product of B and A counts alpha / rank times."""

    targets: list[str] = field(default_factory=lambda: list(LINEAR))
    """Linear layers that get an adapter, by the last part of their names in a Hugging Face
    checkpoint, in every block that has them."""

    sync: Literal["merged", "adapter"] = "merged"
    """What a version is. merged: the whole weights, with the adapters added. adapter: the adapters
    alone; the servers have the base model, and load each version by their own LoRA (vLLM, started
    with --enable-lora)."""


def lora_rules(lora: Lora) -> Rules:
    """(broken, key, rule) for each rule of the section; a job without it breaks none. Pure."""
    yield lora.rank < 0, "rank", "1 or greater"
    yield lora.alpha <= 0, "alpha", "greater than 0"
    yield not lora.targets, "targets", "one or more layers"
    yield (
        lora.sync == "adapter" and not set(lora.targets) <= set(LINEAR),
        "targets",
        f'of {", ".join(LINEAR)} with lora.sync = "adapter" (servers have adapters of these)',
    )


def sends_adapters(lora: Lora) -> bool:
    """Whether a version is the adapters alone."""
    return lora.rank > 0 and lora.sync == "adapter"
