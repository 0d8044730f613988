"""The results of a run: summary.json, a table and a plot; and a step's progress line."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from titan_grpo.errors import NOT_JSON, utf8_text
from titan_grpo.observe import names
from titan_grpo.observe.output import write_whole
from titan_grpo.observe.recorder import SUMMARY, Recorder, newest_rows
from titan_grpo.observe.schema import MeanMax, MedianP95, Server, Summary
from titan_grpo.observe.terminal import aligned

_TIMES = {
    name.rpartition("/")[2]: name
    for name in (
        *(names.BLOCKED_S, names.COPY_S, names.SEND_S, names.VERIFY_S, names.COMMIT_S),
        *(names.PAUSE_S, names.STEP_S, names.SYNC_S, names.CONNECT_S, names.DIGEST_S),
        names.DRAIN_S,
    )
}
_COUNTS = {
    "sync_count": names.SYNC_COUNT,
    "skipped_versions": names.SKIPPED_VERSIONS,
    "digest_mismatches": names.DIGEST_MISMATCHES,
    "sync_bytes": names.SYNC_BYTES,
    "relayed_bytes": names.RELAYED_BYTES,
    "spared_bytes": names.SPARED_BYTES,
    "sync_failures": names.SYNC_FAILURES,
    "quarantines": names.QUARANTINES,
    "skipped_optimizer_steps": names.UNHEALTHY_STEPS,
    "requests": names.REQUESTS,
    "outages": names.OUTAGES,
}
_SPREADS = {
    "staleness": (names.STALENESS, names.STALENESS_MAX),
    "logprob_gap": (names.LOGPROB_GAP, names.LOGPROB_GAP_MAX),
    "logprob_gap_on_policy": (names.ON_POLICY_GAP, names.ON_POLICY_GAP_MAX),
}


def finite(values: Sequence[float]) -> npt.NDArray[np.float64]:
    """Return the finite values: one NaN does not hide the rest."""
    series = np.array(values, dtype=np.float64)
    return series[np.isfinite(series)]


def median_p95(values: Sequence[float]) -> MedianP95:
    """Return both figures of the finite values; None without any."""
    if not (series := finite(values)).size:
        return MedianP95(None, None)
    return MedianP95(*map(float, np.quantile(series, (0.5, 0.95))))


def mean_max(means: Sequence[float], largest: Sequence[float]) -> MeanMax:
    """Return the mean of the steps' means, and the maximum of their largest values; None without
    any."""
    one, other = finite(means), finite(largest)
    return MeanMax(
        float(one.mean()) if one.size else None, float(other.max()) if other.size else None
    )


def ends(values: list[float]) -> tuple[float | None, float | None, int]:
    """Return the mean over the first and over the last values of a series, and their number: a
    fifth of the series, 1 to 5, since single steps are noisy. (None, None, 0) without values.

    Example: 60 rewards give the means of steps 1 to 5 and 56 to 60; 4 give the first and the last.
    """
    if not values:
        return None, None, 0
    window = max(1, min(5, len(values) // 5))
    return float(np.mean(values[:window])), float(np.mean(values[-window:])), window


def summarize(recorder: Recorder, run: str, mode: str, ended_by: str = "") -> Summary:
    """Return the content of summary.json; ``mode`` is "async" or "sync"."""
    rows, history, series = recorder.rows(), recorder.history(), recorder.values
    totals, resumes = history.totals, set(history.resumes)
    # The first step of a process has no predecessor on its clock.
    steps = [(a, b) for a, b in pairwise(rows) if b["step"] not in resumes]
    seconds = sum(b["time_s"] - a["time_s"] for a, b in steps)
    # By time: the mean of the steps' rates would count a burst in a short step as much as a long
    # step without one.
    rated = [(_took(b) - _took(a), b[names.GENERATED]) for a, b in steps if b.get(names.GENERATED)]
    rated_s = sum(_took(b) - _took(a) for a, b in steps)
    first, last, window = ends(recorder.series(names.REWARD))
    prefix = names.dropped("")
    figures: dict[str, Any] = {key: int(totals[name]) for key, name in _COUNTS.items()}
    figures |= {key: median_p95(series(name)) for key, name in _TIMES.items()}
    figures |= {key: mean_max(*map(series, pair)) for key, pair in _SPREADS.items()}
    return Summary(
        run=run,
        mode=mode,
        steps=len(rows),
        resumes=history.resumes,
        reward_first=first,
        reward_last=last,
        reward_window=window,
        versions_committed={
            server: Server(versions, versions[-1] if versions else None)
            for server, versions in history.commits.items()
        },
        membership=history.membership,
        generated_tokens_per_s=sum(s * rate for s, rate in rated) / rated_s
        if rated and rated_s > 0
        else None,
        steps_per_s=len(steps) / seconds if seconds > 0 else None,
        dropped={
            name.removeprefix(prefix): int(n)
            for name, n in totals.items()
            if name.startswith(prefix)
        },
        evaluations=history.evaluations,
        lengths={kind: _lengths(totals, kind) for kind in ("made", "trained")},
        errors=history.errors,
        quantised={url: method for url, method in history.quantised.items() if method},
        last_step=recorder.last_row() or next(newest_rows(recorder.metrics_path), {}),
        ended_by=utf8_text(ended_by),
        **figures,
    )


def _took(row: Mapping[str, Any]) -> float:
    """Return when a step took its groups: its rate of generated tokens is of the time between that
    of the step before and its own."""
    waited_s = (row.get(names.ROLLOUT_WAIT_S) or 0.0) - (row.get(names.STEP_S) or 0.0)
    return float(row["time_s"] + waited_s)


def _lengths(totals: Mapping[str, float], kind: str) -> dict[str, int]:
    prefix = names.lengths(kind, "")
    found = {int(n.removeprefix(prefix)): int(t) for n, t in totals.items() if n.startswith(prefix)}
    return {str(longest): found[longest] for longest in sorted(found)}


def _shares(counts: Mapping[str, int]) -> str:
    """Format shares by length: ``{"4": 1, "8": 3}`` gives ``"25 % to 4, 75 % to 8 tokens"``."""
    total = sum(counts.values())
    parts = (f"{n / total:.0%} to {longest}".replace("%", " %") for longest, n in counts.items())
    return f"{', '.join(parts)} tokens" if total else "-"


def write_report(recorder: Recorder, run: str, mode: str, ended_by: str = "") -> Summary:
    """Close the recorder, write summary.json and reward.png, and return the summary. Files that
    cannot be written are among its errors."""
    recorder.close()
    # Once, and of what is in memory: torchrun kills a run 30 s after a signal, however long it was.
    summary = summarize(recorder, run, mode, ended_by)
    try:
        text = msgspec.json.format(msgspec.json.encode(summary))
        write_whole(recorder.run_dir / SUMMARY, text.decode() + "\n")
        plot_rewards(recorder.rows(), recorder.run_dir / "reward.png")
    except OSError as error:
        recorder.error(f"the report in {recorder.run_dir} is not whole: {error.strerror}")
        summary.errors = recorder.history().errors
    return summary


def came_to_its_end(run_dir: Path) -> bool:
    """Return whether the folder's summary.json tells of a run that nothing ended early."""
    try:
        text = (run_dir / SUMMARY).read_bytes()
        return not msgspec.json.decode(text, type=Summary).ended_by
    except (OSError, *NOT_JSON):
        return False


