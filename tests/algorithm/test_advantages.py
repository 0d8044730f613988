import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from titan_grpo.algorithm.advantages import group_advantages
from titan_grpo.errors import DataError

rewards = st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=16)


def test_the_docstring_example():
    assert group_advantages((1, 0, 0, 1), True) == pytest.approx((1, -1, -1, 1), abs=3e-6)
    assert group_advantages((1, 0, 0, 1), False) == (0.5, -0.5, -0.5, 0.5)


@pytest.mark.parametrize("normalize_std", [True, False])
@pytest.mark.parametrize("group", [(), (3.0,), (0.1, 0.1, 0.1), (1e9,) * 7])
def test_a_group_without_differences_has_exact_zeros(group, normalize_std):
    assert group_advantages(group, normalize_std) == (0.0,) * len(group)


def test_nearly_equal_rewards_are_not_blown_up():
    assert max(group_advantages((0.5, 0.5 + 1e-9), True)) < 1e-3


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_reward_that_is_not_finite_is_refused(bad):
    with pytest.raises(DataError, match="finite"):
        group_advantages((0.0, bad), True)


@given(rewards, st.booleans())
def test_advantages_sum_to_zero_and_keep_the_order_of_rewards(group, normalize_std):
    advantages = group_advantages(group, normalize_std)
    assert sum(advantages) == pytest.approx(0, abs=1e-6)
    for a, r in zip(advantages, group, strict=True):
        assert all(a <= b for b, s in zip(advantages, group, strict=True) if r < s)


@given(rewards)
def test_normalized_advantages_have_a_mean_square_of_one_at_most(group):
    advantages = group_advantages(group, True)
    assert sum(a * a for a in advantages) / len(advantages) <= 1 + 1e-9
