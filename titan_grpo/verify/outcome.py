"""The verification's judgements: pure functions from evidence to named violations. No I/O, no
torch.

Kinds: ``bytes`` (a server's bytes are not the trainer's), ``mixed`` (an answer fits no version),
``backwards`` (an older version was seen after a newer one), ``label`` (a server names another
version than it serves), ``foreign`` (somebody else committed to the server), ``modes`` (runs that
must agree do not), ``evidence`` (there is too little of it to prove anything, which counts as a
failure).

What a verification found, as a table for people and as JSON for programs. Pure."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from typing import Any

from titan_grpo.protocol.messages import Label
from titan_grpo.verify.evidence import START, Made, Probe, Reference, Run, label_version

MIN_PROBES = 6
SHOWN = 3
"""Names or versions that one message lists."""


@dataclass(frozen=True, slots=True)
class Violation:
    """What is broken, in which run, and how."""

    kind: str
    run: str
    message: str

    def __str__(self) -> str:
        return f"{self.kind} violation in run {self.run}: {self.message}"


def distance(a: Sequence[float], b: Sequence[float]) -> float:
    """Largest absolute difference in nats; infinite for other lengths or a value that is none.

    >>> distance((-1.0, -2.0), (-1.5, -2.0))
    0.5
    """
    if len(a) != len(b) or not a:
        return float("inf")
    worst = 0.0
    for x, y in zip(a, b, strict=True):
        # Written so that a NaN ends up here and not as a small distance.
        worst = max(worst, abs(x - y)) if abs(x - y) < float("inf") else float("inf")
    return worst


def check_bytes(run: Run) -> list[Violation]:
    """Every claimed or recorded commit holds, tensor by tensor, what the trainer had; fingerprints
    and labels agree."""
    made, run_id = {m.version: m for m in run.made}, run_of(run)
    taken = {c.version for c in run.commits if c.ok and c.run_id == run_id}
    out = [
        Violation(
            "bytes",
            run.name,
            f"version {v} is called committed, but the server's plugin recorded no commit of it",
        )
        for v in run.claimed
        if v not in taken
    ]
    for commit in run.commits:
        if not commit.ok or commit.run_id != run_id:
            continue
        where = f"version {commit.version} on worker {commit.worker}"
        if commit.version not in made:
            out.append(
                Violation("bytes", run.name, f"{where}: the trainer never made that version")
            )
            continue
        want = made[commit.version]
        if wrong := differing(want.tensors, commit.tensors):
            shown = ", ".join(wrong[:SHOWN]) + (", ..." if len(wrong) > SHOWN else "")
            message = (
                f"{where}: {len(wrong)} of {len(want.tensors)} tensors are not the trainer's"
                f" ({shown})"
            )
            out.append(Violation("bytes", run.name, message))
        elif commit.fingerprint != want.fingerprint:
            message = (
                f"{where}: fingerprint {commit.fingerprint} is not that of the trainer's image,"
                f" {want.fingerprint}"
            )
            out.append(Violation("bytes", run.name, message))
    return out + list(_labels_with_other_fingerprints(run, made))


def _labels_with_other_fingerprints(run: Run, made: Mapping[int, Made]) -> Iterator[Violation]:
    run_id = run_of(run)
    for text in dict.fromkeys(p.after for p in run.probes):
        label = Label.parse(text)
        if label is None or label.run_id != run_id:
            continue
        if label.version not in made or made[label.version].fingerprint != label.fingerprint:
            yield Violation(
                "bytes",
                run.name,
                f"the server's label {text} has not the fingerprint of the trainer's version",
            )


def check_foreign(run: Run) -> list[Violation]:
    """No other run committed anything to the server while this one trained."""
    others = [c for c in run.commits if c.ok and c.run_id != run_of(run)]
    return [
        Violation(
            "foreign", run.name, f"version {c.version} was committed by another run, {c.run_id}"
        )
        for c in others
    ]


def differing(want: Mapping[str, str], got: Mapping[str, str]) -> list[str]:
    """Names whose digests differ or that only one side has, sorted."""
    return sorted(name for name in want.keys() | got.keys() if want.get(name) != got.get(name))


def run_of(run: Run) -> str:
    """Id of the training run: the newest that the labels name (an older one is what the server came
    from)."""
    labels = [
        label
        for p in run.probes
        for text in (p.before, p.after)
        if (label := Label.parse(text)) is not None
    ]
    return max((label.run_id for label in labels), default="")


def candidates(probe: Probe, references: Sequence[Reference], tolerance: float) -> list[Reference]:
    """The versions whose log-probabilities an answer has, within ``tolerance`` nats at every
    token."""
    return [
        r for r in references if distance(probe.logprobs, r.logprobs[probe.prompt]) <= tolerance
    ]


def check_probes(run: Run, tolerance: float) -> list[Violation]:
    """Every answer is that of exactly one version, versions never go backwards, and labels tell the
    truth.

    Two versions of the same content count as one. ``probes`` are in the order in which one client
    sent them, each after the answer to the one before. Of many like violations in a row, the first
    is given with their number.
    """
    run_id, current = run_of(run), START
    found: dict[tuple[str, int], list[str]] = {}
    for number, probe in enumerate(run.probes):
        low, high = label_version(probe.before, run_id), label_version(probe.after, run_id)
        # Once the server names a version of this run, what it had before is no answer any more.
        possible = [r for r in run.references if r.version != START or low == START]
        fitting = candidates(probe, possible, tolerance)
        if len({r.digest for r in fitting}) > 1:
            # What the server had at the start may be all but equal to a later version (it comes
            # from an earlier run of the same data); the label tells them apart. Versions of this
            # run are told apart without it: see check_evidence.
            fitting = [r for r in fitting if low <= r.version <= high]
        if len({r.digest for r in fitting}) != 1:
            text = _no_single_version(number, probe, possible, fitting, tolerance)
            found.setdefault(("mixed", current), []).append(text)
            continue
        versions = sorted(r.version for r in fitting)
        ahead = [v for v in versions if v >= current]
        if not ahead or high < low:
            text = (
                f"probe {number} was answered by version {versions[-1]} after version {current} had"
                " been seen"
            )
            found.setdefault(("backwards", versions[-1]), []).append(
                f"{text}; the label said {low} before, {high} after"
            )
        elif not any(low <= v <= high for v in versions):
            text = (
                f"probe {number} was answered by version {versions[-1]}, the label said {low}"
                f" before, {high} after"
            )
            found.setdefault(("label", versions[-1]), []).append(text)
        current = ahead[0] if ahead else versions[-1]
    return [
        Violation(
            kind,
            run.name,
            texts[0] + (f" (and {len(texts) - 1} more probes)" if len(texts) > 1 else ""),
        )
        for (kind, _), texts in found.items()
    ]


def _no_single_version(
    number: int,
    probe: Probe,
    references: Sequence[Reference],
    fitting: Sequence[Reference],
    tolerance: float,
) -> str:
    if fitting:
        return (
            f"probe {number} fits versions {[r.version for r in fitting]} alike within"
            f" {tolerance:g} nats"
        )
    nearest = min(references, key=lambda r: distance(probe.logprobs, r.logprobs[probe.prompt]))
    off = distance(probe.logprobs, nearest.logprobs[probe.prompt])
    return (
        f"probe {number} fits no version; the nearest, {nearest.version}, is {off:.3f} nats off,"
        f" allowed are {tolerance:g}"
    )


def separation(references: Sequence[Reference]) -> float:
    """Smallest distance between two versions of different content, over all prompts, in nats;
    infinite if there is none.

    What the server had at the start is compared with the first version only (see check_probes).
    """
    ordered = sorted(references, key=lambda r: r.version)
    pairs = [
        (a, b)
        for a, b in combinations(ordered, 2)
        if a.digest != b.digest and (a.version != START or b == ordered[1])
    ]
    return min(
        (distance(x, y) for a, b in pairs for x, y in zip(a.logprobs, b.logprobs, strict=True)),
        default=float("inf"),
    )


def worst_fit(run: Run) -> float:
    """Largest distance of an answer to the version nearest to it, in nats."""
    return max(
        (
            min(distance(p.logprobs, r.logprobs[p.prompt]) for r in run.references)
            for p in run.probes
        ),
        default=0.0,
    )


def versions_seen(run: Run, tolerance: float) -> list[int]:
    """Versions that answered at least one probe (of several with the same content: the newest)."""
    return sorted(
        {
            max(r.version for r in fit)
            for p in run.probes
            if (fit := candidates(p, run.references, tolerance))
        }
    )


def check_evidence(run: Run, tolerance: float) -> list[Violation]:
    """Whether the other checks could have failed: commits, probes, versions far enough apart, the
    last one served."""
    out = [f"a probe got no answer: {error}" for error in run.probe_errors[:SHOWN]]
    if len(run.made) < 3 or len(run.claimed) < 2:
        out.append(
            f"{len(run.made)} versions were made and {len(run.claimed)} committed; train more steps"
        )
    if len(run.probes) < MIN_PROBES:
        out.append(f"only {len(run.probes)} probes were answered, at least {MIN_PROBES} are needed")
    apart = separation(run.references)
    if apart <= 2 * tolerance:
        out.append(
            f"two versions are only {apart:.3f} nats apart, a mixture could pass for one; raise"
            " optimizer.lr"
        )
    if len(versions_seen(run, tolerance)) < 2:
        out.append("the probes saw fewer than two versions; train more steps")
    if run.claimed and run.made and run.claimed[-1] != run.made[-1].version:
        out.append(
            f"version {run.made[-1].version} was trained last, version {run.claimed[-1]} was"
            " committed last"
        )
    missing = {m.version for m in run.made} - {r.version for r in run.references}
    if missing:
        out.append(f"no reference was computed for versions {sorted(missing)}")
    return [Violation("evidence", run.name, message) for message in out]


def check_same(a: Run, b: Run) -> list[Violation]:
    """Two runs on the same data made the same weights: every version, and the file of the trained
    weights."""
    name = f"{a.name} and {b.name}"
    left, right = ({m.version: m for m in run.made} for run in (a, b))
    out = []
    if left.keys() != right.keys():
        out.append(f"the versions made are {sorted(left)} and {sorted(right)}")
    different = [v for v in sorted(left.keys() & right.keys()) if left[v].digest != right[v].digest]
    if different:
        wrong = differing(left[different[0]].tensors, right[different[0]].tensors)
        out.append(
            f"versions {different} differ; in the first of them {len(wrong)} of"
            f" {len(left[different[0]].tensors)} tensors do ({', '.join(wrong[:SHOWN])})"
        )
    if a.final_file != b.final_file or not a.final_file:
        out.append("the files of the trained weights differ")
    return [Violation("modes", name, message) for message in out]


def check_all(runs: Sequence[Run], tolerance: float) -> list[Violation]:
    """Every check on every run, and all runs against the first."""
    out: list[Violation] = []
    for run in runs:
        out += (
            check_bytes(run)
            + check_foreign(run)
            + check_probes(run, tolerance)
            + check_evidence(run, tolerance)
        )
    for other in runs[1:]:
        out += check_same(runs[0], other)
    return out


MIB = 1 << 20
MOST_SHOWN = 12
"""Violations that the table lists at least; the JSON has all."""


@dataclass(frozen=True, slots=True)
class Throughput:
    """One run's figures. ``sent_mib_s``: bytes of an image by its median transfer time;
    ``synced_mib_s``: bytes committed by the time from the first to the last step. Steps include the
    verification's own gather (``gather_s`` each)."""

    mode: str
    steps_per_s: float
    synced_mib_s: float
    sent_mib_s: float
    commit_s: float
    blocked_s: float
    gather_s: float