def plot_rewards(rows: Sequence[Mapping[str, Any]], out: Path) -> None:
    """Plot reward over steps, if any row has one."""
    points = [(row["step"], row[names.REWARD]) for row in rows if row.get(names.REWARD) is not None]
    if not points:
        return
    # Imported here: it takes a second, and engine environments lack matplotlib.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot(xlabel="step", ylabel="mean reward", title="Reward")
    axes.plot(*zip(*points, strict=True), marker=".")
    axes.grid(visible=True, alpha=0.3)
    figure.savefig(out, dpi=120)


def duration(seconds: float | None) -> str:
    """Format a duration; None -> "-".

    Example: 0.0123 -> "12.3 ms", 1.5 -> "1.5 s", 125 -> "2 min 5 s", 7260 -> "2 h 1 min".
    """
    if seconds is None:
        return "-"
    if seconds < 0.9995:
        return f"{seconds * 1e3:.3g} ms"
    if seconds < 99.95:
        return f"{seconds:.3g} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def number(value: float | None, form: str = ".4g") -> str:
    """Format a figure: four significant digits, None -> "-"."""
    return "-" if value is None else f"{value:{form}}"


RULER = 80
"""Most characters of the line under a table's title: one of its texts may be an error."""


def table(rows: list[tuple[str, str]], title: str) -> str:
    """Align two columns under a title.

    Example: ``table([("steps", "60")], "run")`` has the lines ``run``, ``---------`` and
    ``steps  60``.
    """
    lines = aligned(rows)
    ruler = "-" * min(max(len(line) for line in [title, *lines]), RULER)
    return "\n".join([title, ruler, *lines])


LAST_ERRORS, LAST_ROWS = 5, 20
"""Errors, and rows of another kind, that a run's table shows: one of weeks has thousands."""


