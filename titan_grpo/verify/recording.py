"""A server plugin, for ``titan-grpo verify`` only, that records what every commit loads into the
model.

It digests each tensor after the engine's loader has taken it, in the engine's process, independent
of the block digests of the transfer.
"""

import hashlib
import logging
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch

from titan_grpo.protocol.messages import Applied
from titan_grpo.receive import commit
from titan_grpo.receive.commit import Engine, EngineSide, Workers
from titan_grpo.runkey import Key
from titan_grpo.verify.outcome import Committed

PLUGIN = "titan_grpo_recorder"
GROUPS = ("vllm.general_plugins", "sglang.srt.plugins")
"""Entry points of the engines' plugins."""

log = logging.getLogger("titan_grpo.receive")


# Digests are of tensors by name, without image, offsets and blocks: a mistake in the layout cannot
# make both ends agree.


def tensor_digest(tensor: torch.Tensor) -> str:
    """Return 32 hex characters over dtype, shape and row-major bytes. The tensor may be on any
    device and need not be contiguous."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    state = hashlib.blake2b(f"{dtype} {tuple(tensor.shape)} ".encode(), digest_size=16)
    flat = tensor.detach().cpu().contiguous().flatten()
    state.update(flat.view(torch.uint8).numpy().data)
    return state.hexdigest()


def content_digest(tensors: Mapping[str, str]) -> str:
    """Return 32 hex characters over all tensors' digests (name -> tensor_digest), in any order."""
    text = "\n".join(f"{name} {tensors[name]}" for name in sorted(tensors))
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


class RecordingSide(EngineSide):
    """EngineSide that appends a Committed per commit to a file, a JSON line each."""

    def __init__(
        self, path: Path, engine: Engine, workers: Workers, problem: str, run_key: Key | None
    ) -> None:
        self._path = path
        self._seen: dict[str, str] = {}
        super().__init__(engine, workers, problem, run_key)

    def taken(self, name: str, tensor: torch.Tensor) -> None:
        """See EngineSide. Digest after the loader took the tensor, so that bytes that change during
        the load are seen."""
        self._seen[name] = tensor_digest(tensor)

    def commit(self, data: dict[str, Any]) -> Applied | None:
        """See EngineSide. A line that cannot be written is logged, and missed by the
        verification."""
        self._seen = {}
        report = super().commit(data)
        if report is not None:
            line = Committed(
                run_id=data["run_id"],
                worker=self._workers.rank,
                version=report.version,
                ok=report.ok,
                fingerprint=report.fingerprint,
                tensors=self._seen,
            )
            try:
                with self._path.open("ab") as file:
                    file.write(msgspec.json.encode(line) + b"\n")
            except OSError as error:
                log.error(
                    "the commit of version %d could not be written down: %s", report.version, error
                )
        return report


def register(path: str) -> None:
    """Make our plugin, in this process of an engine, use a RecordingSide that writes to
    ``path``."""
    commit.make_side = partial(RecordingSide, Path(path))


def install(folder: Path, path: Path) -> None:
    """Write a plugin into ``folder`` that makes either engine, with ``folder`` on its PYTHONPATH,
    record to ``path``."""
    info = folder / f"{PLUGIN}-0.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {PLUGIN}\nVersion: 0\n")
    entries = [f"[{group}]\n{PLUGIN} = {PLUGIN}:start\n" for group in GROUPS]
    (info / "entry_points.txt").write_text("\n".join(entries))
    (folder / f"{PLUGIN}.py").write_text(
        "from titan_grpo.verify import recording\n\n\n"
        f"def start():\n    recording.register({str(path)!r})\n"
    )
