"""The completions of a run that samples.jsonl keeps for people to look at."""

from collections.abc import Sequence

import msgspec

LIMIT = 4
"""Completions that are kept of one step."""


class Shown(msgspec.Struct, frozen=True):
    """A completion with both log-probabilities of each token, nats."""

    server: str
    reward: float
    version_first: int
    version_last: int
    prompt: list[int]
    tokens: list[int]
    engine: list[float]
    trainer: list[float | None]
    """None: the policy did not sample that token (a tool's answer)."""

    @property
    def gap(self) -> float:
        """Mean absolute difference of the two over the sampled tokens, 0 without one."""
        pairs = zip(self.engine, self.trainer, strict=True)
        gaps = [abs(engine - own) for engine, own in pairs if own is not None]
        return sum(gaps) / len(gaps) if gaps else 0.0


class ShownStep(msgspec.Struct, frozen=True):
    """One line of samples.jsonl."""

    step: int
    version: int
    """The trainer's, whose log-probabilities these are."""
    tokenizer: str
    """Directory of the model that the token ids are of."""
    completions: list[Shown]


def choose(found: Sequence[Shown], limit: int = LIMIT) -> list[Shown]:
    """Choose what says most about a step: the highest and the lowest reward, the largest gap, and
    then the first ones. No completion twice."""
    if not found:
        return []
    places = range(len(found))
    wanted = [
        max(places, key=lambda k: found[k].reward),
        min(places, key=lambda k: found[k].reward),
        max(places, key=lambda k: found[k].gap),
        *places,
    ]
    return [found[k] for k in list(dict.fromkeys(wanted))[:limit]]
