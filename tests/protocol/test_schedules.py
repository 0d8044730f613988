"""Ten thousand random schedules of servers, groups and a trainer: the bound on staleness holds, and
no prompt starves."""

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count, islice

from titan_grpo.protocol.admission import (
    Admission,
    Admit,
    GiveUp,
    Start,
    Unversioned,
    Used,
    step,
    too_stale,
)
from titan_grpo.rollout.messages import Cursor

SCHEDULES, MOVES = 10_000, 40


@dataclass
class Run:
    """The dispatcher's and the trainer's bookkeeping around the table; a group is the oldest
    version that made any of it."""

    chance: random.Random
    admission: Admission
    held: list[int]
    trainer: int
    in_order: bool
    """Steps take the groups that were started for them; otherwise any that are finished."""
    cursor: Cursor = field(default_factory=Cursor)
    fresh: Iterator[int] = field(default_factory=count)
    waiting: dict[int, int | None] = field(default_factory=dict)
    """To be started, with the oldest version that made a part of it before."""
    running: dict[int, int] = field(default_factory=dict)
    ready: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.next = next(self.fresh)

    def does(self, event) -> None:
        self.admission, _ = step(self.admission, event)

    def stale(self, version: int) -> bool:
        return too_stale(version, self.trainer, self.admission.max_staleness)

    def admit(self) -> None:
        while self.admission.may_start(self.next, max(self.held)):
            self.does(Admit(self.next, max(self.held)))
            self.waiting[self.next] = None
            self.next = next(self.fresh)

    def start(self) -> None:
        self.admit()
        self._start(self.chance.choice(self.held))

    def _start(self, version: int) -> None:
        able = [prompt for prompt in self.waiting if self.admission.may_start(prompt, version)]
        if able:
            prompt = self.chance.choice(able)
            self.does(Start(prompt, version))
            had, needed = self.waiting.pop(prompt), self.admission.needed_version(prompt)
            kept = had is not None and had >= needed and not self.stale(had)
            self.running[prompt] = min(had, version) if kept else version

    def finish(self) -> None:
        if self.running:
            prompt, version = self._end()
            self.ready[prompt] = version

    def fail(self) -> None:
        if self.running:
            self.waiting[self._end()[0]] = None

    def cut(self) -> None:
        if self.running:
            prompt, version = self._end()
            self.waiting[prompt] = version

    def give_up(self) -> None:
        if self.running and self.chance.random() < 0.3:
            prompt, _ = self._end()
            self.does(GiveUp(prompt))
            self.cursor.use(prompt)

    def forget(self) -> None:
        """Whatever makes the groups is restarted: it is told what was used and what waits to be,
        and the rest is lost."""
        a = self.admission
        self.running, self.waiting = {}, {}
        self.admission = Admission(
            a.base, a.per_step, a.max_staleness, a.used, tuple(sorted(self.ready))
        )
        kept = frozenset(self.ready)
        self.fresh = (prompt for prompt in self.cursor.unused() if prompt not in kept)
        self.next = next(self.fresh)

    def sync(self) -> None:
        """A server gets the newest version, or one before it: versions may be skipped, never
        reordered."""
        server = self.chance.randrange(len(self.held))
        self.held[server] = max(self.held[server], self.trainer - self.chance.randrange(2))

    def abort(self) -> None:
        """What runs and can no longer be used."""
        for prompt in [p for p, version in self.running.items() if self.stale(version)]:
            assert not self.in_order, "the trainer waits for it"
            del self.running[prompt]
            self.waiting[prompt] = None

    def train(self) -> None:
        self.abort()
        for prompt in [p for p, version in self.ready.items() if self.stale(version)]:
            assert not self.in_order, "the trainer waits for it"
            del self.ready[prompt]
            self.waiting[prompt] = None
        per_step = self.admission.per_step
        order = self.cursor.unused() if self.in_order else iter(sorted(self.ready))
        taken = list(islice(order, per_step))
        if len(taken) < per_step or not set(taken) <= self.ready.keys():
            return
        for prompt in taken:
            version = self.ready.pop(prompt)
            assert 0 <= self.trainer - version <= self.admission.max_staleness, self
            self.cursor.use(prompt)
        self.does(Used(tuple(taken)))
        if self.chance.random() < 0.1:  # an unhealthy step: no version, the places are free again
            self.does(Unversioned(per_step))
        else:
            self.trainer += 1

    def _end(self) -> tuple[int, int]:
        prompt = self.chance.choice(sorted(self.running))
        return prompt, self.running.pop(prompt)

    def check(self) -> None:
        """Every open place is a group that waits, runs or is ready: nothing leaks, either way. And
        there are no more than can be used in time."""
        alive, a = {*self.waiting, *self.running, *self.ready}, self.admission
        assert set(a.open) == alive, self
        assert len(alive) == len(self.waiting) + len(self.running) + len(self.ready)
        ahead = a.base + (a.used + len(alive) - 1) // a.per_step - self.trainer
        assert not alive or ahead <= a.max_staleness, self

    def settle(self) -> None:
        """With one server up to date and nothing failing any more, the trainer's batch is made:
        nothing starves."""
        self.held[0] = self.trainer
        self.abort()
        self.admit()
        while self.waiting:
            self._start(self.trainer)
        while self.running:
            self.finish()
        before = len(self.ready)
        self.train()
        if self.waiting:  # Finished groups had been overtaken.
            self.settle()
            return
        assert len(self.ready) == before - self.admission.per_step, self
        self.check()


def test_the_bound_holds_and_nothing_leaks_or_starves_in_ten_thousand_random_schedules():
    moves = (
        Run.start,
        Run.start,
        Run.start,
        Run.finish,
        Run.finish,
        Run.fail,
        Run.cut,
        Run.sync,
        Run.train,
        Run.abort,
    )
    moves += (*moves, Run.forget, Run.give_up)
    trained = stalest = 0
    for seed in range(SCHEDULES):
        chance = random.Random(seed)
        base, bound = chance.randrange(9), chance.randrange(5)
        servers = [base] * chance.randint(1, 3)
        run = Run(
            chance,
            Admission(base, chance.randint(1, 4), bound),
            servers,
            base,
            chance.random() < 0.5,
        )
        for _ in range(MOVES):
            chance.choice(moves)(run)
            stalest = max(stalest, run.trainer - min(run.running.values(), default=run.trainer))
        run.check()
        run.settle()
        trained += run.trainer - base
    assert trained > SCHEDULES, "schedules that train nothing show nothing"
    assert stalest > 1