def throughput(summary: Mapping[str, Any], image_bytes: int, gather_s: float) -> Throughput:
    """From a run's summary.json."""
    rate = summary["steps_per_s"] or 0.0
    elapsed = (summary["steps"] - 1) / rate if rate else 0.0
    send_s = summary["send_s"]["median"] or 0.0
    return Throughput(
        mode=summary["mode"],
        steps_per_s=rate,
        synced_mib_s=summary["sync_count"] * image_bytes / MIB / elapsed if elapsed else 0.0,
        sent_mib_s=image_bytes / MIB / send_s if send_s else 0.0,
        commit_s=summary["commit_s"]["median"] or 0.0,
        blocked_s=summary["blocked_s"]["median"] or 0.0,
        gather_s=gather_s,
    )


def outcome(
    runs: Sequence[Run],
    speeds: Mapping[str, Throughput],
    violations: Sequence[Violation],
    tol: float,
) -> dict[str, Any]:
    """Everything as one JSON-able object."""
    return {
        "passed": not violations,
        "violations": [asdict(v) for v in violations],
        "tolerance_nats": tol,
        "runs": [
            {
                "run": run.name,
                "versions_made": len(run.made),
                "versions_committed": len(run.claimed),
                "tensors": len(run.made[0].tensors) if run.made else 0,
                "probes": len(run.probes),
                "versions_seen": versions_seen(run, tol),
                "worst_fit_nats": worst_fit(run),
                "separation_nats": separation(run.references),
                "final_digest": run.made[-1].digest if run.made else "",
                "throughput": asdict(speeds[run.name]) if run.name in speeds else None,
            }
            for run in runs
        ],
    }


