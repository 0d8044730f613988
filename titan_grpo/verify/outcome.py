"""The records of a verification (trainer, server, prober), and its judgements: pure functions from
these to named violations. No torch.

Kinds: ``bytes`` (a server's bytes differ from the trainer's), ``mixed`` (an answer fits no
version), ``backwards`` (an older version was seen after a newer one), ``label`` (a server names
another version than it serves), ``foreign`` (another run committed to the server), ``modes`` (runs
that must agree differ), ``evidence`` (too little to prove anything, which counts as a failure). The
outcome is a table for people and JSON for programs.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from titan_grpo.errors import NOT_JSON, DataError
from titan_grpo.protocol.messages import Label

START = -1
"""Version number of the server's weights before the run's first commit."""

TRAINER_EVIDENCE = "trainer.jsonl"
"""File that rank 0 of a verified run writes: a Made per line."""

Line = TypeVar("Line")


@dataclass(frozen=True, slots=True)
class Made:
    """One version in the trainer. ``tensors``: HF name -> digest."""

    version: int
    digest: str
    fingerprint: str
    """Fingerprint of its image."""
    tensors: dict[str, str]
    image_bytes: int = 0
    gather_s: float = 0.0
    """Time of gathering, digesting and saving it for the verification."""


@dataclass(frozen=True, slots=True)
class Committed:
    """One commit on one worker of the server, digested in the server."""

    run_id: str
    worker: int
    version: int
    ok: bool
    fingerprint: str
    tensors: dict[str, str]


@dataclass(frozen=True, slots=True)
class Probe:
    """One answered request: ``logprobs`` [tokens - 1] in nats, and the server's label right before
    and right after it."""

    prompt: int
    logprobs: tuple[float, ...]
    before: str
    after: str


@dataclass(frozen=True, slots=True)
class Reference:
    """Log-probabilities of one version, by prompt. Equal weights have equal ``digest``."""

    version: int
    digest: str
    logprobs: tuple[tuple[float, ...], ...]


@dataclass(frozen=True, slots=True)
class Run:
    """One training run with all its evidence."""

    name: str
    made: tuple[Made, ...]
    claimed: tuple[int, ...]
    """Versions that the trainer's summary lists as committed."""
    commits: tuple[Committed, ...]
    probes: tuple[Probe, ...]
    references: tuple[Reference, ...]
    probe_errors: tuple[str, ...] = ()
    """Reasons of requests without an answer."""
    final_file: str = ""
    """SHA-256 of the trained weights' file."""


def read(path: Path, kind: type[Line], skip: int = 0) -> tuple[Line, ...]:
    """Read the lines after the first ``skip``, each a Made or a Committed; empty without a file.
    Raises DataError for a malformed line."""
    if not path.exists():
        return ()
    try:
        lines = path.read_bytes().splitlines()[skip:]
        return tuple(msgspec.json.decode(line, type=kind) for line in lines)
    except NOT_JSON as error:
        raise DataError(f"each line of {path} must be a {kind.__name__}: {error}") from error


def version_file(evidence: Path, version: int) -> Path:
    """Return rank 0's file with the weights of a version, for reference log-probabilities."""
    return evidence / f"version_{version:06d}.safetensors"


def label_version(text: str, run_id: str) -> int:
    """Return the version that a label names; START if the label is not of run ``run_id``."""
    label = Label.parse(text)
    return label.version if label is not None and label.run_id == run_id else START


MIN_PROBES = 6
SHOWN = 3
"""Names or versions listed per message."""


@dataclass(frozen=True, slots=True)
class Violation:
    """A broken rule: its kind, run and description."""

    kind: str
    run: str
    message: str


def distance(a: Sequence[float], b: Sequence[float]) -> float:
    """Return the largest absolute difference in nats; infinite if lengths differ or a difference is
    not finite.

    >>> distance((-1.0, -2.0), (-1.5, -2.0))
    0.5
    """
    if len(a) != len(b) or not a:
        return float("inf")
    worst = 0.0
    for x, y in zip(a, b, strict=True):
        # Comparisons with NaN are false: a NaN becomes infinity, not a small distance.
        worst = max(worst, abs(x - y)) if abs(x - y) < float("inf") else float("inf")
    return worst


