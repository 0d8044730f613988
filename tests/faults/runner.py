"""Runs cases one after the other on one site, in an order that starts as few servers as
possible."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.faults import lanes, trainers
from tests.faults.bench import Bench
from tests.faults.cases import Case, Kind, Who
from tests.faults.instances import Instance, Launch
from tests.faults.report import Result
from tests.faults.site import Site
from tests.rigs.trainer_handle import RunFailed
from titan_grpo.errors import PeerError, TitanGrpoError

Done = Callable[[Result], None]
Check = Callable[[Instance], tuple[str, str]]
"""(what is wrong or empty, a note): see computed.Reference.check."""

TRAINERS = (Kind.ZOMBIE, Kind.LATE, Kind.END)
NETWORK = (Kind.RATE, Kind.DELAY)


@dataclass(frozen=True, slots=True)
class Launches:
    """How servers are started: those under test, and one of another model."""

    same: Launch
    other: Launch


def groups(cases: Sequence[Case]) -> dict[str, list[Case]]:
    """Cases that share their servers, in the order in which they run. Pure."""
    out: dict[str, list[Case]] = {
        name: [] for name in ("lane", "restart", "old", "other", "trainer", "network")
    }
    for case in cases:
        out[_group(case)].append(case)
    return {name: found for name, found in out.items() if found}


def _group(case: Case) -> str:
    if case.kind in NETWORK:
        return "network"
    if case.who in (Who.TRAINER, Who.SYNC) or case.kind in TRAINERS:
        return "trainer"
    if case.kind in (Kind.OLD, Kind.OTHER):
        return str(case.kind.value)
    return "restart" if case.kind is Kind.KILL and case.who in (Who.ENGINE, Who.SERVER) else "lane"


class Runner:
    """Everything but the network's cases, which have a site of their own (see network)."""

    def __init__(self, bench: Bench, launches: Launches, check: Check | None, done: Done) -> None:
        """``check``: what a server at rest computes; None where servers compute nothing."""
        self._bench, self._launches, self._check, self._done = bench, launches, check, done

    def run(self, cases: Mapping[str, Sequence[Case]]) -> None:
        """Run the groups; each result goes to ``done``."""
        for name, group in cases.items():
            self._bench.say(f"{name}: {len(group)} cases")
            with self._spare(name) as pair:
                for case in group:
                    result = self._one(case, self._unseated(pair))
                    if case is group[-1] or name == "restart":
                        self._compute(result)
                    self._done(result)
        self._bench.end_run()

    def _one(self, case: Case, spare: Instance | None) -> Result:
        result, began = Result(case), time.monotonic()
        try:
            self._ready()
            if _group(case) == "trainer":
                trainers.perform(self._bench, result)
            else:
                lanes.perform(self._bench, result, spare)
        except (RunFailed, PeerError) as error:
            result.violations.append(str(error).replace("\n", " "))
        if result.violations:
            # the next case begins with a run, and if need be a server, that this one has not
            # touched
            self._bench.end_run()
        result.seconds = time.monotonic() - began
        return result

    def _ready(self) -> None:
        """A run in force and live servers; a server that a failed case left unusable is restarted
        once."""
        try:
            for seat in self._bench.site.seats:
                if not seat.instance.alive():
                    seat.restart()
            _ = self._bench.trainer
        except TitanGrpoError as error:
            self._bench.say(f"the servers are restarted: {error}")
            self._bench.end_run()
            for seat in self._bench.site.seats:
                seat.restart()
            _ = self._bench.trainer

    def _compute(self, result: Result) -> None:
        if self._check is None or result.violations:
            return
        with self._bench.quiet(self._bench.trainer):
            for seat in self._bench.site.seats:
                wrong, note = self._check(seat.instance)
                if wrong:
                    result.violations.append(wrong)
                elif note:
                    result.notes.append(note)

    def _unseated(self, pair: tuple[Instance, ...]) -> Instance | None:
        """Of the servers that take turns at the victim's address, the one that is not there now."""
        seated = self._bench.site.victim.instance
        return next((instance for instance in pair if instance is not seated), None)

    @contextmanager
    def _spare(self, group: str) -> Iterator[tuple[Instance, ...]]:
        launches = {"old": self._launches.same, "other": self._launches.other}
        if group not in launches:
            yield ()
            return
        folder: Path = self._bench.out / f"spare_{group}"
        with ExitStack() as stack:
            spare = stack.enter_context(Instance(f"spare ({group})", launches[group], folder))
            spare.wait_healthy()
            own = self._bench.site.victim.instance
            yield spare, own
            if self._bench.site.victim.instance is not own:
                self._bench.site.victim.swap(own)


def site_bench(stack: ExitStack, site: Site, bench: Bench) -> Bench:
    """Start the site and make sure that run and servers end with ``stack``."""
    stack.enter_context(site)
    stack.callback(bench.end_run)
    site.wait_healthy(bench.say)
    return bench
