"""Group-relative advantages: a completion's reward against those of the same prompt, in float64.

With rewards r_1 .. r_G of one group, first shaped (overlong penalty, length penalty, then scaled by
length):

* baseline "mean": c_i = r_i - mean(r)   (GRPO, arXiv 2402.03300, section 4.1.2);
* baseline "leave_one_out": c_i = r_i - mean of the others = G / (G - 1) * (r_i - mean(r))   (RLOO,
  arXiv 2402.14740, eq. 5);
* normalization "none": A_i = c_i   (Dr.GRPO, arXiv 2503.20783);
* normalization "group": A_i = c_i / (std(r) + eps), the group's population deviation   (GRPO);
* normalization "batch": A_i = c_i / (sqrt(mean of c^2 over every completion of the step) + eps),
  one scale for all prompts (REINFORCE++ with a group baseline, arXiv 2501.03262; compared in
  2508.08221).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch

from titan_grpo.errors import ConfigError, DataError
from titan_grpo.samples import Completion

STD_EPSILON = 1e-6
"""Added to a standard deviation, so that nearly equal rewards are not blown up to unit scale."""


class Scored(NamedTuple):
    """What advantages are made of."""

    reward: float
    tokens: int
    """Sampled tokens: those that are trained on."""
    length: int
    """All tokens after the prompt, which ``rollout.max_completion_tokens`` bounds: with a task of
    several turns also the task's."""

    @classmethod
    def of(cls, completion: Completion) -> "Scored":
        """That of one completion."""
        return cls(completion.reward, completion.num_sampled, len(completion.token_ids))


def by_episode(completions: Sequence[Completion]) -> tuple[list[Scored], list[int]]:
    """A group's episodes, and which of them each completion is a part of. An agent's episode may be
    several completions with one reward, which must not count as often as its history changed. Its
    tokens are those of all its completions, its length that of the longest.

    Example: episodes -1, 1, 1 -> two scored, places [0, 1, 1].
    """
    scored: list[Scored] = []
    known: dict[int, int] = {}
    places = []
    for completion in completions:
        one = Scored.of(completion)
        place = known.get(completion.episode, len(scored))
        if place == len(scored):
            scored.append(one)
        else:
            had = scored[place]
            tokens, length = had.tokens + one.tokens, max(had.length, one.length)
            scored[place] = Scored(one.reward, tokens, length)
        if completion.episode >= 0:
            known[completion.episode] = place
        places.append(place)
    return scored, places


@dataclass(frozen=True, slots=True)
class Overlong:
    """Soft overlong punishment (DAPO, arXiv 2503.14476, eq. 13). Raises ConfigError where the cache
    does not fit."""

    max_tokens: int
    """L_max: the longest completion that is sampled."""

    cache_tokens: int
    """L_cache: how many tokens before that the penalty begins."""

    factor: float = 1.0
    """The penalty at L_max."""

    def __post_init__(self) -> None:
        if not 0 < self.cache_tokens <= self.max_tokens:
            raise ConfigError(
                "grpo.overlong_cache_tokens must be in 1 .. rollout.max_completion_tokens"
                f" ({self.max_tokens}), got {self.cache_tokens}: the penalty would have no room to"
                " grow"
            )


@dataclass(frozen=True, slots=True)
class LengthPenalty:
    """A reward for being short in one's group (Kimi k1.5, arXiv 2501.12599, section 2.3.3)."""

    weight: float

    correct_reward: float
    """A completion with at least this reward is correct."""


@dataclass(frozen=True, slots=True)
class AdvantageOptions:
    """How rewards become advantages; see the module's docstring."""

    baseline: Literal["mean", "leave_one_out"] = "mean"
    normalization: Literal["group", "batch", "none"] = "group"

    scale_by_len: bool = False
    """Multiply each reward by its completion's tokens before anything is compared."""

    overlong: Overlong | None = None
    """Penalty on long completions, before ``scale_by_len``."""

    length_penalty: LengthPenalty | None = None
    """Likewise."""


def overlong_penalty(tokens: int, options: Overlong) -> float:
    """What is added to the reward of a completion of ``tokens`` tokens.

    0 up to L_max - L_cache tokens, then (L_max - L_cache - tokens) / L_cache, and -1 at L_max and
    beyond; times the factor.

    Example: L_max 100, L_cache 20: 80 tokens 0, 90 tokens -0.5, 100 tokens -1.
    """
    over = tokens - (options.max_tokens - options.cache_tokens)
    return -options.factor * min(max(over / options.cache_tokens, 0.0), 1.0)


