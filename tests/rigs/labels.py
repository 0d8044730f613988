"""Whether a completion's log-probabilities are those of the versions that it is said to be of:
recomputed by transformers, with the KV that the engine can have had.

The weights of one version sample a token, on KV that is of other versions where a commit came
between: a token's keys and values are those of the version that sampled the next one. The prompt's
are of the version that sampled the first token, but for a prefix of whole cache blocks, which may
be of an older one. Which one, and how long the prefix is, no engine says: a claim fits if it does
so with any that it allows.

A prompt's last token is always computed, since the first token is sampled from it. vLLM goes on
with what it computed. SGLang's radix cache, where it has the whole prompt, replaces that token's KV
by its own: the first token is sampled on new KV of it, and all others on old.
"""

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from titan_grpo.samples import Span

BACK = 8
"""Tokens after a change of versions that may fit the version before it as well, by chance."""


@dataclass(frozen=True, slots=True)
class Claim:
    """What is said of a completion: bounds on all versions that it depends on, and, where the
    engine names it, the version that sampled each token."""

    first: int
    last: int
    spans: tuple[Span, ...] | None = None


@dataclass(frozen=True, slots=True)
class Fit:
    """The versions that explain a completion: the oldest one behind its KV, and those that sampled
    its tokens. ``prefix``: how many tokens of the prompt have KV of the former."""

    oldest_kv: int
    spans: tuple[Span, ...]
    prefix: int = 0


class Models:
    """The models of several versions, in float32 on the CPU. ``folders``: version -> directory of
    safetensors, rounded to bfloat16 as they were sent."""

    def __init__(self, folders: Mapping[int, Path]) -> None:
        from transformers import AutoModelForCausalLM

        self._models: dict[int, Any] = {}
        for version, folder in folders.items():
            model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
            self._models[version] = model.float().eval()

    def versions(self) -> tuple[int, ...]:
        """Those that there are, in order."""
        return tuple(sorted(self._models))

    def feed(self, version: int, ids: Sequence[int], cache: Any) -> tuple[torch.Tensor, Any]:
        """Log-probabilities [ids, vocabulary] after each of ``ids``, which go into ``cache`` (None:
        an empty one), and the cache."""
        with torch.inference_mode():
            out = self._models[version](
                torch.tensor([list(ids)]), past_key_values=cache, use_cache=True
            )
        return out.logits[0].log_softmax(-1), out.past_key_values


@dataclass(frozen=True, slots=True)
class PrefixCache:
    """An engine's prefix cache. ``block``: tokens of one block (1: any prefix is found). ``whole``:
    a prompt that is cached to its last token is read from the cache to its last token, once the
    first token was sampled."""

    block: int
    whole: bool

    def prefixes(self, length: int) -> list[int]:
        """How many tokens of a prompt of ``length`` may have cached KV, most first.

        >>> PrefixCache(2, whole=True).prefixes(6), PrefixCache(2, whole=False).prefixes(6)
        ([6, 4, 2], [4, 2])
        """
        return list(range(self.block, length + self.whole, self.block))[::-1]


PREFIX_CACHES = {"vllm": PrefixCache(128, whole=False), "sglang": PrefixCache(1, whole=True)}
"""As each engine has it on a CPU."""


