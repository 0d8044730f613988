"""Servers that read from each other explored: nothing but a whole version is staged, and whatever
fails, every server gets the newest one."""

import pytest

from tests.model_check.relay import BOUNDS, RELAY_BUGS, explore_relay


def test_servers_that_read_from_each_other_with_faults_at_every_step_break_no_rule():
    # scripts/explore.sh takes the large bounds too
    result = explore_relay(bounds=(BOUNDS[0], BOUNDS[2], BOUNDS[3]))
    assert (result.violation, result.trace) == ("", [])
    assert result.states > 10_000


@pytest.mark.parametrize("name", RELAY_BUGS)
def test_each_seeded_bug_of_the_relay_is_caught(name):
    assert explore_relay(RELAY_BUGS[name][1]).violation
