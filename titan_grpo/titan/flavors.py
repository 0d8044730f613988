"""Flavors of torchtitan's models: those of ``titan.tiny``, the one of a config.json, and changes to
model arguments that weight sync needs."""

import difflib
import logging
from collections.abc import Mapping
from typing import Any

from titan_grpo.errors import ConfigError
from titan_grpo.receive.checkpoint import ROPE, difference, essential
from titan_grpo.titan import compat
from titan_grpo.titan.rules import ASSETS, attention_violation, experts_of
from titan_grpo.titan.tiny import Kind

logger = logging.getLogger(__name__)

FLAVORS: dict[Kind, tuple[str, str]] = {
    "qwen3": ("qwen3", "grpo_tiny"),
    "qwen3_untied": ("qwen3", "grpo_tiny_untied"),
    "qwen3_moe": ("qwen3", "grpo_tiny_moe"),
    "llama3": ("llama3", "grpo_tiny"),
}
"""kind of ``write_tiny_model`` -> (model.name, model.flavor)."""


def disable_unexported_buffers(model_args: Any, adapter: Any) -> None:
    """Turn off an MoE's load balancing bias, with a warning, if the model's StateDictAdapter cannot
    export it. Changes the arguments in place.

    The bias changes routing. An engine without it would sample from another model than the trained
    one, and no digest would show that.
    """
    moe = experts_of(model_args)
    if getattr(moe, "load_balance_coeff", None) is None:
        return
    table = getattr(adapter, "from_hf_map", {})
    if any(
        hf_name is not None and str(name).endswith("expert_bias") for hf_name, name in table.items()
    ):
        return
    for each in getattr(model_args, "all_moe_args", [moe]):
        each.load_balance_coeff = None
    logger.warning(
        "the MoE load balancing bias is off: servers cannot receive it, and they would route"
        " otherwise"
    )


def model_of(name: str, flavor: str) -> tuple[Any, Any]:
    """Return a model's spec and the arguments of its flavor. Raises ConfigError if torchtitan does
    not have it, or no servers' names of its parameters."""
    upstream = compat.upstream()
    try:
        spec = upstream.get_spec(name)
    except ValueError as error:
        raise ConfigError(f"model.name must be {upstream.KNOWN}, got {name!r:.200}") from error
    if spec.state_dict_adapter is None:
        raise ConfigError(
            "model.name must be a model with a Hugging Face state dict adapter (the servers' names"
            f" come from it), got {name!r:.200}"
        )
    if flavor not in spec.model_args:
        close = difflib.get_close_matches(flavor, list(spec.model_args), n=1)
        hint = f" (did you mean {close[0]!r}?)" if close else ""
        raise ConfigError(
            f"model.flavor must be one of {', '.join(sorted(spec.model_args))} for {name}, got"
            f" {flavor!r}{hint}"
        )
    args = spec.model_args[flavor]
    if hasattr(args, "expert_parallel_comm_backend") and not hasattr(args, "moe_impl"):
        # deepseek_v3 cannot be built without: torchtitan sets it as it reads a job
        args.moe_impl = args.expert_parallel_comm_backend
    return spec, args


MODELS = {"qwen3": "qwen3", "qwen3_moe": "qwen3", "llama": "llama3"}
"""``model_type`` of a config.json -> torchtitan's name of the model."""

SIZES = {
    "dim": "hidden_size",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "n_kv_heads": "num_key_value_heads",
    "vocab_size": "vocab_size",
}
"""Size in torchtitan's model arguments -> its key in a config.json."""


