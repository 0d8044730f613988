"""Writing a Hugging Face model directory: safetensors shards with their index, and the files beside
them."""

import json
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from titan_grpo.errors import ConfigError

ASSETS = (
    "config.json",
    "generation_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "chat_template*",
    "*.model",
)
"""What belongs to a model besides its weights; files that are not there are left out."""

SHARD_BYTES = 4 << 30
"""Largest shard, unless one tensor is larger; also the host memory that writing takes."""


@dataclass(frozen=True, slots=True)
class Written:
    """What was written: tensors, bytes of their data, files of weights."""

    tensors: int
    nbytes: int
    shards: int


def write_weights(
    tensors: Iterable[tuple[str, torch.Tensor]], out: Path, shard_bytes: int = SHARD_BYTES
) -> Written:
    """Write named tensors, in their order, as one model.safetensors or as shards with
    model.safetensors.index.json.

    The tensors are taken one by one and a shard is written as soon as it is full, so a generator
    needs the memory of one shard only. Tensors that share storage are copied, since the format
    stores each name on its own.
    """
    where: dict[str, int] = {}
    total = pending_bytes = shards = 0
    pending: dict[str, torch.Tensor] = {}

    def flush() -> None:
        nonlocal pending, pending_bytes, shards
        save_file(pending, out / f"shard-{shards}.partial", metadata={"format": "pt"})
        pending, pending_bytes, shards = {}, 0, shards + 1

    for name, tensor in tensors:
        nbytes = tensor.numel() * tensor.element_size()
        if pending and pending_bytes + nbytes > shard_bytes:
            flush()
        # clone: a view of a stacked parameter would drag its whole storage along, which safetensors
        # refuses.
        pending[name] = tensor.detach().to("cpu").contiguous().clone()
        where[name], pending_bytes, total = shards, pending_bytes + nbytes, total + nbytes
    flush()
    files = (
        ["model.safetensors"]
        if shards == 1
        else [f"model-{n:05}-of-{shards:05}.safetensors" for n in range(1, shards + 1)]
    )
    # The names hold the number of shards, which is known only now.
    for number, file in enumerate(files):
        (out / f"shard-{number}.partial").rename(out / file)
    if shards > 1:
        index = {
            "metadata": {"total_size": total},
            "weight_map": {name: files[shard] for name, shard in where.items()},
        }
        (out / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
    return Written(len(where), total, shards)


def write_adapter(
    tensors: Iterable[tuple[str, torch.Tensor]], out: Path, settings: Mapping[str, Any]
) -> Written:
    """Write an adapter's tensors and ``settings`` as PEFT does; ``out`` is made."""
    out.mkdir(parents=True, exist_ok=True)
    written = write_weights(tensors, out)
    (out / "model.safetensors").rename(out / "adapter_model.safetensors")
    (out / "adapter_config.json").write_text(json.dumps(settings, indent=2) + "\n")
    return written


def read_config(folder: str) -> dict[str, Any]:
    """Content of a model directory's config.json; empty without one. ConfigError if it cannot be
    read."""
    path = Path(folder) / "config.json"
    try:
        config = json.loads(path.read_text()) if path.is_file() else {}
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} must be JSON: {error}") from error
    return dict(config)


def copy_assets(source: Path, out: Path, dtype: str) -> list[str]:
    """Copy configuration and tokenizer, with ``dtype`` as the type in config.json; names of what
    was copied.

    Raises ConfigError if there is no config.json: no engine could load the directory.
    """
    if not (source / "config.json").is_file():
        raise ConfigError(
            f"model.hf_assets_path must be a Hugging Face model directory, {str(source)!r} has no"
            " config.json: no server could load what is exported; point it at the directory of the"
            " base model"
        )
    names = sorted(
        {path.name for pattern in ASSETS for path in source.glob(pattern) if path.is_file()}
    )
    for name in names:
        shutil.copyfile(source / name, out / name)
    config = json.loads((out / "config.json").read_text())
    # transformers renamed the key; whichever the base model uses goes on being used.
    config["dtype" if "dtype" in config else "torch_dtype"] = dtype
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    return names