def check_bytes(run: Run) -> Iterator[Violation]:
    """Check that every claimed or recorded commit holds the trainer's tensors, and that
    fingerprints and labels agree."""
    made, run_id = {m.version: m for m in run.made}, run_of(run)
    own = [c for c in run.commits if c.ok and c.run_id == run_id]
    messages = [
        f"version {v} is called committed, but the server's plugin recorded no commit of it"
        for v in run.claimed
        if v not in {c.version for c in own}
    ]
    for commit in own:
        where = f"version {commit.version} on worker {commit.worker}"
        want = made.get(commit.version)
        if want is None:
            messages.append(f"{where}: the trainer never made that version")
        elif wrong := differing(want.tensors, commit.tensors):
            names = ", ".join(wrong[:SHOWN]) + (", ..." if len(wrong) > SHOWN else "")
            of = f"{len(wrong)} of {len(want.tensors)} tensors"
            messages.append(f"{where}: {of} are not the trainer's ({names})")
        elif commit.fingerprint != want.fingerprint:
            messages.append(
                f"{where}: fingerprint {commit.fingerprint} is not that of the trainer's image,"
                f" {want.fingerprint}"
            )
    for text in dict.fromkeys(p.after for p in run.probes):
        label = Label.parse(text)
        if label is not None and label.run_id == run_id:
            want = made.get(label.version)
            if want is None or want.fingerprint != label.fingerprint:
                messages.append(
                    f"the server's label {text} has not the fingerprint of the trainer's version"
                )
    yield from (Violation("bytes", run.name, message) for message in messages)


def check_foreign(run: Run) -> Iterator[Violation]:
    """Check that no other run committed to the server during this one."""
    for commit in run.commits:
        if commit.ok and commit.run_id != run_of(run):
            text = f"version {commit.version} was committed by another run, {commit.run_id}"
            yield Violation("foreign", run.name, text)


def differing(want: Mapping[str, str], got: Mapping[str, str]) -> list[str]:
    """Return the sorted names whose digests differ or that only one side has."""
    return sorted(name for name in want.keys() | got.keys() if want.get(name) != got.get(name))


def run_of(run: Run) -> str:
    """Return the run's id: the newest in the labels (an older one is of the server's earlier
    weights)."""
    labels = [Label.parse(text) for p in run.probes for text in (p.before, p.after)]
    return max((label.run_id for label in labels if label is not None), default="")


def candidates(probe: Probe, references: Sequence[Reference], tolerance: float) -> list[Reference]:
    """Return the versions whose log-probabilities an answer has, within ``tolerance`` nats per
    token."""
    return [
        r for r in references if distance(probe.logprobs, r.logprobs[probe.prompt]) <= tolerance
    ]


def check_probes(run: Run, tolerance: float) -> list[Violation]:
    """Check that every answer is one version's, versions never go backwards, and labels are true.

    Two versions with the same content count as one. ``probes`` are in the order in which one client
    sent them, each after the previous answer. Of similar violations, the first is given with their
    number.
    """
    run_id, current = run_of(run), START
    found: dict[tuple[str, int], list[str]] = {}
    for number, probe in enumerate(run.probes):
        low, high = label_version(probe.before, run_id), label_version(probe.after, run_id)
        # Once the server names a version of this run, its earlier weights are no valid answer.
        possible = [r for r in run.references if r.version != START or low == START]
        fitting = candidates(probe, possible, tolerance)
        if len({r.digest for r in fitting}) > 1:
            # The server's weights at the start may nearly equal a later version (they come from an
            # earlier run on the same data); the label tells them apart. Versions of this run differ
            # enough without it (see check_evidence).
            fitting = [r for r in fitting if low <= r.version <= high]
        versions = sorted(r.version for r in fitting)
        if len({r.digest for r in fitting}) != 1:
            if fitting:
                text = f"fits versions {versions} alike within {tolerance:g} nats"
            else:
                off, near = min(
                    (distance(probe.logprobs, r.logprobs[probe.prompt]), r.version)
                    for r in possible
                )
                text = f"fits no version; the nearest, {near}, is {off:.3f} nats off, allowed are"
                text += f" {tolerance:g}"
            found.setdefault(("mixed", current), []).append(f"probe {number} {text}")
            continue
        newest = versions[-1]
        ahead = [v for v in versions if v >= current]
        text = f"probe {number} was answered by version {newest}"
        said = f"the label said {low} before, {high} after"
        if not ahead or high < low:
            text = f"{text} after version {current} had been seen; {said}"
            found.setdefault(("backwards", newest), []).append(text)
        elif not any(low <= v <= high for v in versions):
            found.setdefault(("label", newest), []).append(f"{text}, {said}")
        current = ahead[0] if ahead else newest
    return [
        Violation(kind, run.name, first + (f" (and {len(more)} more probes)" if more else ""))
        for (kind, _), (first, *more) in found.items()
    ]