def _last(what: str, rows: list[tuple[str, str]], limit: int = LAST_ROWS) -> list[tuple[str, str]]:
    """Return the last rows of a kind, with the number of all if they are more."""
    text = f"{len(rows)}, all in summary.json; the last {limit}:"
    return [*([(what, text)] if rows[limit:] else []), *rows[-limit:]]


def final_table(s: Summary) -> str:
    """Format a summary for the terminal."""
    reward = f"{number(s.reward_first)} -> {number(s.reward_last)}"
    steps, skipped = s.reward_window, s.skipped_versions
    window = "first and last step" if steps == 1 else f"means of {steps} steps"
    dropped = ", ".join(f"{n} {reason}" for reason, n in s.dropped.items() if n)
    rows = [
        ("steps", f"{s.steps}  ({number(s.steps_per_s)} per second)"),
        *(("ended by", why) for why in [s.ended_by] if why),
        *_last("resumes", [("resumed", f"at step {step}") for step in s.resumes]),
        ("reward", f"{reward}  ({window})"),
        ("syncs", f"{s.sync_count} committed, {skipped} version{'s' * (skipped != 1)} skipped"),
        ("digest mismatches", str(s.digest_mismatches)),
        ("sync failures", f"{s.sync_failures}, {s.quarantines} quarantines"),
        ("sent", f"{s.sync_bytes / 2**20:.1f} MiB to all servers"),
        *(("of these relayed", f"{n / 2**20:.1f} MiB") for n in [s.relayed_bytes] if n),
        *(("spared by patches", f"{n / 2**20:.1f} MiB") for n in [s.spared_bytes] if n),
        ("generated", f"{number(s.generated_tokens_per_s)} tokens per second"),
    ]
    if skipped := s.skipped_optimizer_steps:
        rows.append(("skipped optimizer steps", str(skipped)))
    for server, v in s.versions_committed.items():
        last = "-" if v.last is None else v.last
        count = len(set(v.committed))  # a server that restarted commits one again
        rows.append((server, f"{count} version{'s' * (count != 1)}, last {last}"))
    rows += [(url, f"quantised: {method}") for url, method in s.quantised.items()]
    changes = [(m.server, f"{m.event} at version {m.version}") for m in s.membership]
    rows += _last("servers joined and left", changes)
    for key in _TIMES:
        times: MedianP95 = getattr(s, key)
        if times.median is not None:
            figures = f"median {duration(times.median)}, p95 {duration(times.p95)}"
            rows.append((f"{key.removesuffix('_s')} time", figures))
    for key in _SPREADS:
        spread: MeanMax = getattr(s, key)
        figures = f"mean {number(spread.mean)}, max {number(spread.max)}"
        rows.append((key.replace("_", " "), figures))
    rows.append(("dropped groups", dropped or "none"))
    rows += [(f"lengths {kind}", _shares(counts)) for kind, counts in s.lengths.items()]
    results = []
    for found in s.evaluations:
        passed = "".join(f", pass@{k} {number(e.value)}" for k, e in found.passed.items())
        text = f"version {found.version}: reward {number(found.reward.value)}{passed}"
        results.append((f"evaluation {found.name}", text))
    rows += _last("evaluations", results)
    rows += _last("errors", [("error", text) for text in s.errors], LAST_ERRORS)
    if not s.errors and not s.ended_by:
        rows.append(("errors", "none"))
    return table(rows, f"{s.run} ({s.mode})")


def held_by(versions: Mapping[str, int | None]) -> str:
    """Return what each server holds (None: unknown) as the end of a progress line; empty without
    servers.

    >>> held_by({"http://a:8000": 3, "http://b:8000": None})
    '  versions a:8000=3 b:8000=?'
    """
    found = [f"{names.short(url)}={'?' if v is None else v}" for url, v in versions.items()]
    return f"  versions {' '.join(found)}" if found else ""


def progress_line(
    step: int, last_step: int, metrics: Mapping[str, float], versions: Mapping[str, int | None]
) -> str:
    """Format a step for the terminal. ``versions`` is what each server holds (None: unknown).

    Example (one line)::

        step 12/60  reward 0.431  stale 1  blocked 2.1 ms  step 612 ms  gap 0.003
        versions 127.0.0.1:8000=11
    """
    parts = [
        f"step {step:>{len(str(last_step))}}/{last_step}",
        f"reward {number(metrics.get(names.REWARD), '.3f')}",
        f"stale {number(metrics.get(names.STALENESS_MAX))}",
        f"blocked {duration(metrics.get(names.BLOCKED_S))}",
        f"step {duration(metrics.get(names.STEP_S))}",
        f"gap {number(metrics.get(names.LOGPROB_GAP), '.3f')}",
    ]
    return "  ".join(parts) + held_by(versions)
