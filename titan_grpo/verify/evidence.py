"""What a verification looks at, as records: written by trainer, server and prober, read back from
their files."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from titan_grpo.errors import DataError
from titan_grpo.protocol.messages import Label

START = -1
"""Stands for the weights that a server had before the run committed anything."""


@dataclass(frozen=True, slots=True)
class Made:
    """One version as the trainer had it. ``tensors``: HF name -> digest; ``fingerprint``: what its
    image must have."""

    version: int
    digest: str
    fingerprint: str
    tensors: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Committed:
    """One commit as one worker of the server took it, digested in the server."""

    run_id: str
    worker: int
    version: int
    ok: bool
    fingerprint: str
    tensors: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Probe:
    """One answered request. ``logprobs`` [tokens - 1] in nats; the server's label right before and
    right after it."""

    prompt: int
    logprobs: tuple[float, ...]
    before: str
    after: str


@dataclass(frozen=True, slots=True)
class Reference:
    """What one version computes: log-probabilities by prompt. ``digest`` names its content (equal
    weights, equal digest)."""

    version: int
    digest: str
    logprobs: tuple[tuple[float, ...], ...]


@dataclass(frozen=True, slots=True)
class Run:
    """One training run with everything that was seen of it. ``probe_errors``: requests that got no
    answer, and why."""

    name: str
    made: tuple[Made, ...]
    claimed: tuple[int, ...]
    """Versions that the trainer's summary calls committed."""
    commits: tuple[Committed, ...]
    probes: tuple[Probe, ...]
    references: tuple[Reference, ...]
    probe_errors: tuple[str, ...] = ()
    final_file: str = ""
    """SHA-256 of the trained weights' file."""


def _lines(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    try:
        return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    except ValueError as error:
        raise DataError(f"{path} must hold one JSON object per line: {error}") from error


def read_made(path: Path) -> tuple[Made, ...]:
    """The trainer's lines; empty if there is no such file."""
    return tuple(
        Made(d["version"], d["digest"], d["fingerprint"], d["tensors"]) for d in _lines(path)
    )


def read_commits(path: Path, skip: int = 0) -> tuple[Committed, ...]:
    """The server's lines behind the first ``skip``; empty if there is no such file."""
    keys = ("run_id", "worker", "version", "ok", "fingerprint", "tensors")
    return tuple(Committed(*(d[key] for key in keys)) for d in _lines(path)[skip:])


def label_version(text: str, run_id: str) -> int:
    """Version that a label names; START for a label that is not of run ``run_id``."""
    label = Label.parse(text)
    return label.version if label is not None and label.run_id == run_id else START
