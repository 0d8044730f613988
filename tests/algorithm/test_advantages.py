import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from titan_grpo.algorithm.advantages import (
    Scored,
    by_episode,
    has_spread,
    length_rewards,
    overlong_penalty,
    step_advantages,
)
from titan_grpo.config import GRPO
from titan_grpo.errors import DataError
from titan_grpo.samples import Completion

GROUP, NONE = GRPO(), GRPO(normalize_advantage_std=False)
BATCH = GRPO(advantage_normalization="batch")
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
    # The deviation is that of the rewards, whatever the baseline.
    divided = replace(loo, normalize_advantage_std=True)
    assert one((1, 0, 0, 1), divided) == pytest.approx((4 / 3, -4 / 3, -4 / 3, 4 / 3), abs=3e-6)


@pytest.mark.parametrize("options", [GROUP, NONE, BATCH])
@pytest.mark.parametrize("group", [(), (3.0,), (0.1, 0.1, 0.1), (1e9,) * 7, (0.3, 0.1 + 0.2)])
def test_a_group_without_differences_has_exact_zeros(
    group: tuple[float, ...], options: GRPO
) -> None:
    assert one(group, options) == (0.0,) * len(group)
    assert not has_spread([Scored(r, 5, 5) for r in group], options, LONGEST)


@pytest.mark.parametrize("baseline", ["mean", "leave_one_out"])
@pytest.mark.parametrize("options", [GROUP, NONE, BATCH])
@pytest.mark.parametrize("group", [(0.1, 0.2, 0.3), (-0.3, -0.2, -0.1), (1000.1, 1000.2, 1000.3)])
def test_a_reward_that_is_the_mean_of_its_group_is_neither_better_nor_worse(
    options: GRPO, baseline: Literal["mean", "leave_one_out"], group: tuple[float, ...]
) -> None:
    found = one(group, replace(options, advantage_baseline=baseline))
    assert found[1] == 0.0
    assert found[0] == pytest.approx(-found[2])


def test_one_deviation_of_the_whole_step_divides_all_groups() -> None:
    groups = [[Scored(reward, 5, 5) for reward in pair] for pair in ((1.0, -1.0), (4.0, -2.0))]
    root = math.sqrt(5)  # of the mean of 1, 1, 9, 9
    found = step_advantages(groups, BATCH, LONGEST)
    assert found[0] == pytest.approx((1 / root, -1 / root), abs=1e-5)
    assert found[1] == pytest.approx((3 / root, -3 / root), abs=1e-5)


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


def test_a_reward_is_scaled_by_the_tokens_that_are_trained_on() -> None:
    scaled = replace(NONE, scale_adv_by_len=True)
    group = [Scored(1.0, 3, 30), Scored(-0.5, 2, 30)]
    assert step_advantages([group], scaled, LONGEST) == [(2.0, -2.0)]


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
    # A recorded one without any is left out, and the step's means still count its group.
    assert Scored.of(replace(own_prompt, sampled=(False,) * 5)) == (0.0, 0, 5)


def test_an_episode_has_the_tokens_of_all_its_sequences_and_the_length_of_the_longest() -> None:
    def sequence(tokens: int, episode: int) -> Completion:
        ids, logprobs = (5,) * tokens, (-1.0,) * tokens
        return Completion(ids, logprobs, "stop", 0, 0, "s", float(episode), episode=episode)

    sequences = [sequence(4, 0), sequence(7, -1), sequence(6, 0), sequence(5, 0), sequence(3, -1)]
    scored, places = by_episode(sequences)
    assert scored == [(0.0, 15, 6), (-1.0, 7, 7), (-1.0, 3, 3)]
    assert places == [0, 1, 0, 0, 2]


def test_the_overlong_penalty_begins_in_the_cache_and_is_whole_at_the_limit() -> None:
    for options in (GRPO(overlong_cache_tokens=20), GRPO(overlong_cache_share=0.195)):
        found = [overlong_penalty(n, options, 100) for n in (1, 80, 90, 100, 130)]
        assert found == [0, 0, -0.5, -1, -1]
    equal = [Scored(1.0, 80, 80), Scored(1.0, 80, 100)]
    assert not has_spread(equal, GROUP, 100)
    assert has_spread(equal, options, 100)


@pytest.mark.parametrize("percent", [7, 14, 28, 55, 56])
def test_a_share_of_the_limit_is_rounded_up_only_where_it_is_no_whole_number(percent: int) -> None:
    share, cache = GRPO(overlong_cache_share=percent / 100), GRPO(overlong_cache_tokens=percent)
    for tokens in (100 - percent, 101 - percent, 99):
        assert overlong_penalty(tokens, share, 100) == overlong_penalty(tokens, cache, 100)
