"""Cases in one running trainer: its lane to one server is stopped at a point, the fault strikes
there, the lane goes on."""

import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tests.faults import judge
from tests.faults.bench import REACH_S, SETTLE_S, Bench
from tests.faults.cases import CALLS, Case, Kind, Who
from tests.faults.report import Result
from tests.faults.site import Instance
from tests.rigs.proxy import Act
from tests.rigs.signals import send
from tests.rigs.trainer_handle import TrainerProcess, wait_until
from titan_grpo.protocol.lane import Point
from titan_grpo.protocol.messages import Label

IDLE_S = 90.0
"""Longest wait for an idle lane to look at its server."""

REFUSED_S = 1.0
"""How long connections are refused."""

OVER_S = 1.5
"""How much longer than the deadline something is frozen."""

DEAD_S = 2.0
"""How long a run goes on without its killed server before that is restarted."""

REJECT_S = 3.0
"""How long another model is left at the server's address."""

ACCEPTING = ("holds", "receiving")
"""Standings in which a server may be given rollouts."""

ACTS = {
    Kind.ERROR: Act.FAIL,
    Kind.LOSE: Act.LOSE,
    Kind.RESET: Act.RESET,
    Kind.SILENCE: Act.SILENCE,
    Kind.TWICE: Act.TWICE,
}


@dataclass(slots=True)
class Struck:
    """When the fault was over, and the time in which the trainer lived with it."""

    lifted_s: float
    until_s: float = 0.0
    violations: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Scene:
    """One case at the moment in which its lane is held."""

    bench: Bench
    case: Case
    trainer: TrainerProcess
    spare: Instance | None = None

    @property
    def victim(self) -> Instance:
        """The server that is struck."""
        return self.bench.site.victim.instance

    def pids(self) -> tuple[int | None, ...]:
        """The processes of it that are struck."""
        if self.case.who is Who.SERVER:
            return tuple(self.victim.pids())
        receiver = self.case.who is Who.RECEIVER
        return (self.victim.receiver_pid() if receiver else self.victim.engine_pid(),)


Strike = Callable[[Scene], Struck]


def perform(bench: Bench, result: Result, spare: Instance | None = None) -> None:
    """Run one case; ``spare``: the server that takes the victim's address in ``old`` and
    ``other``."""
    case, trainer = result.case, bench.trainer
    if spare is not None:
        _as_restarted(spare)
    before = bench.window()
    mark = bench.mark()
    told = case.kind is Kind.LENGTH and case.point is Point.BEGIN
    bench.hold(Point.GREET if told else case.point, case.occurrence)
    struck_s = time.monotonic()
    struck = STRIKES[case.who, case.kind](Scene(bench, case, trainer, spare))
    result.violations += struck.violations
    result.notes += struck.notes
    bench.judge_held(result, trainer, struck.lifted_s)
    during = struck_s, struck.until_s or time.monotonic()
    bench.judge_time(result, trainer, before, during)
    bench.at_rest(result, trainer, mark)


def _as_restarted(spare: Instance) -> None:
    """No server is paused, or labelled wrongly, when it has just been started: this one may have
    been left in a commit."""
    truth, control = judge.served(spare.commits), spare.control(SETTLE_S)
    try:
        if isinstance(truth, Label) and control.label() != str(truth):
            control.relabel(str(truth))
        if control.paused():
            control.resume()
    finally:
        control.close()


def _kill_receiver(scene: Scene) -> Struck:
    send(scene.victim.receiver_pid(), signal.SIGKILL)
    scene.trainer.tell("go")
    return Struck(time.monotonic())


def _freeze(scene: Scene) -> Struck:
    pids = scene.pids()
    for pid in pids:
        send(pid, signal.SIGSTOP)
    try:
        scene.trainer.tell("go")
        scene.bench.run_on(time.monotonic() + scene.bench.deadline_s + OVER_S)
        wrong = [] if scene.case.who is Who.RECEIVER else _noticed(scene)
    finally:
        for pid in pids:
            send(pid, signal.SIGCONT)
    return Struck(time.monotonic(), violations=wrong)


def _noticed(scene: Scene) -> list[str]:
    """A server that answers nothing, or as another one, gets no rollouts once its lane has asked it
    something."""

    def entry() -> Mapping[str, Any]:
        found: Mapping[str, Any] = scene.trainer.report()["servers"][scene.bench.site.victim.url]
        return found

    if wait_until(lambda: entry()["standing"] not in ACCEPTING, IDLE_S):
        return []
    return [f"the ledger still says {dict(entry())} of a server that is not there"]


def _kill(scene: Scene) -> Struck:
    seat = scene.bench.site.victim
    seat.instance.expected_dead = True
    for pid in scene.pids():
        send(pid, signal.SIGKILL)
    scene.trainer.tell("go")
    scene.bench.run_on(time.monotonic() + max(DEAD_S, scene.bench.deadline_s + OVER_S))
    until = time.monotonic()
    wrong = _noticed(scene)
    seconds = seat.restart()
    return Struck(time.monotonic(), until, wrong, [f"restarted in {seconds:.0f} s"])