class Checker:
    """Explains completions by versions. ``tolerance``: of each log-probability, in nats."""

    def __init__(self, models: Models, prefix_cache: PrefixCache, tolerance: float) -> None:
        self._models, self._prefix_cache, self._tolerance = models, prefix_cache, tolerance

    def explain(
        self,
        prompt: Sequence[int],
        tokens: Sequence[int],
        logprobs: Sequence[float],
        claim: Claim,
    ) -> Fit | None:
        """The first explanation within the claim, newest KV first; None: the claim is not true."""
        known = set(self._models.versions())
        if not known >= set(range(claim.first, claim.last + 1)):
            return None
        search = _Search(self._models, prompt, tokens, logprobs, self._tolerance, claim)
        starts = range(claim.first, claim.last + 1)
        for version in starts if claim.spans is None else (claim.spans[0][0],):
            for old in range(version, claim.first - 1, -1):
                lengths, cached = [0], None
                if old < version:
                    lengths = self._prefix_cache.prefixes(len(prompt))
                    _, cached = self._models.feed(old, prompt, None)
                for length in lengths:
                    row, cache = self._begin(version, prompt, cached, length)
                    if not search.fits(0, row):
                        continue
                    found = search.extend(0, version, row, cache)
                    if found is not None:
                        return Fit(old, found, length)
        return None

    def _begin(
        self, version: int, prompt: Sequence[int], cached: Any, length: int
    ) -> tuple[torch.Tensor, Any]:
        """The first token's distribution by ``version``, and the KV that the request goes on with,
        where ``length`` tokens of ``prompt`` are read from ``cached`` (KV of all of it)."""
        found = min(length, len(prompt) - 1)
        cache = copy.deepcopy(cached) if found else None
        if cache is not None:
            cache.crop(found - len(prompt))
        rows, cache = self._models.feed(version, prompt[found:], cache)
        return rows[-1], copy.deepcopy(cached) if length == len(prompt) else cache


@dataclass(frozen=True, slots=True)
class _Search:
    models: Models
    prompt: Sequence[int]
    tokens: Sequence[int]
    logprobs: Sequence[float]
    tolerance: float
    claim: Claim

    def extend(
        self, at: int, version: int, row: torch.Tensor, cache: Any
    ) -> tuple[Span, ...] | None:
        """Explain the tokens from ``at`` on, the first of them by ``version``, whose distribution
        is ``row``."""
        count = len(self.tokens)
        rows = row.unsqueeze(0)
        if at + 1 < count:
            more, cache = self.models.feed(version, self.tokens[at : count - 1], cache)
            rows = torch.cat([rows, more])
        end = at + self._fitting(at, rows)
        allowed = self._ends(at, end)
        if count in allowed:
            return ((version, count - at),)
        for cut in allowed:
            for newer in self._after(cut, version):
                kept = copy.deepcopy(cache)
                kept.crop(cut - count)  # the tokens before the one before ``cut`` stay
                next_rows, kept = self.models.feed(newer, self.tokens[cut - 1 : cut], kept)
                rest = self.extend(cut, newer, next_rows[-1], kept)
                if rest is not None:
                    return ((version, cut - at), *rest)
        return None

    def _fitting(self, at: int, rows: torch.Tensor) -> int:
        """How many tokens from ``at`` on have their log-probability in ``rows``."""
        for number, row in enumerate(rows):
            if not self.fits(at + number, row):
                return number
        return len(rows)

    def fits(self, at: int, row: torch.Tensor) -> bool:
        """Whether token ``at`` has its log-probability in ``row``."""
        off = abs(float(row[self.tokens[at]]) - self.logprobs[at])
        return math.isfinite(off) and off <= self.tolerance

    def _ends(self, at: int, end: int) -> list[int]:
        """Where the tokens of one version that begin at ``at`` may end, if they fit up to ``end``
        at most."""
        if self.claim.spans is None:
            return list(range(end, max(at, end - BACK), -1))
        bounds, total = [], 0
        for _, tokens in self.claim.spans:
            total += tokens
            bounds.append(total)
        stop = next(bound for bound in bounds if bound > at)
        return [stop] if stop <= end else []

    def _after(self, cut: int, version: int) -> Sequence[int]:
        """The versions that may have sampled token ``cut``, which ``version`` did not."""
        if self.claim.spans is None:
            return range(version + 1, self.claim.last + 1)
        total = 0
        for made_by, tokens in self.claim.spans:
            total += tokens
            if total > cut:
                return (made_by,)
        return ()
