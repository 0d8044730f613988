"""What of a config.json decides a model's results and cannot be seen in the shapes of its weights.

Equal weights under another RoPE scaling, norm or number of active experts are another policy. No
digest shows it, so a server says at joining in which of these fields it differs from the trainer.
"""

from collections.abc import Mapping
from typing import Any

FIELDS = (
    "model_type",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "hidden_act",
    "rms_norm_eps",
    "layer_norm_eps",
    "tie_word_embeddings",
    "num_experts_per_tok",
    "norm_topk_prob",
    "routed_scaling_factor",
    "attn_logit_softcapping",
    "final_logit_softcapping",
)

ROPE = "rope"
"""Prefix of the fields of rotary embeddings, which config.json has in several forms."""


def essential(config: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that decide, in one form; those that are absent or null are left out.

    ``config``: the content of a config.json, of any age, or an engine's copy of it. Of a model with
    several parts the text's is read.

    >>> essential({"hidden_act": "silu", "rope_theta": 1e6, "rope_scaling": None, "vocab_size": 8})
    {'hidden_act': 'silu', 'rope.rope_theta': 1000000.0, 'rope.rope_type': 'default'}
    """
    config = config.get("text_config") or config
    out = {name: config[name] for name in FIELDS if config.get(name) is not None}
    if config.get("use_sliding_window", True) and config.get("sliding_window") is not None:
        out["sliding_window"] = config["sliding_window"]
    # transformers 5 has both in rope_parameters; older ones have the base beside rope_scaling.
    given = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    # The older name of the type: where an engine's copy has both, rope_type is what it computes.
    kind = given.pop("type", "default")
    rope = {"rope_theta": config.get("rope_theta"), "rope_type": kind} | given
    if rope["rope_theta"] is not None:
        out |= {f"{ROPE}.{name}": value for name, value in rope.items() if value is not None}
    return out


def difference(trainers: Mapping[str, Any], servers: Mapping[str, Any]) -> str:
    """The fields in which two results of ``essential`` differ, for people; empty if in none. What
    only one of them names is not compared, apart from sliding_window and the type of RoPE scaling.
    """
    one_sided = {"sliding_window"} if trainers and servers else set()
    fields = sorted((trainers.keys() & servers.keys()) | one_sided & {*trainers, *servers})
    return ", ".join(
        f"{name} {servers.get(name)!r} (the trainer: {trainers.get(name)!r})"
        for name in fields
        if trainers.get(name) != servers.get(name)
    )
