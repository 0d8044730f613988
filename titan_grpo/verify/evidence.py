"""What a verification looks at: records of trainer, server and prober."""

from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgspec

from titan_grpo.errors import DataError
from titan_grpo.protocol.messages import Label

START = -1
"""Stands for the weights that a server had before the run committed anything."""

TRAINER_EVIDENCE = "trainer.jsonl"
"""What rank 0 of a verified run writes: a Made per line."""

Line = TypeVar("Line")


@dataclass(frozen=True, slots=True)
class Made:
    """One version as the trainer had it. ``tensors``: HF name -> digest."""

    version: int
    digest: str
    fingerprint: str
    """Of its image."""

    tensors: dict[str, str]


@dataclass(frozen=True, slots=True)
class Committed:
    """One commit as one worker of the server took it, digested in the server."""

    run_id: str
    worker: int
    version: int
    ok: bool
    fingerprint: str
    tensors: dict[str, str]


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
    """What one version computes: log-probabilities by prompt. Equal weights, equal ``digest``."""

    version: int
    digest: str
    logprobs: tuple[tuple[float, ...], ...]


@dataclass(frozen=True, slots=True)
class Run:
    """One training run with everything that was seen of it."""

    name: str
    made: tuple[Made, ...]
    claimed: tuple[int, ...]
    """Versions that the trainer's summary calls committed."""

    commits: tuple[Committed, ...]
    probes: tuple[Probe, ...]
    references: tuple[Reference, ...]
    probe_errors: tuple[str, ...] = ()
    """Why requests got no answer."""

    final_file: str = ""
    """SHA-256 of the trained weights' file."""


def _read(path: Path, kind: type[Line], skip: int = 0) -> tuple[Line, ...]:
    if not path.exists():
        return ()
    try:
        lines = path.read_bytes().splitlines()[skip:]
        return tuple(msgspec.json.decode(line, type=kind) for line in lines)
    except msgspec.MsgspecError as error:
        raise DataError(f"each line of {path} must be a {kind.__name__}: {error}") from error


def read_made(path: Path) -> tuple[Made, ...]:
    """The trainer's lines; empty if there is no such file."""
    return _read(path, Made)


def read_commits(path: Path, skip: int = 0) -> tuple[Committed, ...]:
    """The server's lines behind the first ``skip``; empty if there is no such file."""
    return _read(path, Committed, skip)


def version_file(evidence: Path, version: int) -> Path:
    """Weights of a version as rank 0 keeps them, for what they compute."""
    return evidence / f"version_{version:06d}.safetensors"


def label_version(text: str, run_id: str) -> int:
    """Version that a label names; START for a label that is not of run ``run_id``."""
    label = Label.parse(text)
    return label.version if label is not None and label.run_id == run_id else START