def separation(references: Sequence[Reference]) -> float:
    """Return the smallest distance in nats between two versions of different content, over all
    prompts; infinite without such a pair.

    The server's weights at the start are compared with the first version only (see check_probes).
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
    """Return the largest distance of an answer to its nearest version, in nats."""
    return max(
        (
            min(distance(p.logprobs, r.logprobs[p.prompt]) for r in run.references)
            for p in run.probes
        ),
        default=0.0,
    )


def versions_seen(run: Run, tolerance: float) -> list[int]:
    """Return the versions that answered a probe (of several with the same content, the newest)."""
    return sorted(
        {
            max(r.version for r in fit)
            for p in run.probes
            if (fit := candidates(p, run.references, tolerance))
        }
    )


def check_evidence(run: Run, tolerance: float) -> list[Violation]:
    """Check that the other checks could have failed: enough commits and probes, versions far enough
    apart, the last version served."""
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
    """Check that two runs on the same data made the same weights: every version, and the file of
    the trained weights."""
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
    """Run every check on every run, and compare all runs with the first."""
    out: list[Violation] = []
    for run in runs:
        out += [*check_bytes(run), *check_foreign(run)]
        out += check_probes(run, tolerance) + check_evidence(run, tolerance)
    for other in runs[1:]:
        out += check_same(runs[0], other)
    return out


MIB = 1 << 20
MOST_SHOWN = 12
"""Violations that the table lists, or more if each kind and run needs one; the JSON has all."""


def throughput(summary: Mapping[str, Any], image_bytes: int, gather_s: float) -> dict[str, Any]:
    """Return one run's figures from its summary.json. ``sent_mib_s``: bytes of an image per median
    transfer time. ``synced_mib_s``: bytes committed per time from the first to the last step, which
    is that of all versions but the one before the first step and the last. Steps include the
    verification's own gather (``gather_s`` each)."""
    rate, steps = summary["steps_per_s"] or 0.0, summary["steps"]
    elapsed = (steps - 1) / rate if rate else 0.0
    servers = summary["versions_committed"].values()
    synced = sum(0 < version < steps for server in servers for version in server["committed"])
    send_s = summary["send_s"]["median"] or 0.0
    return {
        "mode": summary["mode"],
        "steps_per_s": rate,
        "synced_mib_s": synced * image_bytes / MIB / elapsed if elapsed else 0.0,
        "sent_mib_s": image_bytes / MIB / send_s if send_s else 0.0,
        "commit_s": summary["commit_s"]["median"] or 0.0,
        "blocked_s": summary["blocked_s"]["median"] or 0.0,
        "gather_s": gather_s,
    }


def outcome(
    runs: Sequence[Run],
    speeds: Mapping[str, Mapping[str, Any]],
    violations: Sequence[Violation],
    tol: float,
) -> dict[str, Any]:
    """Return the outcome as one JSON-able object."""
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
                "throughput": speeds.get(run.name),
            }
            for run in runs
        ],
    }


def table(result: Mapping[str, Any]) -> str:
    """Return the outcome as text."""
    lines = [
        f"{'run':<14}{'made':>5}{'committed':>10}{'probes':>8}{'seen':>6}{'worst fit':>11}"
        f"{'apart':>8}  final weights"
    ]
    lines += [
        f"{run['run']:<14}{run['versions_made']:>5}{run['versions_committed']:>10}"
        f"{run['probes']:>8}{len(run['versions_seen']):>6}{run['worst_fit_nats']:>11.4f}"
        f"{run['separation_nats']:>8.2f}  {run['final_digest']}"
        for run in result["runs"]
    ]
    within = f"{result['tolerance_nats']:g}"
    lines += [f"(worst fit and apart in nats; an answer fits a version within {within})", ""]
    lines.append(
        f"{'run':<14}{'steps/s':>9}{'synced MiB/s':>14}{'sent MiB/s':>12}{'commit s':>10}"
        f"{'blocked s':>11}{'gather s':>10}"
    )
    for run in result["runs"]:
        if speed := run["throughput"]:
            lines.append(
                f"{run['run']:<14}{speed['steps_per_s']:>9.2f}{speed['synced_mib_s']:>14.1f}"
                f"{speed['sent_mib_s']:>12.0f}{speed['commit_s']:>10.3f}"
                f"{speed['blocked_s']:>11.4f}{speed['gather_s']:>10.3f}"
            )
    lines += ["(steps include the gather, which only a verification does)", ""]
    found = _selection(result["violations"])
    return "\n".join([*lines, *found, "FAILED" if found else "PASSED: no violation"])


def _selection(violations: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return one line per violation; of many, at least one per kind and run, and the total."""
    firsts: list[str] = []
    others: list[str] = []
    seen = set()
    for v in violations:
        key = (v["kind"], v["run"])
        line = f"VIOLATION {v['kind']} in run {v['run']}: {v['message']}"
        (others if key in seen else firsts).append(line)
        seen.add(key)
    chosen = [*firsts, *others][: max(MOST_SHOWN, len(firsts))]
    left = len(violations) - len(chosen)
    return chosen + ([f"... {len(violations)} violations in all"] if left else [])
