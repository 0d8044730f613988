"""What stands out in a run, in words: rules over its figures. Pure."""

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from titan_grpo.observe import names
from titan_grpo.observe.alerts import GREW, LEAST_GAP, ON_POLICY_GAP, likely_cause
from titan_grpo.observe.names import short
from titan_grpo.observe.report import duration
from titan_grpo.views.run import Run, columns, in_order
from titan_grpo.views.timeline import ServerFigures, figures

SLOW_TRANSFER = 2.0
"""Ratio of a server's median transfer time to that of the others from which it is reported."""
FAR_BEHIND = 1.5
"""Mean lag in versions from which a server is reported."""
OFTEN_PAUSED = 0.05
"""Share of a server's time paused for commits from which it is reported."""
LONG_SERVED_S = 60.0
"""A server's time from which such a share is bad: a trial's steps are too short for a judgement."""
LONG_WAIT = 0.3
"""Share of the steps' time waiting for rollouts from which it is bad."""
BLOCKED = 0.02
"""Share of the steps' time blocked by weight sync from which it is bad."""
SLOW_STEP = 5.0
"""Ratio of the longest step to the median from which it is reported."""
COMPARED = 10
"""Steps from which the first fifth is compared with the last: of fewer, each is a single step."""
CUT_TOKENS = 0.2
"""Share of tokens changed by clipping or the off-policy correction from which it is reported."""


@dataclass(frozen=True, slots=True)
class Step:
    """Times of one step, in seconds."""

    number: int
    step_s: float
    waited_s: float
    blocked_s: float


@dataclass(frozen=True, slots=True)
class Facts:
    """Input of the rules. Its times exclude the first step of each process, which compiles and
    connects."""

    steps: int = 0
    step_s: float = 0.0
    """Sum over the steps, like the next two."""
    waited_s: float = 0.0
    blocked_s: float = 0.0
    asynchronous: bool = False
    """Whether grpo.async_weight_update is known to be on: only a run that has ended says so."""
    median_step_s: float = 0.0
    longest: Step | None = None
    first: Mapping[str, float] = field(default_factory=dict)
    """Metric -> mean over the first fifth of the steps; ``last``: over the last fifth."""
    last: Mapping[str, float] = field(default_factory=dict)
    servers: tuple[ServerFigures, ...] = ()
    skipped_versions: int = 0
    digest_mismatches: int = 0
    quantised: Mapping[str, str] = field(default_factory=dict)
    """URL -> quantisation method, for servers that quantise their weights."""
    dropped: Mapping[str, int] = field(default_factory=dict)
    """Groups by reason."""
    errors: tuple[str, ...] = ()
    ended_by: str = ""
    """Reason why the run did not come to its end; a kill may come after the last step too."""