def table(result: Mapping[str, Any]) -> str:
    """The object of ``outcome`` as text."""
    head = (
        f"{'run':<14}{'made':>5}{'committed':>10}{'probes':>8}{'seen':>6}{'worst fit':>11}{'apart':>8}"
        "  final weights"
    )
    lines = [
        head,
        *(
            f"{run['run']:<14}{run['versions_made']:>5}{run['versions_committed']:>10}{run['probes']:>8}{len(run['versions_seen']):>6}{run['worst_fit_nats']:>11.4f}{run['separation_nats']:>8.2f}"
            f"  {run['final_digest']}"
            for run in result["runs"]
        ),
    ]
    lines.append(
        "(worst fit and apart in nats; an answer fits a version within"
        f" {result['tolerance_nats']:g})"
    )
    lines += [
        "",
        (
            f"{'run':<14}{'steps/s':>9}{'synced MiB/s':>14}{'sent MiB/s':>12}{'commit s':>10}{'blocked s':>11}{'gather s':>10}"
        ),
    ]
    for run in result["runs"]:
        if speed := run["throughput"]:
            lines.append(
                f"{run['run']:<14}{speed['steps_per_s']:>9.2f}{speed['synced_mib_s']:>14.1f}{speed['sent_mib_s']:>12.0f}"
                f"{speed['commit_s']:>10.3f}{speed['blocked_s']:>11.4f}{speed['gather_s']:>10.3f}"
            )
    lines.append("(steps include the gather, which only a verification does)")
    found = list(_shown(result["violations"]))
    return "\n".join([*lines, "", *found, "FAILED" if found else "PASSED: no violation"])


def _shown(violations: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """One line per violation; where there are many, at least one of every kind and run, and how
    many there are."""
    lines = [
        (v["kind"], v["run"], f"VIOLATION {v['kind']} in run {v['run']}: {v['message']}")
        for v in violations
    ]
    firsts = {(kind, run): line for kind, run, line in reversed(lines)}
    order = [line for _, _, line in lines if line in firsts.values()] + [
        x for _, _, x in lines if x not in firsts.values()
    ]
    shown = max(MOST_SHOWN, len(firsts))
    yield from order[:shown]
    if len(lines) > shown:
        yield f"... {len(lines)} violations in all"