def _call(scene: Scene) -> Struck:
    """A fault of one control call, or, where none follows, of the data connections."""
    proxy, case = scene.bench.site.victim.proxy, scene.case
    if not case.call:
        since = scene.trainer.mark()
        scene.trainer.tell("go", "cut", scene.victim.receiver_pid())
        cut = scene.trainer.await_event(lambda e: e["event"] == "cut", REACH_S, since)
        wrong = (
            [] if cut is not None and cut["connections"] else ["no connection was there to be cut"]
        )
        return Struck(time.monotonic(), violations=wrong)
    idle = case.point is Point.HELD
    if idle:
        # the next call is the look of an idle lane only if no version follows
        scene.trainer.tell("publish", False)
    before = len(proxy.struck)
    proxy.script(ACTS[case.kind], case.call)
    scene.trainer.tell("go")
    met = wait_until(lambda: len(proxy.struck) > before, IDLE_S)
    proxy.clear()
    lasts = scene.bench.deadline_s if case.kind is Kind.SILENCE else 0.0
    scene.bench.run_on(time.monotonic() + lasts)
    if idle:
        scene.trainer.tell("publish", True)
    return Struck(
        time.monotonic(),
        violations=[] if met else [f"{case.call} was not called within {IDLE_S:g} s"],
    )


def _refuse(scene: Scene) -> Struck:
    proxy = scene.bench.site.victim.proxy
    proxy.shut()
    scene.trainer.tell("go")
    scene.bench.run_on(time.monotonic() + REFUSED_S)
    proxy.open()
    return Struck(time.monotonic())


def _corrupt(scene: Scene) -> Struck:
    before = scene.trainer.report()["digest_mismatches"]
    scene.trainer.tell("spoil", scene.bench.site.victim.url, scene.case.point is Point.EXTENT)
    scene.trainer.tell("go")
    seen = wait_until(lambda: scene.trainer.report()["digest_mismatches"] > before, SETTLE_S)
    return Struck(
        time.monotonic(), violations=[] if seen else ["the corrupted block was not noticed"]
    )


def _length(scene: Scene) -> Struck:
    trainer, case = scene.trainer, scene.case
    if case.point is Point.EXTENT:
        trainer.tell("go", "fail")
        return Struck(time.monotonic())
    hello = CALLS[scene.victim.engine][Point.GREET][""]
    scene.bench.site.victim.proxy.script(Act.REWRITE, hello, {"manifest_digest": "another"})
    trainer.tell("go")
    url = scene.bench.site.victim.url
    # Its words: the end of the epoch before is an error of the same lane. And of the ledger: a step
    # collects the first of several errors.
    met = wait_until(
        lambda: "must have digest another" in trainer.report()["servers"][url]["error"], SETTLE_S
    )
    return Struck(
        time.monotonic(),
        violations=[] if met else ["another manifest was not noticed"],
    )


def _old(scene: Scene) -> Struck:
    seat, spare = scene.bench.site.victim, scene.spare
    assert spare is not None
    idle = scene.case.point is Point.HELD
    if idle:
        scene.trainer.tell("publish", False)
    # a restart ends the receiver too
    send(seat.instance.receiver_pid(), signal.SIGKILL)
    seat.swap(spare)
    scene.trainer.tell("go")
    lifted = time.monotonic()
    if idle:
        noticed = wait_until(
            lambda: bool(spare.commits) and spare.commits[-1].run_id == scene.trainer.run_id, IDLE_S
        )
        scene.trainer.tell("publish", True)
        wrong = (
            [] if noticed else ["an idle lane did not notice that its server holds other weights"]
        )
        return Struck(time.monotonic(), violations=wrong, notes=["noticed by the idle lane's look"])
    return Struck(lifted)


def _other(scene: Scene) -> Struck:
    seat, spare = scene.bench.site.victim, scene.spare
    assert spare is not None
    had = len(spare.commits)
    own = seat.swap(spare)
    scene.trainer.tell("go")
    scene.bench.run_on(time.monotonic() + max(REJECT_S, scene.bench.deadline_s))
    wrong = _noticed(scene)
    # Not while the lane takes a commit back: the server that it has paused would be this one again,
    # in the commit that the fault met, and it would get the other's label and be resumed.
    scene.bench.hold(Point.GREET)
    taken = [c for c in spare.commits[had:] if c.ok]
    wrong += [f"another model was given version {c.version}" for c in taken]
    seat.swap(own)
    scene.trainer.tell("go")
    return Struck(time.monotonic(), violations=wrong)


STRIKES: dict[tuple[Who, Kind], Strike] = {
    **{(who, Kind.KILL): _kill for who in (Who.ENGINE, Who.SERVER)},
    **{(who, Kind.FREEZE): _freeze for who in (Who.RECEIVER, Who.ENGINE, Who.SERVER)},
    (Who.RECEIVER, Kind.KILL): _kill_receiver,
    (Who.ENGINE, Kind.OLD): _old,
    (Who.ENGINE, Kind.OTHER): _other,
    (Who.LINK, Kind.REFUSE): _refuse,
    (Who.LINK, Kind.CORRUPT): _corrupt,
    (Who.LINK, Kind.LENGTH): _length,
    **{(Who.LINK, kind): _call for kind in ACTS},
}
"""What each fault does; the faults of the trainer and of the network have runs of their own."""
