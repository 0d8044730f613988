"""A run that proves which weights it had after every step. For ``titan-grpo verify`` only.

    torchrun ... -m titan_grpo.titan.verify_train --evidence DIR -- ARGUMENTS

It gathers every parameter whole (``full_tensor``), sends them through the adapter and casts them:
nothing of the sync's own path (inferred layout, shard copies, images, sealer) is used, so a mistake
there cannot hide itself. ARGUMENTS are those of titan_grpo.train.
"""

import argparse
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor

from titan_grpo.errors import SyncError
from titan_grpo.layout.infer import strip_prefixes
from titan_grpo.layout.manifest import Manifest
from titan_grpo.subprocesses import stop_on_signals
from titan_grpo.titan import compat
from titan_grpo.verify.outcome import TRAINER_EVIDENCE, Made, version_file
from titan_grpo.verify.recording import content_digest, tensor_digest

compat.prepare()

from titan_grpo.titan.jobconfig import parse  # noqa: E402 - the patches come first
from titan_grpo.titan.lora import adapted  # noqa: E402
from titan_grpo.titan.trainer import GRPOTrainer, run  # noqa: E402
from titan_grpo.titan.weight_sync import stored_tensors  # noqa: E402


class VerifyTrainer(GRPOTrainer):
    """Trainer whose rank 0 writes TRAINER_EVIDENCE and a safetensors file per version into
    ``evidence``."""

    def __init__(self, job_config: Any, evidence: Path) -> None:
        super().__init__(job_config)
        self._evidence = evidence
        if dist.get_rank() == 0:
            evidence.mkdir(parents=True, exist_ok=True)

    def _start(self) -> None:
        super()._start()
        self._witness(self.version)

    def train_step(
        self, data_iterator: Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]
    ) -> None:
        """Run GRPOTrainer's step, then record the version that it made."""
        before = self.version
        super().train_step(data_iterator)
        if self.version > before:
            self._witness(self.version)

    def _witness(self, version: int) -> None:
        """Gather and cast the weights; on rank 0 export, digest and save them. Collective."""
        began = time.perf_counter()
        with torch.no_grad():
            full = self._gathered()
            if self.controller is None:
                return
            exported = {name: t.contiguous() for name, t in self.to_hf(full).items()}
        digests = {name: tensor_digest(t) for name, t in exported.items()}
        image = image_of(exported, self.sync.plan.manifest)
        fingerprint = self.controller.sync_process.fingerprint(memoryview(image))
        save_file(
            {name: t.clone() for name, t in exported.items()}, version_file(self._evidence, version)
        )
        took_s = time.perf_counter() - began
        made = Made(version, content_digest(digests), fingerprint, digests, len(image), took_s)
        with (self._evidence / TRAINER_EVIDENCE).open("ab") as file:
            file.write(msgspec.json.encode(made) + b"\n")

    def _gathered(self) -> dict[str, torch.Tensor]:
        """Return every tensor that servers get, by its name in the trainer: whole, adapters merged,
        in the wire type, on the host. Collective."""
        buffers = {
            strip_prefixes(name) for part in self.model_parts for name, _ in part.named_buffers()
        }
        wire = getattr(torch, self.job_config.weight_sync.wire_dtype)
        layers = dict(adapted(self.model_parts[0]))
        full: dict[str, torch.Tensor] = {}
        for fqn, tensor in stored_tensors(self.model_parts, self.to_hf):
            whole = _whole(tensor)
            layer = layers.get(fqn.removesuffix(".weight"))
            if layer is not None:
                # B A of the unsharded matrices, added in float64
                up, down = (_whole(p).double() for p in (layer.lora_b, layer.lora_a))
                whole = whole.double() + layer.scale * (up @ down)
            cast = fqn not in buffers and whole.is_floating_point()
            full[fqn] = (whole.to(wire) if cast else whole).cpu()
        if self.pipeline is None:
            return full
        stages: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(stages, full, group=self.loader.group)
        return {fqn: tensor for stage in stages for fqn, tensor in stage.items()}


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def image_of(tensors: dict[str, torch.Tensor], manifest: Manifest) -> bytearray:
    """Return the expected image of these tensors. Raises SyncError if the names differ."""
    names = {spec.name for spec in manifest.tensors}
    if names != set(tensors):
        different = sorted(names ^ set(tensors))
        raise SyncError(
            "the manifest must name the tensors that the adapter exports, different are"
            f" {different[:3]}"
        )
    image = bytearray(manifest.total_bytes)
    for spec in manifest.tensors:
        flat = tensors[spec.name].flatten().view(torch.uint8)
        image[spec.offset : spec.offset + spec.nbytes] = flat.numpy().tobytes()
    return image


def main(argv: list[str]) -> int:
    """Run one rank with a VerifyTrainer. Errors propagate to torchrun."""
    stop_on_signals()
    parser = argparse.ArgumentParser(prog="titan_grpo.titan.verify_train", description=__doc__)
    parser.add_argument("--evidence", type=Path, required=True)
    cut = argv.index("--")
    options = parser.parse_args(argv[:cut])
    run(parse(argv[cut + 1 :]), partial(VerifyTrainer, evidence=options.evidence))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
