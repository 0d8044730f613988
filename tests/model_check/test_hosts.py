"""Two trainer hosts explored: no version but a whole one is offered or staged, and one host's
failure costs a version and no other."""

import pytest

from tests.model_check.hosts import HOST_BUGS, explore_hosts


def test_two_hosts_with_faults_at_every_step_break_no_rule():
    result = explore_hosts(versions=4, faults=2)
    assert (result.violation, result.trace) == ("", [])
    assert result.states > 20_000


@pytest.mark.parametrize("name", HOST_BUGS)
def test_each_seeded_bug_of_the_hosts_is_caught(name):
    assert explore_hosts(3, HOST_BUGS[name][1]).violation
