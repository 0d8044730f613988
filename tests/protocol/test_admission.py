"""Admission: the staleness bound holds at use, and a server that holds the trainer's version is
never starved."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from titan_grpo.errors import ProtocolError
from titan_grpo.protocol.admission import (
    Admission,
    Admit,
    Event,
    Generate,
    GiveUp,
    Start,
    Unversioned,
    Used,
    step,
    too_stale,
    urgency,
)


class Places:
    """The table with its state, for tests that read better that way."""

    def __init__(self, base: int, per_step: int, max_staleness: int) -> None:
        self.state = Admission(base, per_step, max_staleness)
        self.next = 0

    def does(self, event: Event) -> tuple[Generate, ...]:
        self.state, actions = step(self.state, event)
        return actions

    def admit(self, version: int) -> bool:
        """Whether the next prompt got its place."""
        if not self.state.may_start(self.next, version):
            return False
        self.does(Admit(self.next, version))
        self.next += 1
        return True


def test_the_worked_example_of_the_docstring() -> None:
    places = Places(base=10, per_step=4, max_staleness=1)
    while places.admit(10):
        pass
    assert places.next == 8
    assert [places.state.may_start(prompt, 9) for prompt in (3, 4)] == [True, False]
    assert [places.does(Start(prompt, 10))[0].used_at for prompt in (0, 3, 4, 7)] == [
        10,
        10,
        11,
        11,
    ]
    with pytest.raises(ProtocolError, match="needs a server at version 11"):
        places.does(Admit(8, 10))
    assert places.admit(11)


def test_a_group_that_is_made_again_has_its_place_however_many_started_after_it() -> None:
    places = Places(base=0, per_step=2, max_staleness=1)
    while places.admit(0):
        pass
    places.does(Start(0, 0))
    assert places.does(Start(0, 0))[0].used_at == 0


def test_a_prompt_given_up_and_a_group_without_a_version_move_the_others_forward() -> None:
    places = Places(base=0, per_step=2, max_staleness=1)
    while places.admit(0):
        pass
    assert [places.state.used_at(prompt) for prompt in range(5)] == [0, 0, 1, 1, 2]
    places.does(GiveUp(0))
    assert [places.state.used_at(prompt) for prompt in range(1, 5)] == [0, 0, 1, 1]
    places.does(Used((1, 2)))
    places.does(Unversioned(1))
    assert [places.state.used_at(prompt) for prompt in (3, 4)] == [0, 1]


def test_a_prompt_made_again_after_a_restart_has_its_place_before_finished_later_ones() -> None:
    places = Places(base=0, per_step=2, max_staleness=1)
    places.state = Admission(0, 2, 1, open=(2, 3))  # finished before the restart, and kept
    assert places.admit(0)
    assert places.admit(0)
    assert [places.state.used_at(prompt) for prompt in range(4)] == [0, 0, 1, 1]


@pytest.mark.parametrize("event", [Used((3,)), GiveUp(3), Start(3, 9)])
def test_what_has_no_place_cannot_be_started_used_or_given_up(event: Event) -> None:
    with pytest.raises(ProtocolError):
        Places(0, 1, 9).does(event)


@given(
    base=st.integers(0, 50),
    per_step=st.integers(1, 5),
    bound=st.integers(0, 3),
    servers=st.integers(1, 3),
    seed=st.integers(0, 2**32),
)
def test_a_step_gets_its_own_groups_within_the_bound_in_every_schedule(
    base: int, per_step: int, bound: int, servers: int, seed: int
) -> None:
    """Random schedules: servers lag, groups end out of order, fail, are given up, and come back."""
    chance = random.Random(seed)
    places = Places(base, per_step, bound)
    held = [base] * servers
    trainer = base
    waiting: list[int] = []
    running: dict[int, int] = {}
    ready: dict[int, int] = {}
    used: list[int] = []
    given_up: set[int] = set()

    def train(versioned: bool) -> int:
        lowest = list(places.state.open[:per_step])
        if len(lowest) < per_step or not set(lowest) <= ready.keys():
            return trainer
        assert not any(too_stale(ready.pop(prompt), trainer, bound) for prompt in lowest)
        used.extend(lowest)
        places.does(Used(tuple(lowest)))
        if not versioned:
            places.does(Unversioned(per_step))
        return trainer + versioned

    moves = ("admit", "start", "start", "finish", "finish", "fail", "give up", "sync", "train")
    for _ in range(400):
        move, server = chance.choice(moves), chance.randrange(servers)
        if move == "admit" and places.admit(max(held)):
            waiting.append(places.next - 1)
        elif move == "start" and waiting:
            prompt = chance.choice(waiting)
            if places.state.may_start(prompt, held[server]):
                places.does(Start(prompt, held[server]))
                waiting.remove(prompt)
                running[prompt] = held[server]
        elif move in ("finish", "fail", "give up") and running:
            prompt = chance.choice(sorted(running))
            version = running.pop(prompt)
            if move == "finish":
                ready[prompt] = version
            elif move == "fail":
                waiting.append(prompt)
            else:
                places.does(GiveUp(prompt))
                given_up.add(prompt)
        elif move == "sync":
            held[server] = trainer
        elif move == "train":
            trainer = train(chance.random() < 0.9)
    # Nothing starves: with one server up to date and nothing failing, the trainer gets its step.
    while places.admit(trainer):
        waiting.append(places.next - 1)
    for prompt in waiting:
        places.does(Start(prompt, trainer))
        running[prompt] = trainer
    before, ready = trainer, {**ready, **running}
    trainer = train(True)
    assert trainer == before + 1
    assert used == sorted(used)
    assert set(used) | given_up | set(places.state.open) == set(range(places.next))


def test_a_group_starts_early_by_as_much_as_it_is_expected_to_take_longer() -> None:
    later = [urgency(10 + ahead, expected, 2.0) for ahead, expected in ((0, 1), (1, 1), (1, 4))]
    assert sorted(later) == [later[2], later[0], later[1]]
    assert urgency(10, 0.0, 0.0) == urgency(11, 0.0, 0.0)
