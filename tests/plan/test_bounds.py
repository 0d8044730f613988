"""What bounds a simulated run's steps besides the links: pauses, and the copy of a version."""

from dataclasses import replace

import pytest

from titan_grpo.config import WeightSync
from titan_grpo.plan.setup import Setup
from titan_grpo.plan.simulation import Result, Simulation

ONE = Setup(
    parameters=500_000_000,
    trainer_gpus=1,
    servers=1,
    in_flight=1,
    step_s=1.0,
    group_s=20.0,
    call_s=0.0,
    call_cpu_s=0.0,
    sync=WeightSync(relay=False),
)
"""A version of 1 GB, and one server that makes a step's only group in 20 s, 20 times as long as the
step on it."""


def step_s(result: Result) -> float:
    return result.simulated_s / result.steps


@pytest.mark.parametrize(("load_gb_s", "pause_s"), [(1e3, 0.0), (0.2, 5.0), (0.04, 25.0)])
def test_a_group_takes_longer_by_the_pause_in_it(load_gb_s: float, pause_s: float) -> None:
    """Each step publishes a version, and the next step's group is being made meanwhile."""
    result = Simulation(replace(ONE, load_gb_s=load_gb_s)).run()
    assert result.pause_s == pytest.approx([pause_s] * len(result.pause_s), abs=0.01)
    assert step_s(result) == pytest.approx(20.0 + pause_s, rel=0.03)


def test_a_step_takes_as_long_as_a_copy_that_takes_longer() -> None:
    slow = Simulation(replace(ONE, copy_gb_s=0.01, group_s=0.1, step_s=10.0)).run()
    assert step_s(slow) == pytest.approx(100.0, rel=0.05)
    assert slow.stall_for_copy_s == pytest.approx(90.0 * (slow.steps + 1))
