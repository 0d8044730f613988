"""What every case needs: the site, the current fault run, windows of time without a fault, and a
look at everything at rest."""

import json
import statistics
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from tests.faults import judge
from tests.faults.report import Result
from tests.faults.site import Instance, Say, Seat, Site
from tests.rigs.trainer_handle import Event, RunFailed, Step, TrainerProcess, wait_until
from tests.rigs.trainer_process import Settings
from titan_grpo.errors import ServerRefused, ServerUnreachable
from titan_grpo.protocol.lane import Point

BASE_S = 2.0
"""How long a run is watched without a fault before each case."""

SETTLE_S = 150.0
"""Longest wait for something that must happen anyway; what has a bound of its own is judged by
that."""

REACH_S = 120.0
"""Longest wait for a lane to come to a point."""

LOOK_S = 60.0
"""Deadline of each question to a server at rest."""

REPORT_S = 60.0
"""Longest wait for steps to be reported."""


Window = tuple[float, float]
"""From and until when, on the monotonic clock."""


@dataclass(frozen=True, slots=True)
class Mark:
    """The state when a case began: the time, and how many commits each server had recorded."""

    t: float
    commits: Mapping[int, int]


class Bench:
    """Carries from case to case the site and the fault run that trains on it."""

    def __init__(
        self, site: Site, settings: Settings, out: Path, env: Mapping[str, str], say: Say
    ) -> None:
        """``settings``: what all runs have in common."""
        self.site, self.out, self.env, self.say = site, out, env, say
        self._settings = settings
        self._salt = 0
        self._trainer: TrainerProcess | None = None
        self.known: list[Instance] = []

    @property
    def deadline_s(self) -> float:
        """Of a lane's transfer and of each commit call."""
        return self._settings.deadline_s

    # Runs.

    @property
    def trainer(self) -> TrainerProcess:
        """The run in force; starts one if there is none, and waits until both servers hold a
        version of it."""
        if self._trainer is None:
            self._trainer = self.start_run()
            self.wait_taken_over(self._trainer)
        return self._trainer

    def start_run(self) -> TrainerProcess:
        """A later run than all before, not yet in force."""
        self._salt += 1
        folder = self.out / f"run{self._salt}"
        urls = [seat.url for seat in self.site.seats]
        settings = replace(self._settings, urls=urls, run_dir=str(folder), salt=self._salt)
        trainer = TrainerProcess(settings, self.out / f"run{self._salt}.log", self.env)
        try:
            self.site.runs.register(trainer.run_id, self._salt)
        except RunFailed:
            trainer.__exit__(None, None, None)
            raise
        return trainer

    def put_in_force(self, trainer: TrainerProcess | None) -> TrainerProcess | None:
        """Make another run the current one; the one that was."""
        before, self._trainer = self._trainer, trainer
        return before

    def end_run(self) -> None:
        """Kill the current run, if there is one."""
        trainer = self.put_in_force(None)
        if trainer is not None:
            trainer.__exit__(None, None, None)

    def close(self) -> None:
        """End the current run, and wait until its pause guard has let go what it left paused: the
        guard reaches the servers through the site's proxies, which end next."""
        self.end_run()
        wait_until(
            lambda: not any(self._paused(seat.instance) for seat in self.site.seats), SETTLE_S
        )

    def _paused(self, instance: Instance) -> bool:
        try:
            with closing(instance.control(LOOK_S)) as control:
                return control.paused()
        except (ServerUnreachable, ServerRefused):
            return False  # it has ended

    def wait_taken_over(self, trainer: TrainerProcess) -> None:
        """Until both servers hold a version of this run. RunFailed if not."""
        for seat in self.site.seats:
            if self.wait_held(trainer, seat, 1, 0.0) is None:
                raise RunFailed(
                    f"the {seat.name} server must hold a version of the run within {SETTLE_S:g} s:"
                    f" {trainer.tail()}"
                )

    # Waiting.

    def wait_held(
        self, trainer: TrainerProcess, seat: Seat, version: int, since_s: float
    ) -> float | None:
        """When the ledger said, after ``since_s``, that a server holds ``version`` or newer; None
        if it does not."""

        def match(event: Event) -> bool:
            if event["event"] != "server" or event["url"] != seat.url or event["held"] is None:
                return False
            return bool(event["held"] >= version and event["t"] >= since_s)

        event = trainer.await_event(match, SETTLE_S)
        return None if event is None else float(event["t"])

    def hold(self, point: Point, occurrence: int = 1) -> Event:
        """Hold the victim's lane at that passing of the point; what it says there."""
        trainer = self.trainer
        since = trainer.mark()
        trainer.tell("hold", self.site.victim.url, point, occurrence)
        at = trainer.await_event(lambda e: e["event"] == "held_at", REACH_S, since)
        if at is None:
            trainer.tell("forget")
            raise RunFailed(
                f"the lane did not come to {point.value} within {REACH_S:g} s: {trainer.tail()}"
            )
        return at

    def window(self, seconds: float = BASE_S) -> Window:
        """Let the run train that long."""
        start = time.monotonic()
        self.run_on(start + seconds)
        return start, time.monotonic()

    def run_on(self, until_s: float) -> None:
        """Let the run train until then."""
        wait_until(lambda: time.monotonic() >= until_s, max(0.0, until_s - time.monotonic()) + 1.0)

    # Judging.

    def mark(self) -> Mark:
        return Mark(time.monotonic(), {id(i): len(i.commits) for i in self._instances()})

    def judge_time(
        self, result: Result, trainer: TrainerProcess, before: Window, during: Window
    ) -> None:
        """Step time and the other server's lag, with the fault against without."""
        self.run_on(during[0] + BASE_S)
        during = during[0], max(during[1], during[0] + BASE_S)
        steps = self.judge_steps(result, trainer, before, during)
        lags, behind = self._lag(trainer, *before)
        lags_with, result.behind = self._lag(trainer, *during)
        result.lag, wrong, note = judge.judge_lag(
            lags, lags_with, (behind, result.behind), judge.crowd(steps)
        )
        self._add(result, wrong, note)

    def judge_steps(
        self, result: Result, trainer: TrainerProcess, before: Window, during: Window
    ) -> list[Step]:
        """Step time alone; the steps with the fault."""
        steps = self._steps(trainer, *during)
        result.steps, wrong, note = judge.judge_steps(
            trainer.steps(*before), steps, self.deadline_s
        )
        self._add(result, wrong, note)
        return steps

    def judge_held(self, result: Result, trainer: TrainerProcess, lifted_s: float) -> None:
        """The struck server must hold the newest version within two lane deadlines after the
        fault."""
        newest = trainer.newest(lifted_s)
        held_s = self.wait_held(trainer, self.site.victim, newest, lifted_s - self.deadline_s)
        if held_s is None:
            result.violations.append(
                f"it did not hold version {newest} within {SETTLE_S:g} s: {trainer.tail()}"
            )
        else:
            self.judge_recovery(result, trainer, lifted_s, held_s)

    def judge_both(
        self, result: Result, trainer: TrainerProcess, before: Window, lifted_s: float
    ) -> None:
        """As ``judge_held`` and ``judge_time``, where the other lane stood still too: that server's
        lag counts from when it is back."""
        self.judge_held(result, trainer, lifted_s)
        newest = trainer.newest(lifted_s)
        back = self.wait_held(trainer, self.site.witness, newest, 0.0) or lifted_s
        during = max(lifted_s, back) + 0.5, time.monotonic() + 0.5
        self.judge_time(result, trainer, before, during)

    def judge_recovery(
        self, result: Result, trainer: TrainerProcess, since_s: float, until_s: float
    ) -> None:
        """That a server had a version by ``until_s``, where the fault was over at ``since_s``."""
        result.recovery_s = max(0.0, until_s - since_s)
        if result.recovery_s <= 2 * self.deadline_s:
            return
        late = (
            f"recovery took {result.recovery_s:.1f} s, allowed are 2 lane deadlines of"
            f" {self.deadline_s:g} s"
        )
        crowded = judge.crowd(self._steps(trainer, since_s, until_s))
        if crowded:
            self._add(result, [], f"{late}; {crowded}")
        else:
            self._add(result, [late], "")

    def _steps(self, trainer: TrainerProcess, since_s: float, until_s: float) -> list[Step]:
        # steps are reported some at a time
        trainer.await_event(
            lambda e: e["event"] == "steps" and e["rows"][-1][0] >= until_s, REPORT_S
        )
        return trainer.steps(since_s, until_s)

    def _add(self, result: Result, wrong: list[str], note: str) -> None:
        result.violations += wrong
        if note:
            result.notes.append(note)

    def _lag(
        self, trainer: TrainerProcess, since_s: float, until_s: float
    ) -> tuple[list[float], float]:
        """The other server's seconds from publish to commit, and its median number of versions
        behind."""
        published = trainer.published()
        seen, behind = [], []
        for t, held in trainer.held(self.site.witness.url):
            if held in published and since_s <= t <= until_s:
                seen.append(t - published[held])
                behind.append(sum(p <= t and v > held for v, p in published.items()))
        return seen, float(statistics.median(behind)) if behind else 0.0

    def judge_servers(self, result: Result, mark: Mark) -> None:
        """Bytes, labels and deaths of every server since the mark."""
        for instance in self._instances():
            commits = instance.commits
            new = commits[mark.commits.get(id(instance), 0) :]
            samples = instance.samples(mark.t - 0.5)
            found = judge.wrong_bytes(new, self.site.runs.expected)
            found += judge.lies(samples, commits) + judge.backwards(samples)
            if not instance.expected_dead and not instance.alive():
                found.append("it has ended")
                instance.expected_dead = True
            result.violations += [f"{instance.name}: {text}" for text in found]

    @contextmanager
    def quiet(self, trainer: TrainerProcess) -> Iterator[int]:
        """No further versions; the newest one, once both servers hold it or have had their time."""
        trainer.tell("publish", False)
        try:
            newest = int(trainer.report()["newest"])
            wait_until(lambda: self._all_hold(trainer, newest), SETTLE_S, 0.1)
            yield newest
        finally:
            trainer.tell("publish", True)

    def at_rest(self, result: Result, trainer: TrainerProcess, mark: Mark) -> None:
        """Stop publishing, wait until both servers hold the newest version, and look whether
        everything agrees, and did since the mark."""
        with self.quiet(trainer) as newest:
            report = trainer.report()
            for seat in self.site.seats:
                entry = report["servers"][seat.url]
                if (entry["standing"], entry["held"]) != ("holds", newest):
                    result.violations.append(
                        f"{seat.name}: the ledger says {json.dumps(entry)}, the newest is {newest}"
                    )
                result.violations += [
                    f"{seat.name}: {text}"
                    for text in self.look(seat.instance, trainer.run_id, newest)
                ]
        self.judge_servers(result, mark)

    def _all_hold(self, trainer: TrainerProcess, version: int) -> bool:
        servers = trainer.report()["servers"].values()
        return all((entry["standing"], entry["held"]) == ("holds", version) for entry in servers)

    def look(self, instance: Instance, run_id: str, version: int) -> list[str]:
        """What is wrong with a server that must serve that version now."""
        try:
            with closing(instance.control(LOOK_S)) as control:
                label, paused = control.label(), control.paused()
        except (ServerUnreachable, ServerRefused) as error:
            return [f"it does not answer: {error}"]
        truth = judge.served(instance.commits)
        out = ["it is left paused"] if paused else []
        if str(truth) != label:
            out.append(f"it serves {truth or 'weights of its own'} and is labelled {label}")
        if not isinstance(truth, str) and (truth.run_id, truth.version) != (run_id, version):
            out.append(f"it serves {truth}, the newest is version {version} of run {run_id}")
        return out

    def _instances(self) -> list[Instance]:
        """Every server that is or was in a seat, or may be."""
        for seat in self.site.seats:
            for instance in (*seat.retired, seat.instance):
                if instance not in self.known:
                    self.known.append(instance)
        return self.known


def site_bench(stack: ExitStack, site: Site, bench: Bench) -> Bench:
    """Start the site and make sure that run and servers end with ``stack``."""
    stack.enter_context(site)
    stack.callback(bench.close)
    site.wait_healthy(bench.say)
    return bench