def length_rewards(group: Sequence[Scored], options: LengthPenalty) -> list[float]:
    """What is added to the rewards of a group: weight * s, with s = 0.5 - (length - shortest) /
    (longest - shortest) for a correct completion and min(s, 0) for another; 0 where all are of one
    length.

    Example: weight 1, lengths 10, 20, 30, the last two correct -> 0 (wrong, so not 0.5), 0, -0.5.
    """
    lengths = [scored.length for scored in group]
    shortest, longest = min(lengths, default=0), max(lengths, default=0)
    if shortest == longest:
        return [0.0] * len(group)
    shares = [0.5 - (length - shortest) / (longest - shortest) for length in lengths]
    return [
        options.weight * (share if scored.reward >= options.correct_reward else min(share, 0.0))
        for scored, share in zip(group, shares, strict=True)
    ]


def step_advantages(
    groups: Sequence[Sequence[Scored]], options: AdvantageOptions
) -> list[tuple[float, ...]]:
    """Advantages of every group of a step, in the order given.

    Equal (shaped) rewards, and a group of one, give exact zeros: such a group teaches nothing.

    Example: one group with rewards (1, 0, 0, 1): mean 0.5, deviation 0.5, so (1, -1, -1, 1) up to
    2e-6; without the division (0.5, -0.5, -0.5, 0.5), and with leave-one-out and no division (2/3,
    -2/3, -2/3, 2/3).

    Raises DataError for a reward that is not finite: it would poison the whole group.
    """
    shaped = [_shaped(group, options) for group in groups]
    centred = [_centred(rewards, options.baseline) for rewards in shaped]
    if options.normalization == "none":
        return centred
    if options.normalization == "batch":
        scales = [_root_mean_square([c for group in centred for c in group])] * len(centred)
    else:
        # The deviation of the rewards, whatever the baseline: leave-one-out moves all of a group
        # by the same factor.
        scales = [_root_mean_square(_centred(rewards, "mean")) for rewards in shaped]
    return [
        tuple(c / (scale + STD_EPSILON) for c in group)
        for group, scale in zip(centred, scales, strict=True)
    ]


def has_spread(group: Sequence[Scored], options: AdvantageOptions) -> bool:
    """Whether a group teaches anything: its shaped rewards are not all the same (DAPO's dynamic
    sampling keeps those)."""
    return any(_centred(_shaped(group, options), options.baseline))


def scaled_advantages(
    advantages: torch.Tensor, pos_scaler: float, neg_scaler: float
) -> torch.Tensor:
    """A * pos_scaler where A > 0, else A * neg_scaler; any shape."""
    return torch.where(advantages > 0, advantages * pos_scaler, advantages * neg_scaler)


def _shaped(group: Sequence[Scored], options: AdvantageOptions) -> list[float]:
    for scored in group:
        if not math.isfinite(scored.reward):
            raise DataError(
                f"a reward must be a finite number, got {scored.reward!r}: the group's advantages"
                " would all be NaN"
            )
    rewards = [scored.reward for scored in group]
    if options.overlong is not None:
        penalties = [overlong_penalty(scored.length, options.overlong) for scored in group]
        rewards = [reward + penalty for reward, penalty in zip(rewards, penalties, strict=True)]
    if options.length_penalty is not None:
        added = length_rewards(group, options.length_penalty)
        rewards = [reward + more for reward, more in zip(rewards, added, strict=True)]
    if options.scale_by_len:
        rewards = [reward * scored.tokens for reward, scored in zip(rewards, group, strict=True)]
    return rewards


def _centred(rewards: Sequence[float], baseline: str) -> tuple[float, ...]:
    # Exact zeros: the mean of equal numbers need not be that number.
    if not rewards or min(rewards) == max(rewards):
        return (0.0,) * len(rewards)
    count = len(rewards)
    mean = math.fsum(rewards) / count
    factor = count / (count - 1) if baseline == "leave_one_out" else 1.0
    return tuple(factor * (reward - mean) for reward in rewards)


def _root_mean_square(values: Sequence[float]) -> float:
    return math.sqrt(math.fsum(v * v for v in values) / len(values)) if values else 0.0
