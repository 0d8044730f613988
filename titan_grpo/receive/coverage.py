"""Whether a manifest is what a served model is made of, told from the checkpoint the server was started with."""

import json
import struct
from collections.abc import Mapping
from pathlib import Path

from titan_grpo.errors import DataError
from titan_grpo.layout.manifest import Manifest

INDEX = "model.safetensors.index.json"
MAX_HEADER = 100 << 20
"""Largest header that safetensors itself accepts, in bytes."""

NEVER_SENT = (".inv_freq", ".masked_bias", ".attn.bias")
"""Ends of names that old checkpoints hold and every engine computes itself."""

SHOWN = 4
"""Names per message."""

Shape = tuple[int, ...]


def read_header(path: Path) -> dict[str, Shape]:
    """Names and shapes in one safetensors file; DataError if it is none."""
    with path.open("rb") as file:
        start = file.read(8)
        size = struct.unpack("<Q", start)[0] if len(start) == 8 else MAX_HEADER + 1
        if size > MAX_HEADER:
            raise DataError(f"{path.name} is no safetensors file: its header has no valid length")
        entries = json.loads(file.read(size))
    return {name: tuple(entry["shape"]) for name, entry in entries.items() if name != "__metadata__"}


def checkpoint_shapes(folder: Path) -> dict[str, Shape]:
    """Names and shapes of all tensors of a checkpoint directory; empty if it holds no safetensors."""
    index = folder / INDEX
    if index.exists():
        files = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    else:
        files = sorted(path.name for path in folder.glob("*.safetensors"))
    shapes: dict[str, Shape] = {}
    for name in files:
        shapes |= read_header(folder / name)
    return shapes


def coverage_problem(manifest: Manifest, wanted: Mapping[str, Shape], tied: bool) -> str:
    """Why the manifest does not cover the model exactly; empty if it does. Pure.

    ``tied``: the model has one matrix for embedding and head, so ``lm_head.weight`` may be on either side.

    Worked example: wanted {"a": (2,), "b": (3,)}, manifest {"a": (2,), "c": (1,)} ->
    "... unknown to the server: c; missing: b ...".
    """
    optional = {"lm_head.weight"} if tied else set()
    sent = {spec.name: spec.shape for spec in manifest.tensors}
    unknown = sorted(sent.keys() - wanted.keys() - optional)
    missing = sorted(n for n in wanted.keys() - sent.keys() - optional if not n.endswith(NEVER_SENT))
    other = [f"{n} {sent[n]} instead of {wanted[n]}" for n in sorted(sent.keys() & wanted.keys()) if sent[n] != wanted[n]]
    parts = [
        f"{what}: {', '.join(names[:SHOWN])}{f' and {len(names) - SHOWN} more' if len(names) > SHOWN else ''}"
        for what, names in (("unknown to the server", unknown), ("missing", missing), ("of another shape", other))
        if names
    ]
    if not parts:
        return ""
    return f"the trainer's tensors are not those of the server's model ({'; '.join(parts)}): serve the model that is trained"
