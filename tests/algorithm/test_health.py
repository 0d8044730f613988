"""When a step may be taken. That a skipped step is skipped on every rank: test_two_ranks.py and
tests/e2e."""

import math

import pytest
import torch

from titan_grpo.algorithm.metrics import REASONS, Collapse, flags, reasons


def found(loss=0.5, norm=1.0, limit=0.0, collapsed=False):
    return reasons(flags(torch.tensor(loss), torch.tensor(norm), limit, collapsed).tolist())


def test_good_numbers_give_no_reason():
    assert found() == ()
    assert found(norm=9.0, limit=9.0) == ()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_named(bad):
    assert found(loss=bad) == (REASONS[0],)
    assert found(norm=bad, limit=1.0) == (REASONS[1],)
    assert found(loss=bad, norm=bad) == REASONS[:2]


def test_a_large_gradient_counts_only_with_a_limit():
    assert found(norm=9.1, limit=9.0) == (REASONS[2],)
    assert found(norm=1e30) == ()


def test_collapsed_rewards_are_named():
    assert found(collapsed=True) == (REASONS[3],)


def test_rewards_collapse_after_equal_ones_in_a_row_and_not_before():
    state = Collapse(limit=2)
    seen = []
    for rewards in ((1, 1), (1, 2), (3, 3), (0, 0), (0, 0), (0, 1)):
        state = state.after(rewards)
        seen.append(state.collapsed)
    assert seen == [False, False, False, True, True, False]


def test_without_a_limit_rewards_never_collapse():
    state = Collapse(limit=0)
    for _ in range(5):
        state = state.after((1.0, 1.0))
    assert not state.collapsed