def facts_of(run: Run) -> Facts:
    """Return the figures of a run."""
    starts = {1, *run.resumes}
    rows = [row for row in run.rows if row["step"] not in starts and row.get(names.STEP_S)]
    times = (names.STEP_S, names.ROLLOUT_WAIT_S, names.BLOCKED_S)
    steps = [Step(row["step"], *(row.get(name) or 0.0 for name in times)) for row in rows]
    window = max(1, len(run.rows) // 5)
    s = run.summary
    # Without a summary (the run goes on, or was killed) the last step has the totals so far.
    totals, prefix = run.rows[-1] if run.rows else {}, names.dropped("")
    dropped = {
        n.removeprefix(prefix): int(t or 0) for n, t in totals.items() if n.startswith(prefix)
    }
    skipped, mismatches = (
        int(totals.get(name) or 0) for name in (names.SKIPPED_VERSIONS, names.DIGEST_MISMATCHES)
    )
    killed = (
        f"its process ended after step {totals.get('step', 0)} without saying so, as one does that"
        " is killed (for its memory, say); the ends of its log and of the host's say more"
    )
    commits = {u: len(known.committed) for u, known in s.versions_committed.items()} if s else {}
    each = [figures(run.trace, url) for url in in_order({*run.trace.servers, *commits})]
    return Facts(
        steps=len(steps),
        step_s=sum(step.step_s for step in steps),
        waited_s=sum(step.waited_s for step in steps),
        blocked_s=sum(step.blocked_s for step in steps),
        asynchronous=s is not None and s.mode == "async",
        median_step_s=float(np.median([step.step_s for step in steps])) if steps else 0.0,
        longest=max(steps, key=lambda step: step.step_s, default=None),
        first=_means(run.rows[:window]),
        last=_means(run.rows[-window:]),
        # The trace may be missing, or end before the run did.
        servers=tuple(replace(e, commits=max(e.commits, commits.get(e.url, 0))) for e in each),
        skipped_versions=s.skipped_versions if s else skipped,
        digest_mismatches=s.digest_mismatches if s else mismatches,
        quantised=run.quantised,
        dropped=s.dropped if s else dropped,
        errors=tuple(run.errors),
        ended_by=s.ended_by if s else killed if run.gone else "",
    )


def _means(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Return means of metrics, without servers' values: most of a line, and in no rule."""
    shared = [n for n in set[str]().union(*rows) if not n.startswith(f"{names.SERVER}/")]
    known = {name: each[~np.isnan(each)] for name, each in columns(rows, shared).items()}
    return {name: float(np.mean(each)) for name, each in known.items() if each.size}


@dataclass(frozen=True, slots=True)
class Finding:
    """One or two sentences. ``level``: "bad" needs action, "note" explains, "good" confirms."""

    level: str
    text: str


def findings(facts: Facts) -> list[Finding]:
    """Apply every rule; bad findings come first."""
    found = [finding for rule in RULES for finding in rule(facts)]
    return sorted(found, key=lambda finding: ("bad", "note", "good").index(finding.level))


def counted(number: int, noun: str) -> str:
    """Return a number of things: "1 error", "2 errors"."""
    return f"{number} {noun}{'s' * (number != 1)}"


def percent(share: float) -> str:
    """Format a share: 0.1234 -> "12 %", 0.0012 -> "0.12 %"."""
    return f"{share * 100:.2g} %" if share < 0.995 else f"{share * 100:.0f} %"


def _times(factor: float) -> str:
    return f"{factor:.0f}" if factor >= 10 else f"{factor:.2g}"


def trouble(f: Facts) -> Iterator[Finding]:
    """What the run itself says of its end and its errors, and what it left out."""
    if f.ended_by:
        yield Finding("bad", f"the run did not come to its end: {f.ended_by}")
    if f.errors:
        errors = counted(len(f.errors), "error")
        yield Finding("bad", f"{errors} did not stop the run; first: {f.errors[0]}")
    if f.digest_mismatches:
        yield Finding(
            "bad",
            f"{f.digest_mismatches} transfers or loads of a version had wrong bytes; none was"
            " served. Memory or network of a host is faulty",
        )
    if f.skipped_versions:
        verb = "was" if f.skipped_versions == 1 else "were"
        yield Finding(
            "note",
            f"{counted(f.skipped_versions, 'version')} {verb}"
            " not published since every image was still being sent: weight_sync.slots, or faster"
            " transfers, change it",
        )
    parts = ", ".join(f"{count} {reason}" for reason, count in f.dropped.items() if count)
    if parts:
        yield Finding("note", f"groups or completions that were not trained on: {parts}")


def servers(f: Facts) -> Iterator[Finding]:
    """What stands out about each server."""
    for server in f.servers:
        yield from _service(f, server)
        yield from _transfers(f, server)
        yield from _held_by_evaluations(f, server)


def _service(f: Facts, server: ServerFigures) -> Iterator[Finding]:
    name = short(server.url)
    if not server.commits:
        yield Finding(
            "bad",
            f"{name} never held a version, so it generated nothing: unless it has just joined,"
            " titan-grpo doctor says what is wrong with it",
        )
    if server.faults:
        again = f", and its lane had to connect again {counted(server.reconnects, 'time')}"
        again *= server.reconnects > 0
        yield Finding("bad", f"{name} had {counted(server.faults, 'fault')}{again}")
    share = server.pause_s / server.served_s if server.served_s else 0.0
    if share >= OFTEN_PAUSED:
        # Its pauses do no harm while the trainer does not wait.
        harm = f.waited_s >= LONG_WAIT * f.step_s > 0 and server.served_s >= LONG_SERVED_S
        yield Finding(
            "bad" if harm else "note",
            f"{name} stood still for {duration(server.pause_s)} of {duration(server.served_s)}"
            f" ({percent(share)}) to load {counted(server.commits, 'version')},"
            f" {duration(server.pause_median_s)} each",
        )


def _transfers(f: Facts, server: ServerFigures) -> Iterator[Finding]:
    """Transfers take longer than the others', or the server is behind although they do not."""
    others = [s.send_median_s for s in f.servers if s is not server and s.send_median_s > 0]
    usual, own = statistics.median(others) if others else 0.0, server.send_median_s
    if usual > 0 and own >= SLOW_TRANSFER * usual:
        yield Finding(
            # Slower transfers do no harm while the server keeps up.
            "bad" if server.lag >= 1 else "note",
            f"{short(server.url)}'s transfers take {_times(own / usual)} times as long as the"
            f" others' ({duration(own)} against {duration(usual)}): it is"
            f" {server.lag:.1f} versions behind on average",
        )
    elif server.commits and server.lag >= FAR_BEHIND:
        yield Finding(
            "note",
            f"{short(server.url)} was {server.lag:.1f} versions behind the newest on average;"
            f" a transfer takes {duration(own)}, a step {duration(f.median_step_s)}",
        )


def _held_by_evaluations(f: Facts, server: ServerFigures) -> Iterator[Finding]:
    """Evaluations keep a server on its version, and the trainer may wait meanwhile."""
    if not server.held_s:
        return
    waited = server.waited_meanwhile_s
    # Subtract the usual waiting, which has other causes.
    others_s = f.step_s - server.held_s
    share = max(0.0, f.waited_s - waited) / others_s if others_s > 0 else 0.0
    usual = server.held_s * min(share, 1.0)
    bad = f.step_s > 0 and waited - usual >= BLOCKED * f.step_s
    part = percent(server.held_s / server.served_s) if server.served_s else "all"
    text = (
        f"evaluations held {short(server.url)} on its versions for {duration(server.held_s)}"
        f" ({part} of its time); the trainer waited {duration(waited)} for rollouts meanwhile"
    )
    remedy = ": with servers of its own (servers in [[evaluation]]) an evaluation holds none"
    yield Finding("bad" if bad else "note", text + remedy * bad)


def waiting_for_rollouts(f: Facts) -> Iterator[Finding]:
    """The trainer waits for the servers' completions."""
    if not f.step_s:
        return
    share = f.waited_s / f.step_s
    text = f"the trainer waited {duration(f.waited_s)} of {duration(f.step_s)} for rollouts"
    if share >= LONG_WAIT:
        more = (
            "add servers if these are busy, else speed up what asks them (a task, agent or"
            " environment); more staleness hides single slow groups"
        )
        yield Finding("bad", f"{text} ({percent(share)}): {more}")
    else:
        yield Finding("good", f"{text} ({percent(share)})")


def blocked_by_sync(f: Facts) -> Iterator[Finding]:
    """The trainer's main thread loses time to weight sync."""
    if not f.step_s:
        return
    share = f.blocked_s / f.step_s
    text = f"weight sync held the trainer up for {duration(f.blocked_s)} ({percent(share)})"
    if share >= BLOCKED and f.asynchronous:
        yield Finding(
            "note",
            f"{text}: grpo.async_weight_update is on, so this is the copy of the ranks' own shards,"
            " with [lora] the gather of each A, and the wait for a slot after skipped versions",
        )
    elif share >= BLOCKED:
        yield Finding(
            "bad",
            f"{text}: if grpo.async_weight_update is off, turn it on: it leaves only the copy of a"
            " rank's own shard",
        )
    else:
        yield Finding("good", text)


def slow_step(f: Facts) -> Iterator[Finding]:
    """One step takes far longer than the others."""
    s = f.longest
    if s is None or f.steps < 5 or s.step_s < SLOW_STEP * f.median_step_s:
        return
    parts = {
        "waiting for rollouts": s.waited_s,
        "held up by weight sync": s.blocked_s,
        "training": s.step_s - s.waited_s - s.blocked_s,
    }
    part = max(parts, key=lambda name: parts[name])
    yield Finding(
        "note",
        f"step {s.number} took {duration(s.step_s)}, the median is {duration(f.median_step_s)}:"
        f" {duration(parts[part])} of it were {part}",
    )


def drains(f: Facts) -> Iterator[Finding]:
    """Servers finish their requests before each commit."""
    total, commits = sum(s.drain_s for s in f.servers), sum(s.commits for s in f.servers)
    if total:
        number = counted(commits, "commit")
        yield Finding(
            "note",
            f"commits waited {duration(total)} for requests to finish ({number}):"
            " rollout.in_flight_weight_updates = true lets them run over a commit",
        )


def reward_trend(f: Facts) -> Iterator[Finding]:
    """The reward rose, fell or stayed, relative to its spread."""
    first, last = f.first.get(names.REWARD), f.last.get(names.REWARD)
    if first is None or last is None or f.steps < COMPARED:
        return
    spread = f.first.get(names.REWARD_STD, 0.0)
    text = f"{first:.3g} in the first fifth of the steps, {last:.3g} in the last"
    if last - first > 0.1 * spread:
        yield Finding("good", f"the reward rose: {text}")
    elif first - last > 0.1 * spread:
        yield Finding("bad", f"the reward fell: {text}")
    else:
        yield Finding("note", f"the reward stayed: {text}")


def equal_rewards(f: Facts) -> Iterator[Finding]:
    """Nothing was to be learnt, most often since the reward function fits no completion."""
    if f.last.get(names.REWARD_STD) == 0.0 and names.REWARD in f.last:
        yield Finding(
            "bad",
            f"all rewards were {f.last[names.REWARD]:.3g} in the last fifth of the steps, and equal"
            " rewards teach nothing: compare completions with what the reward function looks for",
        )


def engine_differs(f: Facts) -> Iterator[Finding]:
    """Trainer and engine compute different log-probabilities from the same weights."""
    gap = f.last.get(names.ON_POLICY_GAP, f.first.get(names.ON_POLICY_GAP, 0.0))
    if gap >= ON_POLICY_GAP:
        yield Finding(
            "bad",
            f"trainer and engine differ by {gap:.2g} nats per token on the same weights:"
            f" {likely_cause(f.last, f.quantised)}",
        )
        return
    compared = [(names.ON_POLICY_GAP, " on the same weights"), (names.LOGPROB_GAP, "")]
    young, old = (means.get(names.STALENESS_TOKENS, math.nan) for means in (f.first, f.last))
    if GREW * young <= old:
        # Older tokens differ more. A run begins with fresh ones, and a short one's first fifth is
        # no more than that.
        compared.pop()
    for name, which in compared:
        before, after = f.first.get(name, 0.0), f.last.get(name, 0.0)
        if f.steps >= COMPARED and after >= max(GREW * before, LEAST_GAP):
            yield Finding(
                "bad",
                f"the gap of trainer and engine{which} grew from {before:.2g} to {after:.2g} nats"
                f" per token: {likely_cause(f.last, f.quantised)}",
            )
            return


def much_is_cut(f: Facts) -> Iterator[Finding]:
    """Clipping or the correction changes many tokens."""
    for name, what in (
        (names.CLIP_FRACTION, "clipping took the gradient of"),
        (names.IMPORTANCE_CUT, "the off-policy correction was cut at"),
        (names.VETOED, "the veto took out"),
    ):
        if (share := f.last.get(name, 0.0)) >= CUT_TOKENS:
            topr = '. With grpo.policy_loss = "topr" rounding alone does it'
            topr *= name == names.IMPORTANCE_CUT
            yield Finding(
                "bad",
                f"{what} {percent(share)} of the tokens in the last fifth of the steps: data are"
                f" older, or steps larger, than the loss allows for{topr}",
            )


RULES: tuple[Callable[[Facts], Iterator[Finding]], ...] = (
    trouble,
    servers,
    waiting_for_rollouts,
    blocked_by_sync,
    engine_differs,
    much_is_cut,
    reward_trend,
    equal_rewards,
    slow_step,
    drains,
)
