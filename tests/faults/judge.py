"""The fault matrix's judgements: pure functions from what was seen to violations and figures."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from tests.rigs.trainer_handle import Step
from titan_grpo.protocol.messages import UNUSABLE, Label
from titan_grpo.verify.outcome import Committed, differing

TOLERANCE = 0.02
"""A fault may cost the trainer's step, or another server's lag, this share."""

WINDOWS = 4
"""Into so many parts the time without a fault is cut: how far they are apart is the machine's own
noise."""

CROWDED = 0.2
"""Share of the time without a core from which on a machine is too full to judge how long something
takes."""

FEWEST = 8
"""Values that a comparison needs on each side."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One look at a server. ``label`` is None if it did not answer; ``commits``: how many it had
    recorded by then.

    ``steady``: it was not paused and no commit ended while it was looked at.
    """

    t: float
    label: str | None
    paused: bool
    commits: int
    steady: bool


@dataclass(frozen=True, slots=True)
class Ratio:
    """Median with the fault over median without it; ``noise``: by how much parts of the time
    without it differ."""

    value: float
    noise: float
    enough: bool = True

    @property
    def within(self) -> bool:
        """Whether nothing was lost."""
        return self.value <= 1 + TOLERANCE

    @property
    def tells(self) -> bool:
        """Whether a loss of TOLERANCE would show on this machine."""
        return self.enough and self.noise <= TOLERANCE

    def __str__(self) -> str:
        return f"{self.value:.3f}" if self.enough else "-"


NOTHING = Ratio(1.0, 0.0, enough=False)
"""The comparison of too few values."""


def compare(before: Sequence[float], during: Sequence[float]) -> Ratio:
    """Medians of two windows, in the order of time.

    >>> compare([1.0] * 8, [1.5] * 8)
    Ratio(value=1.5, noise=0.0, enough=True)
    """
    if min(len(before), len(during)) < FEWEST:
        return NOTHING
    whole = statistics.median(before)
    size = len(before) // WINDOWS
    parts = [statistics.median(before[i * size : (i + 1) * size]) for i in range(WINDOWS)]
    return Ratio(statistics.median(during) / whole, (max(parts) - min(parts)) / whole)


def judge_steps(
    before: Sequence[Step], during: Sequence[Step], deadline_s: float
) -> tuple[Ratio, list[str], str]:
    """(step time with the fault over without, violations, why the machine cannot tell or empty).

    Servers, receivers and the trainer share the cores of one host, so a step may take longer for a
    reason that no protocol can mend. It is taken apart: what counts against the fault is the time
    that the trainer waited, not the time in which it had no core, nor that its arithmetic ran
    slower on a core whose twin or caches others used.
    """
    ratio = compare([s.wall for s in before], [s.wall for s in during])
    if not ratio.enough:
        return ratio, [], f"too few steps to compare ({len(before)} and {len(during)})"
    step = statistics.median(s.wall for s in before)
    wrong = []
    longest = max(s.waited for s in during)
    if longest >= deadline_s / 2:
        wrong.append(f"a step waited {longest:.2f} s: the trainer waited for a server")
    slept, blocked, no_core, ran = (
        _growth(before, during, part) / step for part in ("slept", "blocked", "no_core", "ran")
    )
    if slept > TOLERANCE or blocked - max(0.0, no_core) > TOLERANCE:
        longer = (
            f"steps took {ratio.value:.3f} times as long: {slept:+.1%} waiting, {blocked:+.1%} in"
            " the sync"
        )
        # What a thread waits for may itself wait for a core.
        if crowded := crowd(during):
            return ratio, wrong, f"{longer}; {crowded}"
        wrong.append(longer)
    if ratio.within or wrong:
        return ratio, wrong, ""
    parts = f"{no_core:+.1%} without a core, {ran:+.1%} arithmetic, {slept:+.1%} waiting"
    more = "the machine cannot tell more, the servers share its cores"
    return ratio, [], f"steps x {ratio.value:.2f} ({parts}); {more}"


def crowd(steps: Sequence[Step]) -> str:
    """Why a machine is too full to judge durations in these steps; empty: it is not."""
    share = without_core(steps)
    if share <= CROWDED:
        return ""
    return f"the machine cannot tell: the trainer had no core for {share:.0%} of that time"


def without_core(steps: Sequence[Step]) -> float:
    """Share of the steps' time in which the trainer was ready to run and others had the cores; 0
    for no steps."""
    whole = sum(s.wall for s in steps)
    return sum(s.no_core for s in steps) / whole if whole else 0.0


def _growth(before: Sequence[Step], during: Sequence[Step], part: str) -> float:
    """Seconds by which a part of the median step grew."""
    now, then = ([float(getattr(s, part)) for s in steps] for steps in (during, before))
    return statistics.median(now) - statistics.median(then)


def judge_lag(
    before: Sequence[float],
    during: Sequence[float],
    behind: tuple[float, float],
    crowded: str = "",
) -> tuple[Ratio, list[str], str]:
    """As ``judge_steps``, for another server's seconds from publish to commit; ``behind``:
    versions, before and during.

    ``crowded``: what ``crowd`` says of the trainer's steps in that time.
    """
    ratio = compare(before, during)
    wrong = []
    if behind[1] > behind[0] + 1:
        late = (
            f"the other server was {behind[1]:g} versions behind, {behind[0]:g} without the fault"
        )
        if crowded:
            return ratio, [], f"{late}; {crowded}"
        wrong.append(late)
    if not ratio.enough or ratio.within:
        return ratio, wrong, ""
    if not ratio.tells:
        lag = f"the machine cannot tell the other server's lag x {ratio.value:.2f}"
        return ratio, wrong, f"{lag}: noise {ratio.noise:.0%}"
    slower = f"the other server's lag was {ratio.value:.2f} times as long"
    return (ratio, wrong, f"{slower}; {crowded}") if crowded else (ratio, [*wrong, slower], "")


def wrong_bytes(
    commits: Sequence[Committed], expected: Callable[[str, int], Mapping[str, str] | None]
) -> list[str]:
    """Good commits that are not the trainer's bytes. ``expected``: digests by (run, version); None:
    no such run."""
    out = []
    for commit in commits:
        if not commit.ok:
            continue
        want = expected(commit.run_id, commit.version)
        if want is None:
            out.append(f"version {commit.version} of an unknown run {commit.run_id} was committed")
        elif names := differing(want, commit.tensors):
            out.append(
                f"version {commit.version}: {len(names)} of {len(want)} tensors are not the"
                f" trainer's ({names[0]}, ...)"
            )
    return out


def served(commits: Sequence[Committed]) -> Label | str:
    """What a server serves after these commits: a label, "" for what it was started with, UNUSABLE
    for a torn load."""
    current: Label | str = ""
    for commit in commits:
        if commit.ok:
            current = Label(commit.run_id, commit.version, commit.fingerprint)
        elif commit.tensors:
            current = UNUSABLE
    return current


def lies(samples: Sequence[Sample], commits: Sequence[Committed]) -> list[str]:
    """Moments at which a server that generated showed another label than that of the weights in
    it."""
    out: dict[tuple[str, str], str] = {}
    for sample in samples:
        if not sample.steady or sample.label is None:
            continue
        truth = served(commits[: sample.commits])
        shown = Label.parse(sample.label)
        if truth == UNUSABLE:
            out.setdefault(
                ("torn", ""),
                f"it generated on half loaded weights, labelled {_short(sample.label)}",
            )
        elif (str(truth) != sample.label) if truth else shown is not None:
            key = (str(truth), sample.label)
            out.setdefault(
                key,
                f"it generated on {_short(str(truth)) or 'weights of its own'} labelled"
                f" {_short(sample.label)}",
            )
    return list(out.values())


def backwards(samples: Sequence[Sample]) -> list[str]:
    """Labels that went back to an older version of their run, or to an older run."""
    newest: Label | None = None
    out = []
    for sample in samples:
        label = Label.parse(sample.label)
        if label is None:
            continue
        if newest is not None and (label.run_id, label.version) < (newest.run_id, newest.version):
            out.append(f"its label went back from {_short(str(newest))} to {_short(str(label))}")
        newest = label
    return out


def _short(label: str) -> str:
    """A label for people: the run's last digits and the version."""
    parsed = Label.parse(label)
    return label if parsed is None else f"v{parsed.version} of run ..{parsed.run_id[-4:]}"
