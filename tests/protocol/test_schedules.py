"""Ten thousand random schedules of servers, groups and a trainer: the bound on staleness holds, and
nobody starves."""

import random
from dataclasses import dataclass, field

from titan_grpo.protocol.admission import Admission, GiveBack, Start, step, too_stale

SCHEDULES, MOVES = 10_000, 40


@dataclass
class Run:
    """The dispatcher's and the trainer's bookkeeping around the table; groups are the oldest
    version that made any of them."""

    chance: random.Random
    admission: Admission
    held: list[int]
    trainer: int
    freshest: bool
    running: list[int] = field(default_factory=list)
    waiting: list[int] = field(default_factory=list)
    """Cut short: they go on, with what they have, at the next start."""
    ready: list[int] = field(default_factory=list)
    consumed: int = 0

    def stale(self, version: int) -> bool:
        return too_stale(version, self.trainer, self.admission.max_staleness)

    def give_back(self) -> None:
        self.admission, _ = step(self.admission, GiveBack())

    def start(self) -> None:
        version = self.chance.choice(self.held)
        if self.admission.may_start(version):
            self.admission, _ = step(self.admission, Start(version))
            had = self.waiting.pop(0) if self.waiting else version
            self.running.append(version if self.stale(had) else min(had, version))

    def finish(self) -> None:
        if self.running:
            self.ready.append(self._take())

    def fail(self) -> None:
        if self.running:
            self._take()
            self.give_back()

    def cut(self) -> None:
        if self.running:
            self.waiting.append(self._take())
            self.give_back()

    def forget(self) -> None:
        """Whatever makes the groups is restarted: it is told what was used and what waits to be,
        and the rest is lost."""
        self.running, self.waiting = [], []
        a = self.admission
        self.admission = Admission(
            a.base, a.per_step, a.max_staleness, self.consumed + len(self.ready)
        )

    def sync(self) -> None:
        """A server gets the newest version, or one before it: versions may be skipped, never
        reordered."""
        server = self.chance.randrange(len(self.held))
        self.held[server] = max(self.held[server], self.trainer - self.chance.randrange(2))

    def abort(self) -> None:
        """What runs and can no longer be used."""
        for version in [v for v in self.running if self.stale(v)]:
            self.running.remove(version)
            self.give_back()

    def train(self) -> None:
        self.abort()
        for version in [v for v in self.ready if self.stale(v)]:
            self.ready.remove(version)
            self.give_back()
        count = self.admission.per_step
        if len(self.ready) < count:
            return
        self.ready.sort(reverse=self.freshest)
        used, self.ready = self.ready[:count], self.ready[count:]
        assert all(0 <= self.trainer - v <= self.admission.max_staleness for v in used), (
            used,
            self,
        )
        if self.chance.random() < 0.1:  # an unhealthy step: no version, the places are free again
            for _ in used:
                self.give_back()
        else:
            self.trainer += 1
            self.consumed += count

    def _take(self) -> int:
        return self.running.pop(self.chance.randrange(len(self.running)))

    def check(self) -> None:
        """Every place that is taken is a group that runs, waits to be used, or was used: nothing
        leaks, either way. And no more are taken than can be used in time."""
        alive, a = len(self.running) + len(self.ready), self.admission
        assert a.started == self.consumed + alive, self
        assert alive <= (a.max_staleness + 1) * a.per_step, self

    def settle(self) -> None:
        """With one server up to date and nothing failing any more, the trainer's batch is made:
        nothing starves."""
        self.held[0] = self.trainer
        self.abort()
        for version in [v for v in self.ready if self.stale(v)]:
            self.ready.remove(version)
            self.give_back()
        for _ in range(self.admission.per_step - len(self.running) - len(self.ready)):
            self.admission, _ = step(self.admission, Start(self.trainer))
            self.running.append(self.trainer)
        while self.running:
            self.finish()
        before = self.trainer, len(self.ready)
        assert before[1] >= self.admission.per_step, self
        while self.trainer == before[0] and len(self.ready) == before[1]:
            self.train()
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
    moves += moves + (Run.forget,)
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
            stalest = max(stalest, run.trainer - min(run.running, default=run.trainer))
        run.check()
        run.settle()
        trained += run.trainer - base
    assert trained > SCHEDULES, "schedules that train nothing show nothing"
    assert stalest > 1
