import itertools

import pytest

from titan_grpo.protocol.messages import UNUSABLE, Label
from titan_grpo.protocol.recovery import Health, Pause, Relabel, Resume, settle

OLD, NEW = Label("r", 7, "cd"), Label("r", 8, "ab")


def test_a_server_that_nobody_left_in_the_middle_needs_nothing() -> None:
    assert settle(OLD, True, str(OLD), False) == ()
    assert settle(None, True, "default", False) == ()


def test_a_server_paused_before_its_load_goes_on_with_what_it_has() -> None:
    assert settle(OLD, True, str(OLD), True) == (Resume(),)


def test_a_server_loaded_and_not_labelled_is_labelled_before_it_goes_on() -> None:
    assert settle(NEW, True, str(OLD), True) == (Relabel(str(NEW)), Resume())


@pytest.mark.parametrize(
    ("shown", "paused"), list(itertools.product([str(OLD), UNUSABLE], [True, False]))
)
def test_a_half_loaded_server_ends_paused_and_labelled_unusable(shown: str, paused: bool) -> None:
    steps = settle(OLD, False, shown, paused)
    assert Resume() not in steps
    assert (Pause() in steps) == (not paused)
    assert (Relabel(UNUSABLE) in steps) == (shown != UNUSABLE)


HEALTH = Health(first_s=0.5, longest_s=3.0)


def test_rests_double_up_to_the_longest_and_an_answer_starts_over() -> None:
    health, rests = HEALTH, []
    for _ in range(5):
        health = health.silent(10.0)
        rests.append(health.until - 10.0)
    assert rests == [0.5, 1.0, 2.0, 3.0, 3.0]
    assert health.answered() == HEALTH


def test_nobody_is_asked_during_a_rest() -> None:
    health = HEALTH.silent(10.0)
    assert HEALTH.askable(0.0)
    assert not health.askable(10.4)
    assert health.askable(10.5)
