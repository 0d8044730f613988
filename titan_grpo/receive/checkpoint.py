"""The checkpoint that a server was started with: the names and shapes that a trainer's tensors must have."""

import logging
from collections.abc import Mapping
from pathlib import Path

from titan_grpo.layout.manifest import Manifest
from titan_grpo.receive.coverage import Shape, checkpoint_shapes, coverage_problem

log = logging.getLogger("titan_grpo.receive")


def checkpoint_folder(model: str, revision: str | None) -> Path:
    """Where a model's files lie: the directory itself, or its place in the hub's cache (nothing is downloaded)."""
    if Path(model).is_dir():
        return Path(model)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        return Path(snapshot_download(model, revision=revision, local_files_only=True))
    except (LocalEntryNotFoundError, ValueError):
        return Path(model)


class CheckpointNames:
    """Read once, when the first manifest comes: a server that nobody trains against reads nothing."""

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
                log.info("names are not compared with a checkpoint: no safetensors files at %s", self.model)
        return self._wanted
