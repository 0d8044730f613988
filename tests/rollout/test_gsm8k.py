"""The reward of the gsm8k task: which numbers it takes for equal, and what it refuses."""

from typing import Any

import pytest

from titan_grpo.errors import DataError
from titan_grpo.rollout.tasks.built_in import correct, final_number


@pytest.mark.parametrize(
    ("said", "wanted"),
    [
        ("so 17, \\boxed{18}.", "18"),
        ("\\boxed{17}, no: \\boxed{18}, as 9 + 9 = 18", "18"),
        ("\\boxed{1,234,000}", "1234000"),
        ("\\boxed{1{,}234}", "1,234"),
        ("\\boxed{\\$18.00}", "18"),
        ("\\boxed{18.}", "18"),
        ("\\boxed{-3.5}", "-3.50"),
        ("\\boxed{25\\%}", "25"),
        ("\\boxed{\\text{18 dollars}}", "18"),
        ("\\boxed{18 \\text{ miles per hour}}", "18"),
        ("\\boxed{18 cm^2}", "18"),
        ("\\boxed{18/day}", "18"),
        ("\\boxed{x = 3 + 15 = 18}", "18"),
        ("\\boxed{\\frac{1}{2}}", "0.5"),
        ("\\boxed{-\\dfrac{36}{2}}", "-18"),
        ("\\boxed{3/4}", "0.75"),
        ("First 20 - 2. The answer is $18.", "18"),
        ("She pays **$1,018.50**.", "1018.5"),
        ("The answer is \u22125.", "-5"),
        ("\\boxed{\u00a318\\;\\text{each}}", "18"),
        ("\\boxed{{18}}", "18"),
        ("\\boxed{(18)}", "18"),
        ("\\boxed{+18}", "18"),
        ("\\boxed{ 18.0 }", "18"),
        ("\\boxed{\\frac12}", "0.5"),
        ("\\boxed{-\\dfrac 9 2 \\text{ kg}}", "-4.5"),
        ("\\boxed{90^\\circ}", "90"),
        ("\\boxed{90^{\\circ} C}", "90"),
        ("\\boxed{1.5 \\text{ million dollars}}", "1500000"),
        ("It is $18 Million.", "18,000,000"),
        ("\\boxed{18 million}", "18 million"),
        ("\\boxed{18 millipedes}", "18"),
    ],
)
def test_gsm8k_takes_a_number_for_the_number_that_it_is(said: str, wanted: str) -> None:
    assert correct([said], [f"why #### {wanted}"]) == [1]


@pytest.mark.parametrize(
    "said",
    [
        "\\boxed{9^{9^{9}}}",
        "\\boxed{2^{10^{10}}}",
        "\\boxed{(1+2)^{999999999}}",
        "\\boxed{1000000000!}",
        "\\boxed{1e999999999}",
        "\\boxed{18/0}",
        "\\boxed{" + "9" * 10000 + "}",
        "9" * 10000,
        "\\boxed{3 + 15}",
        "\\boxed{18^1}",
        "\\boxed{18 or 19}",
        "\\boxed{1\\frac{8}{1}}",
        "18, or \\boxed{}",
        "The answer is \u221218.",
        "eighteen",
        "",
    ],
)
def test_gsm8k_evaluates_nothing(said: str) -> None:
    assert correct([said], ["#### 18"]) == [0]


@pytest.mark.parametrize(
    ("said", "number"),
    [
        ("\\boxed{9^{9^{9}}}", None),
        ("\\boxed{17}, no: \\boxed{\\frac{\\text{36}}{2}}", 18),
        ("\\boxed{17}, no: \\boxed{{{{18}}}}", None),
        ("\\boxed{(1)(8)}", None),
        ("\\boxed{2(9)}", None),
        ("\\boxed{\\frac123}", None),
        ("\\boxed{18 thousand}", 18000),
        ("17, then \\boxed{18", None),
    ],
)
def test_gsm8k_reads_the_last_box_or_nothing(said: str, number: int | None) -> None:
    assert final_number(said) == number


def test_gsm8k_refuses_a_reference_that_is_no_number() -> None:
    with pytest.raises(DataError, match=r"must end with a number, got 'x\^2': .*rollout\.reward"):
        correct(["x^2"], ["so #### x^2"])


def test_gsm8k_takes_a_number_for_its_text() -> None:
    assert correct(["18", "19"], numbers(18, 18)) == [1, 0]
    with pytest.raises(DataError, match="must end with a number, got 'None'"):
        correct(["18"], numbers(None))


def numbers(*answers: Any) -> Any:
    """Answers as a file may have them."""
    return list(answers)
