"""Check that a server's model is the trainer's: the checkpoint's names and shapes, and the fields
of config.json that change a model's results but not its shapes.

Equal weights under another RoPE scaling, norm or number of active experts are another policy, as
are fewer layers (an engine's option may say so, and SGLang ignores the others' weights). No digest
shows that: at joining the server reports the fields in which it differs from the trainer.
"""

import json
import logging
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from titan_grpo.errors import DataError
from titan_grpo.layout.manifest import Manifest, listed

Shape = tuple[int, ...]

INDEX = "model.safetensors.index.json"
NEVER_SENT = (".inv_freq", ".masked_bias", ".attn.bias")
"""Suffixes of tensors that old checkpoints contain and engines compute."""


log = logging.getLogger("titan_grpo.receive")


def checkpoint_folder(model: str, revision: str | None) -> Path:
    """Return the folder of a model's files: the directory itself, or its folder in the hub's cache
    (nothing is downloaded)."""
    if Path(model).is_dir():
        return Path(model)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        return Path(snapshot_download(model, revision=revision, local_files_only=True))
    except (LocalEntryNotFoundError, ValueError):
        return Path(model)


class CheckpointNames:
    """Names and shapes of a checkpoint, read at their first use (not at the server's start)."""

    def __init__(self, model: str, revision: str | None, tied: bool) -> None:
        """``model``: directory or hub name. ``tied``: embedding and head are one matrix."""
        self.model, self._revision, self._tied = model, revision, tied

    @property
    def absent(self) -> bool:
        """Whether there are no safetensors files with them. An engine's own shards (--load-format
        sharded_state) have its own names, and an index beside them is of other files."""
        folder = checkpoint_folder(self.model, self._revision)
        names = [path.name for path in folder.glob("*.safetensors")]
        if not names:
            return not (folder / INDEX).exists()  # else its files are missing
        return all(name.startswith("model-rank-") for name in names)

    @cached_property
    def shapes(self) -> Mapping[str, Shape]:
        """Names and shapes; empty if they are absent. Raises DataError if the checkpoint is
        damaged."""
        if self.absent:
            log.info("names are not compared: no checkpoint in safetensors files at %s", self.model)
            return {}
        return checkpoint_shapes(checkpoint_folder(self.model, self._revision))

    def problem(self, manifest: Manifest) -> str:
        """See coverage_problem; also empty if the checkpoint has no safetensors files."""
        return coverage_problem(manifest, self.shapes, self._tied) if self.shapes else ""


def checkpoint_shapes(folder: Path) -> dict[str, Shape]:
    """Return names and shapes of all tensors of a checkpoint directory; empty without safetensors
    files. Raises DataError, with the file's name, if one is damaged."""
    path = folder / INDEX
    try:
        if path.exists():
            files = sorted(set(json.loads(path.read_text())["weight_map"].values()))
        else:
            files = sorted(path.name for path in folder.glob("*.safetensors"))
        paths = [folder / name for name in files]
    except Exception as error:  # whatever reading a damaged index leads to
        raise _damaged(path, error) from error
    shapes: dict[str, Shape] = {}
    for path in paths:
        shapes |= file_shapes(path)
    return shapes


def file_shapes(path: Path) -> dict[str, Shape]:
    """Return names and shapes of the tensors of a safetensors file. Raises DataError if it is
    damaged."""
    from safetensors import safe_open

    try:
        path.stat()  # safetensors before 0.8 panics at a name that no file can have
        with safe_open(path, framework="pt") as file:
            names = file.keys()
            return {name: tuple(file.get_slice(name).get_shape()) for name in names}
    except Exception as error:  # whatever reading a damaged file leads to
        raise _damaged(path, error) from error


def _damaged(path: Path, error: Exception) -> DataError:
    return DataError(
        # quoted: a damaged index may name files that no message can
        f"{str(path)!r} must be a file of a safetensors checkpoint, reading it gave {error!r}:"
        " tensor names cannot be compared; restore the file, it is read again when it is needed"
        " next"
    )


def coverage_problem(manifest: Manifest, wanted: Mapping[str, Shape], tied: bool) -> str:
    """Return why the manifest does not cover the model exactly, or "". Pure.

    ``tied``: embedding and head are one matrix, so ``lm_head.weight`` may be on either side only.

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
    "num_hidden_layers",
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
"""Prefix, in ``essential``, of the fields of rotary embeddings (config.json has several forms)."""


def essential(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that decide a model's results, in one form, without absent or null ones.

    ``config``: a config.json of any age, or an engine's copy of it. For a multimodal model the text
    model's part is used.

    >>> essential({"hidden_act": "silu", "rope_theta": 1e6, "rope_scaling": None, "vocab_size": 8})
    {'hidden_act': 'silu', 'rope.rope_theta': 1000000.0, 'rope.rope_type': 'default'}
    """
    config = config.get("text_config") or config
    out = {name: config[name] for name in FIELDS if config.get(name) is not None}
    if config.get("use_sliding_window", True) and config.get("sliding_window") is not None:
        out["sliding_window"] = config["sliding_window"]
    # transformers 5 has both in rope_parameters; older ones have the base beside rope_scaling.
    given = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    # "type" is the older name; if an engine's copy has both, the engine uses rope_type.
    kind = given.pop("type", "default")
    rope = {"rope_theta": config.get("rope_theta"), "rope_type": kind} | given
    if rope["rope_theta"] is not None:
        out |= {f"{ROPE}.{name}": value for name, value in rope.items() if value is not None}
    return out


def difference(trainers: Mapping[str, Any], servers: Mapping[str, Any]) -> str:
    """Return the fields in which two results of ``essential`` differ, as text, or "". A field that
    only one has is not compared, except sliding_window and the type of RoPE scaling."""
    one_sided = {"sliding_window"} if trainers and servers else set()
    fields = sorted((trainers.keys() & servers.keys()) | one_sided & {*trainers, *servers})
    return ", ".join(
        f"{name} {servers.get(name)!r} (the trainer: {trainers.get(name)!r})"
        for name in fields
        if trainers.get(name) != servers.get(name)
    )
