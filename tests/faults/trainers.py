"""Cases in which the trainer itself is struck, or its sync process: killed, frozen, outlived by a
later run; and a server that comes late."""

import signal
import time

from tests.faults import judge
from tests.faults.bench import SETTLE_S, Bench
from tests.faults.cases import Kind, Who
from tests.faults.lanes import OVER_S
from tests.faults.report import Result
from tests.rigs.signals import send
from tests.rigs.trainer_handle import wait_until

RELEASE_S = 45.0
"""Within it a server that a dead or frozen trainer left paused must generate again: the tries of
the pause guard."""

LINGER_S = 3.0
"""How long a woken trainer of an earlier run is watched."""

ABSENT_S = 3.0
"""How long a late server is not there."""


END_SLACK_S = 1.0
"""What the end may take beyond its deadline: threads that are told to end, on a machine with other
work."""


def perform(bench: Bench, result: Result) -> None:
    if result.case.who is Who.SYNC:
        _sync(bench, result)
        return
    {
        Kind.KILL: _kill,
        Kind.FREEZE: _freeze,
        Kind.ZOMBIE: _zombie,
        Kind.LATE: _late,
        Kind.END: _end,
    }[result.case.kind](bench, result)


def _released(bench: Bench, result: Result, since_s: float) -> None:
    """Nothing may stay paused though its trainer is gone: the pause guard must have resumed it."""
    for seat in bench.site.seats:
        instance = seat.instance

        def generates() -> bool:
            last = instance.last()  # noqa: B023
            return (
                last is not None and last.t > since_s and last.label is not None and not last.paused
            )

        if not wait_until(generates, RELEASE_S):
            result.violations.append(
                f"{instance.name}: it is left paused by a trainer that is gone"
            )
        elif seat is bench.site.victim and (waited := time.monotonic() - since_s) > 1.0:
            result.notes.append(f"generated again {waited:.1f} s after the trainer was gone")


def _kill(bench: Bench, result: Result) -> None:
    trainer = bench.trainer
    mark = bench.mark()
    bench.hold(result.case.point, result.case.occurrence)
    trainer.kill()
    killed_s = time.monotonic()
    bench.end_run()
    _released(bench, result, killed_s + 0.2)
    bench.judge_servers(result, mark)
    mark = bench.mark()
    began = time.monotonic()
    after = bench.trainer
    held = bench.wait_held(after, bench.site.victim, 1, began)
    # not the start of its processes, which import torch
    url = bench.site.victim.url
    lane = after.find(lambda e: e["event"] == "connecting" and e["url"] == url)
    if held is not None and lane is not None:
        bench.judge_recovery(result, after, float(lane["t"]), held)
    bench.at_rest(result, after, mark)


def _freeze(bench: Bench, result: Result) -> None:
    trainer = bench.trainer
    before = bench.window()
    mark = bench.mark()
    bench.hold(result.case.point, result.case.occurrence)
    trainer.signal(signal.SIGSTOP)
    frozen_s = time.monotonic()
    try:
        bench.run_on(frozen_s + bench.deadline_s + OVER_S)
        _released(bench, result, frozen_s + bench.deadline_s + OVER_S)
    finally:
        trainer.signal(signal.SIGCONT)
    lifted = time.monotonic()
    trainer.tell("go")
    # the step in which it was frozen is as long as the freeze, and is not judged; its other lane
    # was frozen too, and fenced if it was in a commit
    bench.judge_both(result, trainer, before, lifted)
    bench.at_rest(result, trainer, mark)


def _sync(bench: Bench, result: Result) -> None:
    """Training goes on meanwhile; what it left paused generates again; the next one, or itself when
    it is thawed, brings the newest version."""
    trainer, victim = bench.trainer, bench.site.victim
    killed = result.case.kind is Kind.KILL
    before = bench.window()
    mark = bench.mark()
    bench.hold(result.case.point, result.case.occurrence)
    pid, since, struck_s = trainer.sync_pid, trainer.mark(), time.monotonic()
    send(pid, signal.SIGKILL if killed else signal.SIGSTOP)
    trainer.tell("go")
    try:
        stood_s = 0.2 if killed else bench.deadline_s + OVER_S
        bench.run_on(struck_s + stood_s)
        _released(bench, result, struck_s + stood_s)
    finally:
        if not killed:
            send(pid, signal.SIGCONT)
    lifted = time.monotonic()
    if killed:
        # not the start of the next one, which imports torch
        lane = trainer.wait(
            lambda e: e["event"] == "connecting" and e["url"] == victim.url,
            SETTLE_S,
            "that the next sync process connects",
            since,
        )
        lifted = float(lane["t"])
        result.notes.append(f"connected again {lifted - struck_s:.1f} s after the kill")
    bench.judge_both(result, trainer, before, lifted)
    bench.judge_steps(result, trainer, before, (struck_s, lifted))
    bench.at_rest(result, trainer, mark)


def _zombie(bench: Bench, result: Result) -> None:
    zombie = bench.trainer
    mark = bench.mark()
    bench.hold(result.case.point, result.case.occurrence)
    zombie.signal(signal.SIGSTOP)
    bench.put_in_force(None)
    try:
        after = bench.trainer
        if bench.wait_held(after, bench.site.victim, 1, 0.0) is None:
            result.violations.append(f"the later run did not get the server within {SETTLE_S:g} s")
        before = bench.window()
        zombie.signal(signal.SIGCONT)
        zombie.tell("go")
        woken = time.monotonic()
        bench.run_on(woken + LINGER_S)
        bench.judge_time(result, after, before, (woken, time.monotonic()))
        bench.at_rest(result, after, mark)
    finally:
        zombie.__exit__(None, None, None)


def _late(bench: Bench, result: Result) -> None:
    bench.end_run()
    victim = bench.site.victim
    mark = bench.mark()
    victim.proxy.shut()
    trainer = bench.start_run()
    bench.put_in_force(trainer)
    try:
        if bench.wait_held(trainer, bench.site.witness, 1, 0.0) is None:
            result.violations.append("the run did not begin without the late server")
        absent = bench.window(ABSENT_S)
    finally:
        victim.proxy.open()
    joined = time.monotonic()
    bench.judge_held(result, trainer, joined)
    bench.judge_time(result, trainer, absent, (joined, time.monotonic()))
    bench.at_rest(result, trainer, mark)


def _end(bench: Bench, result: Result) -> None:
    trainer, victim, witness = bench.trainer, bench.site.victim, bench.site.witness
    mark = bench.mark()
    bench.hold(result.case.point, result.case.occurrence)
    engine = victim.instance.engine_pid()
    send(engine, signal.SIGSTOP)
    try:
        trainer.tell("go")
        stopped_s = time.monotonic()
        ended = trainer.stop()
    finally:
        send(engine, signal.SIGCONT)
    thawed = time.monotonic()
    allowed = trainer.settings.shutdown_s
    spent = ended["flush_s"] + ended["lanes_s"]
    result.notes.append(
        f"the end took {spent:.1f} s (flush {ended['flush_s']:.1f}), allowed are {allowed:g} s"
    )
    crowded = judge.crowd(trainer.steps(mark.t, stopped_s))
    if spent > allowed + END_SLACK_S and not crowded:
        result.violations.append(
            f"the end of the run took {spent:.1f} s, its deadline is {allowed:g} s"
        )
    elif spent > allowed + END_SLACK_S:
        result.notes.append(crowded)
    if witness.url not in ended["held"]:
        result.violations.append(f"version {ended['newest']} was not flushed to the live server")
    bench.end_run()
    _released(bench, result, thawed)
    bench.judge_servers(result, mark)
