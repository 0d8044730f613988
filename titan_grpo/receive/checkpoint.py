"""Whether a server's model is the trainer's: the names and shapes of its checkpoint, and what of a
config.json decides a model's results and cannot be seen in shapes.

Equal weights under another RoPE scaling, norm or number of active experts are another policy. No
digest shows it, so a server says at joining in which of these fields it differs from the trainer.
"""

import json
import logging
import struct
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from titan_grpo.errors import DataError
from titan_grpo.layout.manifest import Manifest, listed

Shape = tuple[int, ...]

INDEX = "model.safetensors.index.json"
MAX_HEADER = 100 << 20
"""Largest header that safetensors itself accepts, in bytes."""

NEVER_SENT = (".inv_freq", ".masked_bias", ".attn.bias")
"""Ends of names that old checkpoints hold and every engine computes itself."""


log = logging.getLogger("titan_grpo.receive")


def checkpoint_folder(model: str, revision: str | None) -> Path:
    """Where a model's files lie: the directory itself, or its place in the hub's cache (nothing is
    downloaded)."""
    if Path(model).is_dir():
        return Path(model)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        return Path(snapshot_download(model, revision=revision, local_files_only=True))
    except (LocalEntryNotFoundError, ValueError):
        return Path(model)


class CheckpointNames:
    """Reads the checkpoint when the first manifest comes, not at the server's start."""

    def __init__(self, model: str, revision: str | None, tied: bool) -> None:
        """``model``: directory or hub name. ``tied``: embedding and head are one matrix."""
        self.model, self._revision, self._tied = model, revision, tied

    @cached_property
    def shapes(self) -> Mapping[str, Shape]:
        """Names and shapes; empty if there are no safetensors files to compare with. DataError for
        a damaged checkpoint."""
        shapes = checkpoint_shapes(checkpoint_folder(self.model, self._revision))
        if not shapes:
            log.info("names are not compared: no safetensors files at %s", self.model)
        return shapes

    def problem(self, manifest: Manifest) -> str:
        """See coverage_problem; empty too where there is nothing to compare with."""
        return coverage_problem(manifest, self.shapes, self._tied) if self.shapes else ""


def read_header(path: Path) -> dict[str, Shape]:
    """Names and shapes in one safetensors file. ValueError, KeyError and the like if it is none."""
    with path.open("rb") as file:
        start = file.read(8)
        size = struct.unpack("<Q", start)[0] if len(start) == 8 else MAX_HEADER + 1
        if size > MAX_HEADER:
            raise ValueError("its header has no valid length")
        entries = json.loads(file.read(size))
    entries.pop("__metadata__", None)
    return {name: tuple(map(int, entry["shape"])) for name, entry in entries.items()}


def checkpoint_shapes(folder: Path) -> dict[str, Shape]:
    """Names and shapes of all tensors of a checkpoint directory; empty if it holds no safetensors.

    DataError that names the file if one is damaged.
    """
    path = folder / INDEX
    try:
        if path.exists():
            files = sorted(set(json.loads(path.read_text())["weight_map"].values()))
        else:
            files = sorted(path.name for path in folder.glob("*.safetensors"))
        shapes: dict[str, Shape] = {}
        for name in files:
            path = folder / name
            shapes |= read_header(path)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(
            f"{path} must be a file of a safetensors checkpoint, reading it gave {error!r}: tensor"
            " names cannot be compared; restore the file, the next version reads it again"
        ) from error
    return shapes


def coverage_problem(manifest: Manifest, wanted: Mapping[str, Shape], tied: bool) -> str:
    """Why the manifest does not cover the model exactly; empty if it does. Pure.

    ``tied``: the model has one matrix for embedding and head, so ``lm_head.weight`` may be on
    either side.

    Worked example: wanted {"a": (2,), "b": (3,)}, manifest {"a": (2,), "c": (1,)} ->
    "... unknown to the server: c; missing: b ...".
    """
    optional = {"lm_head.weight"} if tied else set()
    sent = {spec.name: spec.shape for spec in manifest.tensors}
    unknown = sorted(sent.keys() - wanted.keys() - optional)
    missing = sorted(
        n for n in wanted.keys() - sent.keys() - optional if not n.endswith(NEVER_SENT)
    )
    other = [
        f"{n} {sent[n]} instead of {wanted[n]}"
        for n in sorted(sent.keys() & wanted.keys())
        if sent[n] != wanted[n]
    ]
    found = {"unknown to the server": unknown, "missing": missing, "of another shape": other}
    if not (differ := listed(found)):
        return ""
    return (
        f"the trainer's tensors are not those of the server's model ({differ}): serve the model"
        " that is trained"
    )


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
