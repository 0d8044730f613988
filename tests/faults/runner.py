"""Runs cases one after the other on one site, in an order that starts as few servers as
possible; those of the network on another, whose struck server has a namespace of its own."""

import statistics
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from tests.faults import lanes, trainers
from tests.faults.bench import Bench
from tests.faults.cases import Case, Kind, Who
from tests.faults.netns import Host, Hosts, NotAllowed
from tests.faults.report import Result
from tests.faults.site import Instance, Launch, Runs
from tests.rigs.trainer import weights
from tests.rigs.trainer_handle import RunFailed, TrainerProcess
from titan_grpo.engines.http import SyncDriver
from titan_grpo.engines.server import dialect
from titan_grpo.errors import PeerError, ServerRefused, ServerUnreachable, TitanGrpoError
from titan_grpo.protocol.messages import Label
from titan_grpo.verify.outcome import distance
from titan_grpo.verify.prober import REQUEST_S, ReferenceModel, fixed_prompts

Done = Callable[[Result], None]
Check = Callable[[Instance], tuple[str, str]]
"""(what is wrong or empty, a note): see Reference.check."""

TOLERANCE = 0.05
"""Nats by which bfloat16 in the server may differ from float32 on the same weights, at any
token."""

WATCH_S = 12.0
"""How long a run is watched without a limited network, and how long with one."""

SLOWER = 10.0
DELAY_MS = 20.0

TRAINERS = (Kind.ZOMBIE, Kind.LATE, Kind.END)
NETWORK = (Kind.RATE, Kind.DELAY)


class Reference:
    """Computes any version of any run. ``model``: the folder with the config; ``out``: room for one
    version's file."""

    def __init__(self, model: Path, runs: Runs, out: Path) -> None:
        self._runs, self._file = runs, out / "reference.safetensors"
        self._prompts = fixed_prompts()
        self._model = ReferenceModel(model, self._prompts)

    def check(self, instance: Instance) -> tuple[str, str]:
        """(what is wrong or empty, a note) of a server at rest."""
        try:
            with SyncDriver(instance.url) as driver:
                speak = dialect(instance.engine)
                label = Label.parse(driver.run(speak.label()))
                # a salt of its own: no answer may contain what other weights have left in the
                # prefix cache
                got = [
                    driver.run(speak.score(prompt, REQUEST_S, uuid.uuid4().hex))
                    for prompt in self._prompts
                ]
        except (ServerUnreachable, ServerRefused) as error:
            return f"{instance.name}: it does not answer a request: {error}", ""
        salt = self._runs.salt(label.run_id) if label is not None else None
        if label is None or salt is None:
            return f"{instance.name}: its label {label} is of no run", ""
        right, before = self._of(label.version, salt), self._of(label.version - 1, salt)
        off = max(distance(a, b) for a, b in zip(got, right, strict=True))
        apart = min(distance(a, b) for a, b in zip(before, right, strict=True))
        note = (
            f"{instance.name} computes version {label.version}: {off:.4f} nats off, the one before"
            f" is {apart:.2f} away"
        )
        return (
            ""
            if off <= TOLERANCE and off < apart / 2
            else f"log-probabilities do not show that {note}"
        ), note

    def _of(self, version: int, salt: int) -> tuple[tuple[float, ...], ...]:
        made = {
            name: t.to(torch.bfloat16)
            for name, t in weights(self._runs.base, version, salt).items()
        }
        save_file(made, self._file)
        return self._model.logprobs(self._file)


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


def run_network(
    cases: Sequence[Case], make: Callable[[ExitStack, Host], Bench], done: Done
) -> dict[str, Any]:
    """Run the cases on the bench that is made around a namespace; figures for the JSON. Where
    namespaces are not allowed each case is skipped, with the reason."""
    figures: dict[str, Any] = {}
    with ExitStack() as stack:
        try:
            (host,) = stack.enter_context(Hosts(1)).hosts
        except NotAllowed as error:
            for case in cases:
                done(Result(case, skipped=f"a network of its own is not allowed here: {error}"))
            return figures
        bench = make(stack, host)
        bench.say(f"network: {len(cases)} cases; one server in namespace {host.name}")
        for case in cases:
            result, began = Result(case), time.monotonic()
            try:
                figures[case.name] = _slowed(bench, host, result)
            except NotAllowed as error:
                result.skipped = str(error)
            except (RunFailed, PeerError) as error:
                result.violations.append(str(error).replace("\n", " "))
            finally:
                host.free()
            result.seconds = time.monotonic() - began
            done(result)
    return figures


def _slowed(bench: Bench, host: Host, result: Result) -> dict[str, float]:
    trainer, mark = bench.trainer, bench.mark()
    bench.window()
    before = bench.window(WATCH_S)
    free_s = _sending(trainer, bench.site.victim.url, before)
    if result.case.kind is Kind.RATE:
        started = trainer.find(lambda e: e["event"] == "started")
        assert started is not None
        rate = float(started["image_bytes"]) / free_s / SLOWER
        host.limit(rate)
        note = f"limited to {rate / 2**20:.2f} MiB/s"
    else:
        host.delay(DELAY_MS)
        note = f"{DELAY_MS:g} ms each way"
    during = bench.window(WATCH_S)
    slow_s = _sending(trainer, bench.site.victim.url, during)
    host.free()
    lifted = time.monotonic()
    result.notes.append(
        f"{note}: a transfer took {slow_s:.3f} s, {slow_s / free_s:.1f} times as long"
    )
    bench.judge_held(result, trainer, lifted)
    bench.judge_time(result, trainer, before, during)
    bench.at_rest(result, trainer, mark)
    return {
        "transfer_s": free_s,
        "slowed_transfer_s": slow_s,
        "step_ratio": result.steps.value,
        "lag_ratio": result.lag.value,
    }


def _sending(trainer: TrainerProcess, url: str, window: tuple[float, float]) -> float:
    """Median seconds of one transfer to a server in a window. RunFailed if there was none."""
    seconds = [s for t, s in trainer.sends(url) if window[0] <= t <= window[1]]
    if not seconds:
        raise RunFailed(f"the server must get versions within {WATCH_S:g} s, it got none")
    return statistics.median(seconds)
