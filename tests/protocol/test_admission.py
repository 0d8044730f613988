"""Admission: the staleness bound holds at use, and a server that holds the trainer's version is
never starved."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from titan_grpo.errors import ProtocolError
from titan_grpo.protocol.admission import Admission, GiveBack, Start, step, too_stale


class Counter:
    """The table with its state, for tests that read better that way."""

    def __init__(self, base: int, per_step: int, max_staleness: int) -> None:
        self.state = Admission(base, per_step, max_staleness)

    def may_start(self, version: int) -> bool:
        return self.state.may_start(version)

    def start(self, version: int) -> int:
        self.state, actions = step(self.state, Start(version))
        return actions[0].place

    def give_back(self) -> None:
        self.state, actions = step(self.state, GiveBack())
        assert actions == ()


def test_the_worked_example_of_the_docstring():
    admission = Counter(base=10, per_step=4, max_staleness=1)
    for _ in range(4):
        assert admission.may_start(9)
        admission.start(9)
    assert not admission.may_start(9)
    for _ in range(4):
        admission.start(10)
    assert not admission.may_start(10)
    assert admission.may_start(11)
    with pytest.raises(ProtocolError, match="needs a server at version 11"):
        admission.start(10)


def test_a_place_given_back_can_be_taken_again():
    admission = Counter(base=0, per_step=1, max_staleness=0)
    admission.start(0)
    assert not admission.may_start(0)
    admission.give_back()
    assert admission.start(0) == 0


def test_giving_back_what_was_never_started_is_a_bug_that_is_named():
    with pytest.raises(ProtocolError, match="never started"):
        Counter(0, 1, 0).give_back()


@given(
    base=st.integers(0, 50),
    per_step=st.integers(1, 5),
    bound=st.integers(0, 3),
    servers=st.integers(1, 3),
    seed=st.integers(0, 2**32),
)
def test_staleness_at_use_stays_within_the_bound_and_every_step_gets_its_batch(
    base, per_step, bound, servers, seed
):
    """Random schedules: servers lag, groups finish out of order, fail and come back."""
    chance = random.Random(seed)
    admission = Counter(base, per_step, bound)
    held = [base] * servers
    trainer, running, ready = base, [], []
    for _ in range(400):
        move = chance.choice(("start", "start", "finish", "finish", "fail", "sync", "train"))
        server = chance.randrange(servers)
        if move == "start" and admission.may_start(held[server]):
            admission.start(held[server])
            running.append(held[server])
        elif move == "finish" and running:
            ready.append(running.pop(chance.randrange(len(running))))
        elif move == "fail" and running:
            running.pop(chance.randrange(len(running)))
            admission.give_back()
        elif move == "sync":
            held[server] = trainer
        elif move == "train":
            for stale in [v for v in ready if too_stale(v, trainer, bound)]:
                ready.remove(stale)
                admission.give_back()
            if len(ready) >= per_step:
                used, ready = ready[:per_step], ready[per_step:]
                assert all(0 <= trainer - v <= bound for v in used)
                trainer += 1
    # Nothing starves: with everything in flight settled and one server up to date, the trainer's
    # batch can be filled.
    for version in [*running, *ready]:
        if too_stale(version, trainer, bound):
            admission.give_back()
    usable = sum(not too_stale(v, trainer, bound) for v in [*running, *ready])
    while usable < per_step:
        admission.start(trainer)
        usable += 1


def test_in_order_use_never_drops_a_group():
    """Without overtaking, what admission lets start is within the bound when its turn comes."""
    admission = Counter(base=0, per_step=3, max_staleness=2)
    made = []
    for turn in range(20):
        version = max(0, turn - 1)
        while admission.may_start(version):
            made.append((admission.start(version), version))
        batch, made = made[:3], made[3:]
        assert [number // 3 for number, _ in batch] == [turn] * 3
        assert not any(too_stale(v, turn, 2) for _, v in batch)
