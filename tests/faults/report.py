"""What the fault matrix found, as a table for people and as JSON for programs. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from tests.faults.cases import MEANING, Case, reasons
from tests.faults.judge import NOTHING, Ratio

PASSED, FAILED, SKIPPED = "passed", "FAILED", "skipped"


@dataclass(slots=True)
class Result:
    """How one case ended. ``steps`` and ``lag``: with the fault over without; ``recovery_s``: from
    the fault's end to HOLDS."""

    case: Case
    violations: list[str] = field(default_factory=list)
    steps: Ratio = NOTHING
    lag: Ratio = NOTHING
    behind: float | None = None
    recovery_s: float | None = None
    notes: list[str] = field(default_factory=list)
    skipped: str = ""
    seconds: float = 0.0

    @property
    def verdict(self) -> str:
        if self.violations:
            return FAILED
        return SKIPPED if self.skipped else PASSED

    @property
    def note(self) -> str:
        """What there is to say."""
        return "; ".join([*self.violations, *([self.skipped] if self.skipped else []), *self.notes])

    def to_json(self) -> dict[str, Any]:
        """JSON-able."""
        c = self.case
        return {
            "case": c.name,
            "who": c.who.value,
            "point": c.point.value,
            "kind": c.kind.value,
            "meaning": MEANING[c.kind],
            "occurrence": c.occurrence,
            "verdict": self.verdict,
            "violations": self.violations,
            "step_ratio": asdict(self.steps) if self.steps.enough else None,
            "lag_ratio": asdict(self.lag) if self.lag.enough else None,
            "versions_behind": self.behind,
            "recovery_s": self.recovery_s,
            "notes": self.notes,
            "skipped": self.skipped,
            "seconds": self.seconds,
        }


HEAD = (
    f"{'case':<28}{'who':<10}{'point':<11}{'kind':<9}{'verdict':<9}"
    f"{'step':>7}{'lag':>7}{'recov. s':>9}"
    "  note"
)


def line(result: Result) -> str:
    """One row of the table."""
    c = result.case
    recovery = "-" if result.recovery_s is None else f"{result.recovery_s:.2f}"
    start = f"{c.name:<28}{c.who.value:<10}{c.point.value:<11}{c.kind.value:<9}{result.verdict:<9}"
    return f"{start}{result.steps!s:>7}{result.lag!s:>7}{recovery:>9}  {result.note}".rstrip()


def outcome(results: Sequence[Result], extra: Mapping[str, Any]) -> dict[str, Any]:
    """Everything as one JSON-able object. ``extra``: at least the ``engine``."""
    found = reasons(extra["engine"])
    senseless = [
        {"who": w.value, "point": p.value, "kind": k.value, "reason": why}
        for (w, p, k), why in found.items()
    ]
    counts = {
        verdict: sum(r.verdict == verdict for r in results) for verdict in (PASSED, FAILED, SKIPPED)
    }
    return {
        "passed": counts[FAILED] == 0 and bool(results),
        "counts": {"passed": counts[PASSED], "failed": counts[FAILED], "skipped": counts[SKIPPED]},
        **extra,
        "cases": [r.to_json() for r in results],
        "no_case": senseless,
    }


def table(results: Sequence[Result]) -> str:
    """All rows, and what the columns mean."""
    legend = (
        "(step: the trainer's median step with the fault over without it; lag: the other server's,"
        " publish to commit)"
    )
    return "\n".join([HEAD, *(line(r) for r in results), legend])


def summary(results: Sequence[Result], seconds: float, wanted: int) -> str:
    failed = sum(r.verdict == FAILED for r in results)
    skipped = sum(r.verdict == SKIPPED for r in results)
    torn = sum(
        "half loaded" in v or "are not the trainer's" in v for r in results for v in r.violations
    )
    paused = sum("left paused" in v for r in results for v in r.violations)
    state = "PASSED" if not failed and results and len(results) == wanted else "FAILED"
    counts = (
        f"{len(results)} of {wanted} cases, {len(results) - failed - skipped} passed, {failed}"
        f" failed, {skipped} skipped"
    )
    return f"{state}: {counts}; {torn} torn or wrong, {paused} left paused; {seconds:.0f} s"
