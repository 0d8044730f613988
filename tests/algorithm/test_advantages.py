import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.algorithm.papers import Array
from titan_grpo.algorithm.advantages import (
    Scored,
    has_spread,
    length_rewards,
    overlong_penalty,
    step_advantages,
)
from titan_grpo.config import GRPO
from titan_grpo.errors import DataError
from titan_grpo.samples import Completion

KINDS = {
    "group": GRPO(),
    "none": GRPO(normalize_advantage_std=False),
    "batch": GRPO(advantage_normalization="batch"),
}
GROUP, NONE, BATCH = KINDS.values()
LONGEST = 40
rewards = st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=16)


def one(values: Sequence[float], options: GRPO = GROUP) -> tuple[float, ...]:
    (out,) = step_advantages([[Scored(float(value), 5, 5) for value in values]], options, LONGEST)
    return out


def test_the_docstring_example() -> None:
    assert one((1, 0, 0, 1)) == pytest.approx((1, -1, -1, 1), abs=3e-6)
    assert one((1, 0, 0, 1), NONE) == (0.5, -0.5, -0.5, 0.5)
    loo = replace(NONE, advantage_baseline="leave_one_out")
    assert one((1, 0, 0, 1), loo) == pytest.approx((2 / 3, -2 / 3, -2 / 3, 2 / 3))


@pytest.mark.parametrize("options", [GROUP, NONE, BATCH])
@pytest.mark.parametrize("group", [(), (3.0,), (0.1, 0.1, 0.1), (1e9,) * 7])
def test_a_group_without_differences_has_exact_zeros(
    group: tuple[float, ...], options: GRPO
) -> None:
    assert one(group, options) == (0.0,) * len(group)
    assert not has_spread([Scored(r, 5, 5) for r in group], options, LONGEST)


def test_nearly_equal_rewards_are_not_blown_up() -> None:
    assert max(one((0.5, 0.5 + 1e-9))) < 1e-3


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_reward_that_is_not_finite_is_refused(bad: float) -> None:
    with pytest.raises(DataError, match="finite"):
        one((0.0, bad))


@given(rewards, st.sampled_from([GROUP, NONE, BATCH]))
def test_advantages_sum_to_zero_and_keep_the_order_of_rewards(
    group: list[float], options: GRPO
) -> None:
    advantages = one(group, options)
    assert sum(advantages) == pytest.approx(0, abs=1e-6)
    for a, r in zip(advantages, group, strict=True):
        assert all(a <= b for b, s in zip(advantages, group, strict=True) if r < s)


def reference(groups: list[list[tuple[float, int]]], options: GRPO) -> list[Array]:
    """The formulas of the papers on arrays; ``groups`` of (reward, tokens)."""
    centred, deviations = [], []
    for group in groups:
        r = np.array([reward for reward, _ in group], dtype=np.float64)
        n = np.array([tokens for _, tokens in group], dtype=np.float64)
        if cache := options.overlong_cache_tokens:
            penalty = np.where(n <= LONGEST - cache, 0.0, (LONGEST - cache - n) / cache)
            r = r + options.overlong_penalty * np.where(n >= LONGEST, -1.0, penalty)
        if options.scale_adv_by_len:
            r = r * (n - 1)  # the sampled ones: each completion here has a token of context
        if options.advantage_baseline == "leave_one_out":
            centred.append(np.array([r[i] - np.delete(r, i).mean() for i in range(len(r))]))
        else:
            centred.append(r - r.mean())
        deviations.append(r.std())
    if not options.normalize_advantage_std:
        return centred
    if options.advantage_normalization == "batch":
        return [c / (np.sqrt(np.mean(np.concatenate(centred) ** 2)) + 1e-6) for c in centred]
    return [c / (s + 1e-6) for c, s in zip(centred, deviations, strict=True)]


@pytest.mark.parametrize("overlong", [0, 15])
@pytest.mark.parametrize("scale_by_len", [False, True])
@pytest.mark.parametrize("normalization", ["group", "batch", "none"])
@pytest.mark.parametrize("baseline", ["mean", "leave_one_out"])
def test_advantages_are_those_of_the_formulas(
    baseline: Literal["mean", "leave_one_out"],
    normalization: str,
    scale_by_len: bool,
    overlong: int,
) -> None:
    rng = np.random.default_rng(5)
    groups = [
        [(float(rng.normal()), int(rng.integers(1, 45))) for _ in range(size)]
        for size in (2, 3, 8, 5)
    ]
    options = replace(
        KINDS[normalization],
        advantage_baseline=baseline,
        scale_adv_by_len=scale_by_len,
        overlong_cache_tokens=overlong,
        overlong_penalty=0.7,
    )
    scored = [[Scored(r, n - 1, n) for r, n in group] for group in groups]
    ours = step_advantages(scored, options, LONGEST)
    for mine, theirs in zip(ours, reference(groups, options), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-12)


def test_a_short_completion_gains_only_where_it_is_correct() -> None:
    group = [Scored(reward, n, n) for reward, n in ((0.0, 10), (1.0, 20), (1.0, 30), (0.0, 30))]
    penalty = GRPO(length_penalty=0.4)
    assert length_rewards(group, penalty) == pytest.approx([0.0, 0.0, -0.2, -0.2])
    assert length_rewards(group[2:], penalty) == [0.0, 0.0]
    assert length_rewards([], penalty) == []
    correct = [Scored(1.0, n, n) for n in (10, 15, 30)]
    (advantages,) = step_advantages([correct], penalty, LONGEST)
    shaped = np.array([1.2, 1.1, 0.8])
    np.testing.assert_allclose(advantages, (shaped - shaped.mean()) / (shaped.std() + 1e-6))


def test_the_overlong_penalty_counts_what_the_length_limit_counts() -> None:
    turns = Completion(
        (5, 8, 9), (-1.0, 0.0, -1.0), "length", 0, 0, "s", 1.0, sampled=(True, False, True)
    )
    assert Scored.of(turns) == (1.0, 2, 3)
    short = Completion((5,), (-1.0,), "stop", 0, 0, "s", 1.0)
    options = replace(NONE, overlong_cache_tokens=1)
    ((first, second),) = step_advantages([[Scored.of(turns), Scored.of(short)]], options, 3)
    assert (first, second) == (-0.5, 0.5)


def test_a_prompt_of_its_own_before_the_first_sampled_token_is_no_length() -> None:
    flags = (False, False, True, False, True)
    own_prompt = Completion(tuple(range(5)), (-1.0,) * 5, "stop", 0, 0, "s", sampled=flags)
    assert Scored.of(own_prompt).length == 3


def test_the_overlong_penalty_begins_in_the_cache_and_is_whole_at_the_limit() -> None:
    for options in (GRPO(overlong_cache_tokens=20), GRPO(overlong_cache_share=0.195)):
        found = [overlong_penalty(n, options, 100) for n in (1, 80, 90, 100, 130)]
        assert found == [0, 0, -0.5, -1, -1]
    equal = [Scored(1.0, 80, 80), Scored(1.0, 80, 100)]
    assert not has_spread(equal, GROUP, 100)
    assert has_spread(equal, options, 100)
