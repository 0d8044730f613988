"""Rules of finishing requests before a commit, with their reasons."""

from dataclasses import replace

import pytest

from titan_grpo.config import GRPO, JobConfig, Rollout, violations

DRAINING = Rollout(servers=["http://a:1"], in_flight_weight_updates=False)


@pytest.mark.parametrize("bound", [1, 2])
def test_a_bound_over_one_needs_updates_in_flight(bound):
    found = violations(JobConfig(GRPO(), replace(DRAINING, max_staleness=bound)))
    assert [v for v in found if "no request outlives a commit" in v] == found
    assert len(found) == (bound > 1)
    assert (
        violations(
            JobConfig(GRPO(), replace(DRAINING, max_staleness=bound, in_flight_weight_updates=True))
        )
        == []
    )


def test_requests_of_environments_can_not_be_waited_for():
    (found,) = violations(JobConfig(GRPO(), replace(DRAINING, source="push")))
    assert found.startswith("rollout.in_flight_weight_updates must be true with rollout.source"), (
        found
    )
