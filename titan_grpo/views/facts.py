"""The figures of a run that its findings are made of. Pure."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from titan_grpo.observe import names
from titan_grpo.views.findings import Facts, Step
from titan_grpo.views.run import Run, columns, in_order
from titan_grpo.views.timeline import figures


def facts_of(run: Run) -> Facts:
    """Compute them."""
    starts = {1, *(run.summary.resumes if run.summary else ())}
    rows = [row for row in run.rows if row["step"] not in starts and row.get(names.STEP_S)]
    steps = [_step(row) for row in rows]
    window = max(1, len(run.rows) // 5)
    skipped = sum(i.name == "version skipped" for i in run.trace.instants)
    errors = [i.text for i in run.trace.instants if i.name == "error"]
    s = run.summary
    urls = {*run.trace.servers, *(s.versions_committed if s else ())}
    return Facts(
        steps=len(steps),
        step_s=sum(step.step_s for step in steps),
        waited_s=sum(step.waited_s for step in steps),
        blocked_s=sum(step.blocked_s for step in steps),
        trained_s=sum(row.get(names.TRAIN_S) or 0.0 for row in rows),
        median_step_s=float(np.median([step.step_s for step in steps])) if steps else 0.0,
        longest=max(steps, key=lambda step: step.step_s, default=None),
        first=_means(run.rows[:window]),
        last=_means(run.rows[-window:]),
        servers=tuple(figures(run.trace, url) for url in in_order(urls)),
        skipped_versions=s.skipped_versions if s else skipped,
        digest_mismatches=s.digest_mismatches if s else 0,
        dropped=s.dropped if s else {},
        errors=tuple(s.errors if s else errors),
    )


def _step(row: dict[str, Any]) -> Step:
    waited, blocked = row.get(names.ROLLOUT_WAIT_S) or 0.0, row.get(names.BLOCKED_S) or 0.0
    return Step(row["step"], row[names.STEP_S], waited, blocked)


def _means(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Of what concerns the whole run: a server's values are most of a line, and in no finding."""
    shared = [n for n in set[str]().union(*rows) if not n.startswith(f"{names.SERVER}/")]
    known = {name: each[~np.isnan(each)] for name, each in columns(rows, shared).items()}
    return {name: float(np.mean(each)) for name, each in known.items() if each.size}
