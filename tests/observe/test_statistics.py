import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from titan_grpo.observe.statistics import describe, ends, quantile

finite = st.floats(-1e6, 1e6)


def test_a_quantile_between_two_ranks_is_interpolated() -> None:
    assert quantile([1, 2, 3, 4], 0.5) == 2.5
    assert quantile([10], 0.95) == 10
    assert quantile([0, 100], 0.95) == pytest.approx(95)


@given(st.lists(finite, min_size=1, max_size=50))
def test_figures_lie_between_the_least_and_the_greatest_value(values: list[float]) -> None:
    s = describe(values)
    slack = 1e-6
    assert min(values) - slack <= s.median <= s.p95 + slack <= s.max + 2 * slack
    assert s.max == max(values)
    assert s.count == len(values)
    assert min(values) - slack <= s.mean <= max(values) + slack


def test_one_nan_does_not_hide_the_other_values() -> None:
    s = describe([1.0, math.nan, 3.0, math.inf])
    assert (s.count, s.mean, s.max) == (2, 2.0, 3.0)


def test_an_empty_series_has_no_figures() -> None:
    assert describe([]).pick("median", "max") == {"median": None, "max": None}


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([], (None, None, 0)),
        ([1.0], (1.0, 1.0, 1)),
        ([0.0, 1.0, 2.0, 3.0], (0.0, 3.0, 1)),
        (list(range(60)), (2.0, 57.0, 5)),
    ],
)
def test_the_ends_of_a_series_are_means_over_a_fifth_of_it_at_most_five_values(
    values, expected
) -> None:
    assert ends(values) == expected
