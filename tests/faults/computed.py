"""Whether a server computes with the version that it shows: its log-probabilities against the
reference's."""

import uuid
from pathlib import Path

import torch
from safetensors.torch import save_file

from tests.faults.instances import Instance
from tests.faults.site import Runs
from tests.rigs.content import weights
from titan_grpo.engines.http import SyncDriver
from titan_grpo.engines.server import dialect
from titan_grpo.errors import ServerRefused, ServerUnreachable
from titan_grpo.protocol.messages import Label
from titan_grpo.verify.outcome import distance
from titan_grpo.verify.prober import REQUEST_S, ReferenceModel, fixed_prompts

TOLERANCE = 0.05
"""Nats by which bfloat16 in the server may differ from float32 on the same weights, at any
token."""


class Reference:
    """Computes any version of any run. ``model``: the folder with the config; ``out``: room for one
    version's file."""

    def __init__(self, model: Path, runs: Runs, out: Path) -> None:
        self._runs, self._file = runs, out / "reference.safetensors"
        self._prompts = fixed_prompts()
        self._model = ReferenceModel(model, self._prompts)

    def check(self, instance: Instance) -> tuple[str, str]:
        """(what is wrong or empty, a note) of a server at rest."""
        try:
            with SyncDriver(instance.url) as driver:
                speak = dialect(instance.engine)
                label = Label.parse(driver.run(speak.label()))
                # a salt of its own: no answer may contain what other weights have left in the
                # prefix cache
                got = [
                    driver.run(speak.score(prompt, REQUEST_S, uuid.uuid4().hex))
                    for prompt in self._prompts
                ]
        except (ServerUnreachable, ServerRefused) as error:
            return f"{instance.name}: it does not answer a request: {error}", ""
        salt = self._runs.salt(label.run_id) if label is not None else None
        if label is None or salt is None:
            return f"{instance.name}: its label {label} is of no run", ""
        right, before = self._of(label.version, salt), self._of(label.version - 1, salt)
        off = max(distance(a, b) for a, b in zip(got, right, strict=True))
        apart = min(distance(a, b) for a, b in zip(before, right, strict=True))
        note = (
            f"{instance.name} computes version {label.version}: {off:.4f} nats off, the one before"
            f" is {apart:.2f} away"
        )
        return (
            ""
            if off <= TOLERANCE and off < apart / 2
            else f"log-probabilities do not show that {note}"
        ), note

    def _of(self, version: int, salt: int) -> tuple[tuple[float, ...], ...]:
        made = {
            name: t.to(torch.bfloat16)
            for name, t in weights(self._runs.base, version, salt).items()
        }
        save_file(made, self._file)
        return self._model.logprobs(self._file)
