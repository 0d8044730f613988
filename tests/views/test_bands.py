"""Down-sampling: what a bucket and a bin say about the values in them."""

from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from titan_grpo.views.page import rounded
from titan_grpo.views.run import band, edges
from titan_grpo.views.timeline import covered, steps_at


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=300), st.integers(1, 50))
def test_every_value_lies_in_the_band_of_its_bucket(values: list[float], limit: int) -> None:
    bounds = edges(len(values), limit)
    found = band(np.array(values), bounds)
    assert len(found.mean) == min(len(values), limit) == len(bounds) - 1
    for k, (begin, end) in enumerate(pairwise(bounds)):
        assert found.low[k] == min(values[begin:end])
        assert found.high[k] == max(values[begin:end])
        assert np.isclose(found.mean[k], np.mean(values[begin:end]))


def test_buckets_have_the_same_size_give_or_take_one() -> None:
    assert edges(10, 4).tolist() == [0, 2, 5, 7, 10]
    assert edges(3, 4).tolist() == [0, 1, 2, 3]
    assert set(np.diff(edges(20_000, 400))) == {50}


def test_a_value_that_is_missing_hides_no_other() -> None:
    found = band(np.array([1.0, np.nan, np.nan, np.nan, 4.0, 6.0]), np.array([0, 2, 4, 6]))
    assert found.low.tolist()[::2] == [1.0, 4.0]
    assert found.mean.tolist()[::2] == [1.0, 5.0]
    assert found.high.tolist()[::2] == [1.0, 6.0]
    assert np.isnan([found.low[1], found.mean[1], found.high[1]]).all()


def test_bins_share_a_span_that_lies_over_their_border() -> None:
    spans = np.array([1.0, 5.0]), np.array([3.0, 5.5])
    assert covered(*spans, np.array([0.0, 2.0, 4.0, 6.0])).tolist() == [0.5, 0.5, 0.25]
    assert covered(np.empty(0), np.empty(0), np.array([0.0, 1.0])).tolist() == [0.0]


@given(st.lists(st.tuples(st.floats(0, 5), st.floats(0, 3)), min_size=1, max_size=20))
def test_bins_cover_what_the_spans_cover_and_never_more_than_all(
    gaps: list[tuple[float, float]],
) -> None:
    start, stop, at = [], [], 0.0
    for gap, length in gaps:
        start.append(at + gap)
        stop.append(at := at + gap + length)
    bounds = np.linspace(0, at + 1, 8)
    shares = covered(np.array(start), np.array(stop), bounds)
    assert (shares >= 0).all()
    assert (shares <= 1).all()
    total = sum(b - a for a, b in zip(start, stop, strict=True))
    assert np.isclose((shares * np.diff(bounds)).sum(), total)


def test_a_step_function_holds_its_value_until_the_next() -> None:
    times, values = np.array([1.0, 2.0]), np.array([5, 6])
    assert steps_at(times, values, np.array([0.0, 1.0, 1.5, 9.0])).tolist() == [-1, 5, 5, 6]
    assert steps_at(np.empty(0), np.empty(0, int), np.array([1.0])).tolist() == [-1]


def test_numbers_of_the_page_are_short_and_finite() -> None:
    assert rounded([1 / 3, 2.0, float("nan"), 123456.7]) == [0.3333, 2, None, 123500]