def flavor_of(settings: Mapping[str, Any]) -> tuple[str, str]:
    """Return (model.name, model.flavor) of the torchtitan model with the sizes of a config.json.
    Raises ConfigError if there is none."""
    compat.prepare()
    kind = str(settings.get("model_type"))
    sizes = {ours: settings.get(theirs) for ours, theirs in SIZES.items()}
    # Of models whose heads all have their own keys, either side may leave the number out.
    sizes["n_kv_heads"] = sizes["n_kv_heads"] or sizes["n_heads"]
    tied = bool(settings.get("tie_word_embeddings", False))
    spec: Any = compat.upstream().get_spec(MODELS[kind]) if kind in MODELS else None
    for flavor in spec.model_args if spec is not None else ():
        args = spec.model_args[flavor]
        given = {name: getattr(args, name) for name in sizes}
        given["n_kv_heads"] = given["n_kv_heads"] or given["n_heads"]
        same = given == sizes
        same &= getattr(args, "moe_enabled", False) == (kind == "qwen3_moe")
        same &= getattr(args, "enable_weight_tying", tied) == tied
        if same and not attention_violation(flavor, args):
            return MODELS[kind], flavor
    shown = ", ".join(f"{name} {size!r}" for name, size in sizes.items())
    raise ConfigError(
        f"no model of torchtitan has the sizes of config.json (model_type {kind!r}, {shown}): name"
        f" it (--flavor NAME/FLAVOR); sizes of {', '.join(MODELS)} are compared"
    )


COMPUTING = {"head_dim": "head_dim", "norm_eps": "rms_norm_eps", "rope_theta": f"{ROPE}.rope_theta"}
"""What changes a model's results, in torchtitan's model arguments -> its name in ``essential``."""

ACTIVE = "num_experts_per_tok"
ROUTING = {"top_k": ACTIVE, "route_norm": "norm_topk_prob", "route_scale": "routed_scaling_factor"}
"""The same of a layer of experts."""

SCALING = {"scaling_factor": f"{ROPE}.factor"} | {
    name: f"{ROPE}.{name}"
    for name in ("low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
}
"""The same of scaled rotary embeddings."""


FIXED = {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False}
"""What all models of torchtitan have with which a job can run, by its name in a config.json."""

LEFT_OUT = {
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "norm_topk_prob": False,
    "tie_word_embeddings": False,
}
"""What transformers, and so the engines, take for a key that a config.json of MODELS lacks."""


def _values(given: Any, names: Mapping[str, str]) -> dict[str, Any]:
    found = {theirs: getattr(given, ours, None) for ours, theirs in names.items()}
    return {name: value for name, value in found.items() if value is not None}


def other_model(key: str, flavor: str, model_args: Any, config: Mapping[str, Any]) -> str:
    """Return why a flavor is not the model of ``config``, the config.json of the folder that
    ``key`` names, or ""."""
    ours = FIXED | _values(model_args, SIZES | COMPUTING)
    ours["tie_word_embeddings"] = getattr(model_args, "enable_weight_tying", False)
    if (moe := experts_of(model_args)) is not None:
        # torchtitan 0.3 has these in the router.
        ours |= _values(getattr(moe, "router", moe), ROUTING)
    if (scaling := getattr(model_args, "rope_scaling_args", None)) is not None:
        # torchtitan's llama3 always scales.
        ours |= {f"{ROPE}.rope_type": "llama3"} | _values(scaling, SCALING)
    elif not hasattr(model_args, "rope_factor"):  # deepseek_v3 scales past a length of its own
        ours[f"{ROPE}.rope_type"] = "default"
    text = config.get("text_config") or config
    if text.get("model_type") in MODELS:
        text = {**LEFT_OUT, **text}
    theirs = {name: text[name] for name in (*SIZES.values(), *FIXED) if name in text}
    theirs |= essential(text)
    if theirs:
        # A dense model has none: a key of one side only is not compared.
        ours, theirs = {ACTIVE: 0, **ours}, {ACTIVE: 0, **theirs}
    found = difference(ours, theirs)
    so = (
        "servers would sample from another policy than is trained"
        if key == ASSETS
        else "the trainer would compute with other settings than those of the weights"
    )
    return found and (
        f"model.flavor must be the model of {key}, {flavor!r} is another one: {so}; config.json has"
        f" {found}"
    )


def parameters_of(name: str, flavor: str) -> int:
    """Return the number of parameters of torchtitan's model ``name/flavor``, tied ones once, from a
    model on the meta device. Raises ConfigError for an unknown model."""
    compat.prepare()
    import torch

    spec, args = model_of(name, flavor)
    with torch.device("meta"):
        model = spec.model_cls(args)
    return sum(p.numel() for p in model.parameters())
