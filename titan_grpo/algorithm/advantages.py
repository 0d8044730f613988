"""Group-relative advantages: a completion's reward against those of its group, in float64.

With rewards r_1 .. r_G of one group, after shaping (overlong penalty, length penalty, then scaling
by length):

* advantage_baseline "mean": c_i = r_i - mean(r)   (GRPO, arXiv 2402.03300, section 4.1.2);
* advantage_baseline "leave_one_out": c_i = r_i - mean of the others = G / (G - 1) * (r_i - mean(r))
  (RLOO, arXiv 2402.14740, eq. 5);
* without normalize_advantage_std: A_i = c_i   (Dr.GRPO, arXiv 2503.20783);
* advantage_normalization "group": A_i = c_i / (std(r) + eps), the group's population deviation
  (GRPO);
* advantage_normalization "batch": A_i = c_i / (sqrt(mean of c^2 over every completion of the step)
  + eps), one scale for all prompts (REINFORCE++ with a group baseline, arXiv 2501.03262;
  compared in 2508.08221).
"""

import math
from collections.abc import Sequence
from decimal import Decimal
from typing import NamedTuple

from titan_grpo.config import GRPO
from titan_grpo.errors import DataError
from titan_grpo.samples import Completion

STD_EPSILON = 1e-6
"""Added to a standard deviation, so that nearly equal rewards are not scaled up to 1."""

ROUNDING = 1e-14
"""Difference from the mean, relative to the largest reward of a group, up to which it is none."""


class Scored(NamedTuple):
    """Input of the advantages: one completion or episode."""

    reward: float
    tokens: int
    """Sampled tokens: those that are trained on."""
    length: int
    """All tokens from the first sampled one on, in a task of several turns also the task's own.
    ``rollout.max_completion_tokens`` bounds it. Context before that is an agent's own prompt."""

    @classmethod
    def of(cls, completion: Completion) -> "Scored":
        """Return that of one completion."""
        flags = completion.sampled
        prompt = flags.index(True) if True in flags else 0
        return cls(completion.reward, completion.num_sampled, len(completion.token_ids) - prompt)


def by_episode(completions: Sequence[Completion]) -> tuple[list[Scored], list[int]]:
    """Return a group's episodes, and for each completion the index of its episode.

    An agent's episode with a changed history is several completions with one reward, which must
    count once. Its tokens are the sum over its completions, its length that of the longest.

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


def overlong_penalty(tokens: int, grpo: GRPO, longest: int) -> float:
    """Return the addend (0 or less) to the reward of a completion of ``tokens`` tokens: soft
    overlong punishment (DAPO, arXiv 2503.14476, eq. 13).

    With L_max = ``longest`` and L_cache = ``grpo.overlong_cache_tokens`` (if 0,
    ``grpo.overlong_cache_share`` of L_max): 0 up to L_max - L_cache tokens, then
    (L_max - L_cache - tokens) / L_cache, and -1 from L_max on; times ``grpo.overlong_penalty``.

    Example: L_max 100, L_cache 20: 80 tokens 0, 90 tokens -0.5, 100 tokens -1.
    """
    # Decimal: in binary 0.07 * 100 is a little more than 7, and would be rounded up to 8.
    share = Decimal(str(grpo.overlong_cache_share))
    cache = grpo.overlong_cache_tokens or math.ceil(share * longest)
    over = tokens - (longest - cache)
    return -grpo.overlong_penalty * min(max(over / cache, 0.0), 1.0) if cache else 0.0


def length_rewards(group: Sequence[Scored], grpo: GRPO) -> list[float]:
    """Return the addends to a group's rewards that favour short completions (Kimi k1.5, arXiv
    2501.12599, section 2.3.3): weight * s for a correct completion and weight * min(s, 0) for
    another, with s = 0.5 - (length - shortest) / (longest - shortest); 0 if all have one length.

    Example: weight 1, lengths 10, 20, 30, the last two correct -> 0 (wrong, so not 0.5), 0, -0.5.
    """
    lengths = [scored.length for scored in group]
    shortest, longest = min(lengths, default=0), max(lengths, default=0)
    if shortest == longest:
        return [0.0] * len(group)
    shares = [0.5 - (length - shortest) / (longest - shortest) for length in lengths]
    return [
        grpo.length_penalty * (share if scored.reward >= grpo.correct_reward else min(share, 0.0))
        for scored, share in zip(group, shares, strict=True)
    ]


def step_advantages(
    groups: Sequence[Sequence[Scored]], grpo: GRPO, longest: int
) -> list[tuple[float, ...]]:
    """Return the advantages of every group of a step, in the order given. ``longest``:
    rollout.max_completion_tokens.

    Equal (shaped) rewards, and a group of one, give exact zeros: such a group teaches nothing. So
    does a reward that is its group's mean: M2PO, clip fractions and others ask for the sign.

    Example: one group with rewards (1, 0, 0, 1): mean 0.5, deviation 0.5, so (1, -1, -1, 1) up to
    2e-6; without the division (0.5, -0.5, -0.5, 0.5), and with leave-one-out and no division (2/3,
    -2/3, -2/3, 2/3).

    Raises DataError for a reward that is not finite: it would make the whole group's advantages
    NaN.
    """
    shaped = [_shaped(group, grpo, longest) for group in groups]
    centred = [_centred(rewards, grpo.advantage_baseline) for rewards in shaped]
    if not grpo.normalize_advantage_std:
        return centred
    if grpo.advantage_normalization == "batch":
        scales = [_root_mean_square([c for group in centred for c in group])] * len(centred)
    else:
        # The deviation of the rewards for every baseline: c's would cancel leave-one-out's factor.
        scales = [_root_mean_square(_centred(rewards, "mean")) for rewards in shaped]
    return [
        tuple(c / (scale + STD_EPSILON) for c in group)
        for group, scale in zip(centred, scales, strict=True)
    ]


def has_spread(group: Sequence[Scored], grpo: GRPO, longest: int) -> bool:
    """Return whether a group teaches anything: its shaped rewards differ (DAPO's dynamic sampling
    keeps only such groups)."""
    return any(_centred(_shaped(group, grpo, longest), grpo.advantage_baseline))


def _shaped(group: Sequence[Scored], grpo: GRPO, longest: int) -> list[float]:
    for scored in group:
        if not math.isfinite(scored.reward):
            raise DataError(
                f"a reward must be a finite number, got {scored.reward!r}: the group's advantages"
                " would all be NaN"
            )
    rewards = [s.reward + overlong_penalty(s.length, grpo, longest) for s in group]
    if grpo.length_penalty:
        added = length_rewards(group, grpo)
        rewards = [reward + more for reward, more in zip(rewards, added, strict=True)]
    if grpo.scale_adv_by_len:
        rewards = [reward * scored.tokens for reward, scored in zip(rewards, group, strict=True)]
    return rewards


def _centred(rewards: Sequence[float], baseline: str) -> tuple[float, ...]:
    if not rewards:
        return ()
    count = len(rewards)
    mean = math.fsum(rewards) / count
    factor = count / max(count - 1, 1) if baseline == "leave_one_out" else 1.0
    # Exact zeros: by rounding alone a reward that is the mean would be better or worse than it.
    least = ROUNDING * max(map(abs, rewards))
    differences = (reward - mean for reward in rewards)
    return tuple(factor * each if abs(each) > least else 0.0 for each in differences)


def _root_mean_square(values: Sequence[float]) -> float:
    return math.sqrt(math.fsum(v * v for v in values) / len(values)) if values else 0.0
