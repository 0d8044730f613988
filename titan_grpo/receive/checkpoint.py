"""The checkpoint that a server was started with: the names and shapes that a trainer's tensors must
have.

Whether a manifest is what a served model is made of, told from the checkpoint the server was
started with."""

import json
import logging
import struct
from collections.abc import Mapping
from pathlib import Path

from titan_grpo.errors import DataError
from titan_grpo.layout.manifest import Manifest

Shape = tuple[int, ...]

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
    """Read once, when the first manifest comes: a server that nobody trains against reads
    nothing."""

    def __init__(self, model: str, revision: str | None, tied: bool) -> None:
        """``model``: directory or hub name. ``tied``: embedding and head are one matrix."""
        self.model, self._revision, self._tied = model, revision, tied
        self._wanted: Mapping[str, Shape] | None = None

    @property
    def known(self) -> bool:
        """Whether there are safetensors files to compare with."""
        return bool(self._shapes())

    def problem(self, manifest: Manifest) -> str:
        """See coverage_problem; empty too where nothing is known."""
        return coverage_problem(manifest, self._shapes(), self._tied) if self.known else ""

    def _shapes(self) -> Mapping[str, Shape]:
        if self._wanted is None:
            self._wanted = checkpoint_shapes(checkpoint_folder(self.model, self._revision))
            if not self._wanted:
                log.info(
                    "names are not compared with a checkpoint: no safetensors files at %s",
                    self.model,
                )
        return self._wanted


INDEX = "model.safetensors.index.json"
MAX_HEADER = 100 << 20
"""Largest header that safetensors itself accepts, in bytes."""

NEVER_SENT = (".inv_freq", ".masked_bias", ".attn.bias")
"""Ends of names that old checkpoints hold and every engine computes itself."""

SHOWN = 4
"""Names per message."""


def read_header(path: Path) -> dict[str, Shape]:
    """Names and shapes in one safetensors file; DataError if it is none."""
    with path.open("rb") as file:
        start = file.read(8)
        size = struct.unpack("<Q", start)[0] if len(start) == 8 else MAX_HEADER + 1
        if size > MAX_HEADER:
            raise DataError(f"{path.name} is no safetensors file: its header has no valid length")
        entries = json.loads(file.read(size))
    return {
        name: tuple(entry["shape"]) for name, entry in entries.items() if name != "__metadata__"
    }


def checkpoint_shapes(folder: Path) -> dict[str, Shape]:
    """Names and shapes of all tensors of a checkpoint directory; empty if it holds no
    safetensors."""
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
    parts = [
        f"{what}:"
        f" {', '.join(names[:SHOWN])}{f' and {len(names) - SHOWN} more' if len(names) > SHOWN else ''}"
        for what, names in (
            ("unknown to the server", unknown),
            ("missing", missing),
            ("of another shape", other),
        )
        if names
    ]
    if not parts:
        return ""
    return (
        f"the trainer's tensors are not those of the server's model ({'; '.join(parts)}): serve the"
        " model that is trained"
    )
