"""A server plugin, for ``titan-grpo verify`` only, that records what every commit loads into the
model.

It digests each tensor after the engine's loader has taken it, in the engine's process, independent
of the block digests of the transfer.
"""

import hashlib
import json
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from titan_grpo.layout.manifest import Manifest
from titan_grpo.protocol.messages import Applied
from titan_grpo.receive.commit import Engine, EngineSide, Workers
from titan_grpo.runkey import Key

PLUGIN = "titan_grpo_recorder"

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


class RecordedEngine:
    """Engine that digests the tensors of ``load``."""

    def __init__(self, engine: Engine) -> None:
        self._engine, self.config, self.routes = engine, engine.config, engine.routes
        self.quantization = engine.quantization
        self.seen: dict[str, str] = {}

    def refuses(self, manifest: Manifest) -> str:
        """See Engine."""
        return self._engine.refuses(manifest)

    def load(self, tensors: Iterator[tuple[str, torch.Tensor]]) -> int:
        """See Engine."""
        self.seen = {}
        return self._engine.load(self._noted(tensors))

    def _noted(
        self, tensors: Iterator[tuple[str, torch.Tensor]]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in tensors:
            yield name, tensor
            # Digest after the loader took the tensor, so that bytes that change during the load are
            # seen.
            self.seen[name] = tensor_digest(tensor)


class RecordingSide(EngineSide):
    """EngineSide that appends one JSON line per commit to a file: worker, run, version, outcome,
    digests by name."""

    def __init__(
        self, engine: Engine, workers: Workers, problem: str, path: Path, run_key: Key | None
    ) -> None:
        self._recorded = RecordedEngine(engine)
        self._path = path
        super().__init__(self._recorded, workers, problem, run_key)

    def commit(self, data: dict[str, Any]) -> Applied | None:
        """See EngineSide. A line that cannot be written is logged, and missed by the
        verification."""
        self._recorded.seen = {}
        report = super().commit(data)
        if report is not None:
            line = {
                "worker": self._workers.rank,
                "run_id": data["run_id"],
                "version": report.version,
                "ok": report.ok,
                "fingerprint": report.fingerprint,
                "tensors": self._recorded.seen,
            }
            try:
                with self._path.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(line) + "\n")
            except OSError as error:
                log.error(
                    "the commit of version %d could not be written down: %s", report.version, error
                )
        return report


def register(engine: str, path: str) -> None:
    """Make our plugin for an engine use a RecordingSide that writes to ``path``."""

    def make(engine: Engine, workers: Workers, problem: str, run_key: Key | None) -> EngineSide:
        return RecordingSide(engine, workers, problem, Path(path), run_key)

    # Imported here: only one of the engines is installed.
    if engine == "vllm":
        from titan_grpo.receive import vllm_plugin

        engine_class: Any = vllm_plugin.TitanWeightTransferEngine
        engine_class.make_side = staticmethod(make)
    else:
        from titan_grpo.receive import sglang_plugin

        sglang_plugin.plugin.make_side = make


def install(folder: Path, path: Path) -> None:
    """Write a plugin into ``folder`` that makes either engine, with ``folder`` on its PYTHONPATH,
    record to ``path``."""
    info = folder / f"{PLUGIN}-0.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {PLUGIN}\nVersion: 0\n")
    groups = {"vllm": "vllm.general_plugins", "sglang": "sglang.srt.plugins"}
    entries = [f"[{group}]\n{PLUGIN} = {PLUGIN}:start_{e}\n" for e, group in groups.items()]
    (info / "entry_points.txt").write_text("\n".join(entries))
    starts = [f"def start_{e}():\n    recording.register({e!r}, {str(path)!r})\n" for e in groups]
    (folder / f"{PLUGIN}.py").write_text(
        "\n\n".join(["from titan_grpo.verify import recording\n", *starts])
    )
