"""What is asked of a generation request and what comes back, whichever engine answers."""

import hashlib
import math
from dataclasses import dataclass
from typing import Any

from titan_grpo.engines.calls import want

LOGPROB_FLOOR = -9999.0
"""At or below this a log-probability stands for minus infinity, which JSON has no number for (vLLM sends just this one)."""

VersionSpan = tuple[str, int, int]
"""(label, start, end): the engine showed ``label`` for its weights while it made the tokens start, ..., end - 1."""


@dataclass(frozen=True, slots=True)
class Sampled:
    """One sampled continuation: token ids, their natural-log probabilities (NaN where the server sent null), why it ended.

    ``versions``: which weights made which tokens, in order and without gaps; empty where the engine does not say.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: str
    versions: tuple[VersionSpan, ...] = ()
    retractions: int | None = None
    """How often the engine threw the request's KV away and computed it anew; None where it does not say."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling of one request. Truncation (top-k, top-p, penalties) is always off: the trainer recomputes plain softmax."""

    max_tokens: int
    temperature: float = 1.0
    seed: int | None = None
    cache_salt: str = ""
    """Version label the request is admitted under: a pause that keeps requests does not clear the prefix cache, so KV blocks of
    older weights would be reused; a salt per version keeps them apart."""

    ignore_eos: bool = False
    """Go on to ``max_tokens`` whatever is sampled: requests of a known length, for checks and measurements."""


def salt(label: str) -> str:
    """A cache salt for any label: hashed, since vLLM refuses salts over 128 characters or with "/", "@" or a backslash."""
    return hashlib.blake2b(label.encode(), digest_size=16).hexdigest()


def logprob(value: Any) -> float:
    """A log-probability of an answer; NaN for null, minus infinity at the floor and below."""
    if not isinstance(value, (int, float)):
        return math.nan
    return -math.inf if value <= LOGPROB_FLOOR else float(value)


def version_spans(value: Any, path: str) -> tuple[VersionSpan, ...]:
    """``weight_versions`` of an answer, in the form that both engines give it; empty for null. ServerRefused for others."""
    return tuple(
        (str(want(s, "version", str, path)), int(want(s, "start", int, path)), int(want(s, "end", int, path)))
        for s in (value if isinstance(value, list) else ())
    )
