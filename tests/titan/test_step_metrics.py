import pytest

from titan_grpo.observe import names
from titan_grpo.titan.step_metrics import loss_values, rollout_values, server_values

A, B = "http://a:8000", "http://b:8000"


def test_rates_and_queues_are_those_between_two_readings() -> None:
    before = {"tokens": 100, f"tokens.{A}": 100, "commits": 1, "in_flight_at_commits": 8}
    now = {"tokens": 700, f"tokens.{A}": 400, f"tokens.{B}": 300, "ready": 5, "thrown_tokens": 9}
    now |= {f"in_flight.{A}": 16, f"in_flight.{B}": 0, "commits": 3, "in_flight_at_commits": 38}
    assert rollout_values(before, now, 3.0) == {
        names.THROWN_TOKENS: 9.0,
        names.READY_GROUPS: 5.0,
        names.GENERATED: 200.0,
        names.IN_FLIGHT: 16.0,
        names.IN_FLIGHT_AT_COMMIT: 15.0,
        "server/a:8000/in_flight": 16.0,
        "server/a:8000/tokens_per_s": 100.0,
        "server/b:8000/in_flight": 0.0,
        "server/b:8000/tokens_per_s": 100.0,
    }


def test_recorded_rollouts_have_no_rates() -> None:
    assert rollout_values({}, {"consumed_groups": 4}, 1.0) == {names.THROWN_TOKENS: 0.0}


def test_each_server_has_its_version_and_its_lag() -> None:
    assert server_values(7, {A: 5, B: 8, "http://c:1": None}) == {
        names.VERSION: 7.0,
        names.LAG: 1.0,
        names.LAG_MAX: 2.0,
        "server/a:8000/version": 5.0,
        "server/a:8000/lag": 2.0,
        "server/b:8000/version": 8.0,
        "server/b:8000/lag": 0.0,
    }


def test_what_the_loss_sums_up_reaches_the_step_under_the_names_of_the_table() -> None:
    found = {"clipped_low": 0.1, "clipped_high": 0.2, "on_policy_count": 0.0, "tokens": 40.0}
    values = loss_values(found | {"minus_logprob_max": 7.0, "logprob_max": -0.5})
    assert values[names.CLIP_FRACTION] == pytest.approx(0.3)
    assert (values[names.LOGPROB_MIN], values[names.LOGPROB_MAX]) == (-7.0, -0.5)
    assert values[names.TRAINED_TOKENS] == 40.0
    assert all(names.meaning(name) for name in values)
