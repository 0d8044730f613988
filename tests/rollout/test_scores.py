"""An evaluation's figures against their definitions, by counting."""

from itertools import combinations

import pytest

from titan_grpo.rollout.scores import (
    Estimate,
    Prompted,
    Scores,
    estimate,
    line,
    metrics,
    of_version,
    pass_at_k,
    passes,
)
from titan_grpo.samples import Completion, Group, Prompt


@pytest.mark.parametrize("samples", [1, 4, 7])
def test_pass_at_k_is_the_share_of_all_choices_of_k_completions_that_have_one_that_passes(
    samples,
) -> None:
    for passed in range(samples + 1):
        outcomes = [True] * passed + [False] * (samples - passed)
        for k in range(1, samples + 1):
            chosen = [any(each) for each in combinations(outcomes, k)]
            assert pass_at_k(samples, passed, k) == pytest.approx(sum(chosen) / len(chosen))


def test_an_estimate_is_the_mean_with_1_96_standard_errors_to_either_side() -> None:
    found = estimate([0.0, 1.0, 1.0, 0.0])
    assert found.value == 0.5
    # deviation sqrt(1 / 3), over sqrt(4) prompts
    assert found.high - 0.5 == pytest.approx(1.959964 * (1 / 3) ** 0.5 / 2)
    assert 0.5 - found.low == pytest.approx(found.high - 0.5)
    assert estimate([0.25]) == Estimate(0.25), "one prompt says nothing of its spread"


def test_completions_of_one_prompt_make_the_interval_no_narrower() -> None:
    once = passes([Prompted((1.0,), (3,)), Prompted((0.0,), (3,))], 1, 1.0)
    many = passes([Prompted((1.0,) * 50, (3,) * 50), Prompted((0.0,) * 50, (3,) * 50)], 1, 1.0)
    assert once == many


def test_a_completion_passes_with_at_least_the_least_reward() -> None:
    prompts = [Prompted((0.5, 0.4), (3, 3)), Prompted((0.1, 0.2), (3, 3))]
    assert passes(prompts, 1, 0.5).value == 0.25
    assert passes(prompts, 2, 0.5).value == 0.5
    assert passes(prompts, 1, 0.0).value == 1.0


@pytest.mark.parametrize(
    ("first", "last", "spans", "kept"),
    [
        (5, 5, (), True),
        (5, 5, ((5, 2),), True),
        (5, 6, ((5, 1), (6, 1)), False),
        (4, 5, ((5, 2),), False),
        (6, 6, ((6, 2),), False),
    ],
)
def test_only_tokens_of_the_version_on_its_own_kv_count(first, last, spans, kept) -> None:
    whole = Completion((7, 8), (-1.0, -1.0), "stop", 5, 5, "a")
    other = Completion((7, 8), (-1.0, -1.0), "stop", first, last, "a", spans=spans)
    assert of_version(Group(Prompt(0, (1,)), (whole, other)), 5) is kept


def test_the_metrics_have_the_evaluations_name_and_no_bound_that_there_is_not() -> None:
    one = Estimate(0.5)
    found = Scores("test", 7, "a", 1, 2, one, {2: Estimate(1.0, 0.5, 1.5)}, one, 3, 2.0)
    assert metrics(found) == {
        "evaluation/test/version": 7.0,
        "evaluation/test/refused": 3.0,
        "evaluation/test/seconds": 2.0,
        "evaluation/test/reward": 0.5,
        "evaluation/test/tokens": 0.5,
        "evaluation/test/pass_at_2": 1.0,
        "evaluation/test/pass_at_2_low": 0.5,
        "evaluation/test/pass_at_2_high": 1.5,
    }
    assert "pass@2 1.000 (0.500 to 1.500)" in line(found)
    assert "3 refused" in line(found)
