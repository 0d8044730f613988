"""``titan-grpo verify`` in which every kind of violation is caused: python -m
tests.rigs.tampered_verify, with its arguments. It must fail and name each.

A foreign sender commits other weights to the server over the real lane. It leaves what a zombie
trainer or a torn load would: the server itself is healthy, its label wrong.
"""

import os
import sys
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from tests.conformance.commits import STEP_S, Sender
from titan_grpo.commands import verify
from titan_grpo.commands.processes import in_foreground
from titan_grpo.commands.verify_runs import PhaseRuns
from titan_grpo.commands.verify_runs import verify as verified
from titan_grpo.engines.http import ServerAccess
from titan_grpo.engines.server import AUTO, make_control
from titan_grpo.errors import TransferFailed
from titan_grpo.runkey import Key
from titan_grpo.verify.outcome import Made
from titan_grpo.verify.prober import Prober


def torn(old: Path, new: Path) -> dict[str, torch.Tensor]:
    """The state of a load from ``old`` to ``new`` that stopped half-way: every second tensor is
    still the old one."""
    before, after = load_file(old), load_file(new)
    return {name: (before if index % 2 else after)[name] for index, name in enumerate(after)}


def commit_foreign(
    url: str, tensors: Mapping[str, torch.Tensor], version: int, run_key: Key | None
) -> None:
    """Send and commit ``tensors`` as ``version`` of a newer run, and leave the server's label as it
    was.

    A sender without the server's run key would be refused: this one has it.
    """
    with closing(make_control(AUTO, ServerAccess(url, STEP_S))) as control:
        sender, label = Sender(control, run_key), control.label()
        weights = sender.weights(tensors)
        with sender.link(weights) as link:
            applied = sender.apply(link, sender.stage(link, weights, version), label)
            link.bye(STEP_S)
    if not applied.ok:
        raise TransferFailed(f"the foreign version {version} was refused: {applied.error}")


class TamperedRuns(PhaseRuns):
    """The trainers of the first and the last run tamper with their own weights, and after the first
    one other weights are committed: an older version, then a mixture of two."""

    def module(self, name: str, evidence: Path) -> list[str]:
        own = {"async live": "bytes:2", "sync replay": "modes:2"}.get(name, "")
        return ["tests.rigs.tampered_train", "--tamper", own, *super().module(name, evidence)[1:]]

    def after(
        self, name: str, url: str, prober: Prober, evidence: Path, made: tuple[Made, ...]
    ) -> Path:
        last = super().after(name, url, prober, evidence, made)
        if name != "async live":
            return last
        before = super().after(name, url, prober, evidence, made[:-1])
        mixture = torn(before, last)
        for tensors, of in ((load_file(before), made[-2]), (mixture, made[-1])):
            commit_foreign(url, tensors, of.version, self.run_key)
            self.wait_probes(prober)
        save_file(mixture, evidence / "torn.safetensors")
        return evidence / "torn.safetensors"


if __name__ == "__main__":
    options = verify.arguments(sys.argv[1:])
    sys.exit(in_foreground(lambda: verified(options, os.environ, TamperedRuns)))
