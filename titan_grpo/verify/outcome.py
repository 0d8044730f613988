"""What a verification found, as a table for people and as JSON for programs. Pure."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from titan_grpo.verify.checks import Violation, separation, versions_seen, worst_fit
from titan_grpo.verify.evidence import Run

MIB = 1 << 20
SHOWN = 12
"""Violations that the table lists at least; the JSON has all."""


@dataclass(frozen=True, slots=True)
class Throughput:
    """One run's figures. ``sent_mib_s``: bytes of an image by its median transfer time; ``synced_mib_s``: bytes committed by
    the time from the first to the last step. Steps include the verification's own gather (``gather_s`` each)."""

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
    runs: Sequence[Run], speeds: Mapping[str, Throughput], violations: Sequence[Violation], tol: float
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
    head = f"{'run':<14}{'made':>5}{'committed':>10}{'probes':>8}{'seen':>6}{'worst fit':>11}{'apart':>8}  final weights"
    lines = [
        head,
        *(
            f"{run['run']:<14}{run['versions_made']:>5}{run['versions_committed']:>10}{run['probes']:>8}"
            f"{len(run['versions_seen']):>6}{run['worst_fit_nats']:>11.4f}{run['separation_nats']:>8.2f}  {run['final_digest']}"
            for run in result["runs"]
        ),
    ]
    lines.append(f"(worst fit and apart in nats; an answer fits a version within {result['tolerance_nats']:g})")
    lines += [
        "",
        f"{'run':<14}{'steps/s':>9}{'synced MiB/s':>14}{'sent MiB/s':>12}{'commit s':>10}{'blocked s':>11}{'gather s':>10}",
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
    """One line per violation; where there are many, at least one of every kind and run, and how many there are."""
    lines = [(v["kind"], v["run"], f"VIOLATION {v['kind']} in run {v['run']}: {v['message']}") for v in violations]
    firsts = {(kind, run): line for kind, run, line in reversed(lines)}
    order = [line for _, _, line in lines if line in firsts.values()] + [x for _, _, x in lines if x not in firsts.values()]
    shown = max(SHOWN, len(firsts))
    yield from order[:shown]
    if len(lines) > shown:
        yield f"... {len(lines)} violations in all"
