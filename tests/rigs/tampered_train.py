"""A trainer of ``titan-grpo verify`` that tampers with its own weights (tampered_verify.py):
python -m tests.rigs.tampered_train --tamper KIND:VERSION --evidence DIR -- ARGUMENTS."""

import argparse
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from titan_grpo.titan import verify_train
from titan_grpo.titan.jobconfig import parse
from titan_grpo.titan.trainer import run
from titan_grpo.titan.weight_sync import exported_tensors


@dataclass(frozen=True, slots=True)
class Tamper:
    """A violation to cause: the self-test.

    ``bytes``: every version from ``at`` on is published with one sign flipped that training does
    not see (every one, since any of them may be skipped); ``modes``: one weight changes its sign
    before the step that makes version ``at``.
    """

    kind: str = ""
    at: int = 0

    @classmethod
    def parse(cls, text: str) -> "Tamper":
        """``"bytes:2"``; an empty text causes nothing."""
        kind, _, at = text.partition(":")
        return cls(kind, int(at)) if text else cls()


class TamperedTrainer(verify_train.VerifyTrainer):
    """A VerifyTrainer that causes one violation."""

    def __init__(self, job_config: Any, evidence: Path, tamper: Tamper) -> None:
        super().__init__(job_config, evidence)
        self._tamper = tamper

    def train_step(self, data_iterator: Any) -> None:
        if self._tamper == Tamper("modes", self.step):
            self.sync.publisher.fence()
            self._flip()
        super().train_step(data_iterator)

    def _publish(self, version: int, slot: int) -> None:
        tampered = self._tamper.kind == "bytes" and version >= self._tamper.at
        if tampered:
            self._flip()
        super()._publish(version, slot)
        if tampered:
            # On a device the copy is only enqueued: it must have read the wrong value before that
            # is taken back.
            self.sync.publisher.fence()
            if self.device.type == "cuda":
                torch.cuda.synchronize()
            self._flip()

    def _flip(self) -> None:
        """Change the sign of rank 0's first weight."""
        if dist.get_rank() == 0:
            name = next(iter(self.sync.plan.ops))
            weights = dict(exported_tensors(self.model_parts, self.to_hf))
            weight = weights[name]
            local = weight.to_local() if isinstance(weight, DTensor) else weight
            with torch.no_grad():
                local.view(-1)[:1].neg_()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--tamper", type=Tamper.parse, required=True)
    parser.add_argument("--evidence", type=Path, required=True)
    cut = sys.argv.index("--")
    given = parser.parse_args(sys.argv[1:cut])
    build = partial(TamperedTrainer, evidence=given.evidence, tamper=given.tamper)
    run(parse(sys.argv[cut + 1 :]), build)
