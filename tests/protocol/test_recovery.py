import itertools

import pytest

from titan_grpo.protocol.messages import UNUSABLE, Label
from titan_grpo.protocol.recovery import Pause, Relabel, Resume, settle

OLD, NEW = Label("r", 7, "cd"), Label("r", 8, "ab")


def test_a_server_that_nobody_left_in_the_middle_needs_nothing():
    assert settle(OLD, True, str(OLD), False) == ()
    assert settle(None, True, "default", False) == ()


def test_a_server_paused_before_its_load_goes_on_with_what_it_has():
    assert settle(OLD, True, str(OLD), True) == (Resume(),)


def test_a_server_loaded_and_not_labelled_is_labelled_before_it_goes_on():
    assert settle(NEW, True, str(OLD), True) == (Relabel(str(NEW)), Resume())


@pytest.mark.parametrize(
    ("shown", "paused"), list(itertools.product([str(OLD), UNUSABLE], [True, False]))
)
def test_a_half_loaded_server_ends_paused_and_labelled_unusable(shown, paused):
    steps = settle(OLD, False, shown, paused)
    assert Resume() not in steps
    assert (Pause() in steps) == (not paused)
    assert (Relabel(UNUSABLE) in steps) == (shown != UNUSABLE)
