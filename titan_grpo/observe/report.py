"""What a run leaves behind: summary.json, a table, a plot; and the progress line of a step."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from titan_grpo.observe import names, schema
from titan_grpo.observe.recorder import Recorder, read_metrics
from titan_grpo.observe.statistics import describe, ends

_TIMES = {
    "blocked_s": names.BLOCKED_S,
    "copy_s": names.COPY_S,
    "send_s": names.SEND_S,
    "verify_s": names.VERIFY_S,
    "commit_s": names.COMMIT_S,
    "pause_s": names.PAUSE_S,
    "step_s": names.STEP_S,
}


def summarize(recorder: Recorder, run: str, mode: str) -> dict[str, Any]:
    """The content of summary.json from what the recorder saw (see
    :data:`titan_grpo.observe.schema.SUMMARY`).

    ``mode`` is "async" or "sync". ``steps_per_s`` counts the intervals between the ends of the
    first and the last step, so it leaves out start-up and the first step, which compiles and
    connects.
    """
    steps, times = recorder.steps()
    totals = recorder.totals()
    first, last, window = ends(recorder.series(names.REWARD))
    elapsed = times[-1] - times[0] if len(times) > 1 else 0.0
    prefix = names.dropped("")
    return {
        "run": run,
        "mode": mode,
        "steps": len(steps),
        "reward_first": first,
        "reward_last": last,
        "reward_window": window,
        "versions_committed": {
            server: {"committed": versions, "last": versions[-1] if versions else None}
            for server, versions in recorder.commits().items()
        },
        "membership": [
            {"server": server, "event": event, "version": version}
            for server, event, version in recorder.membership()
        ],
        "sync_count": int(totals.get(names.SYNC_COUNT, 0)),
        "skipped_versions": int(totals.get(names.SKIPPED_VERSIONS, 0)),
        "digest_mismatches": int(totals.get(names.DIGEST_MISMATCHES, 0)),
        **{key: recorder.statistics(name).pick("median", "p95") for key, name in _TIMES.items()},
        "steps_per_s": (len(times) - 1) / elapsed if elapsed > 0 else None,
        "staleness": _mean_and_max(recorder, names.STALENESS, names.STALENESS_MAX),
        "logprob_gap": _mean_and_max(recorder, names.LOGPROB_GAP, names.LOGPROB_GAP_MAX),
        "logprob_gap_on_policy": _mean_and_max(
            recorder, names.ON_POLICY_GAP, names.ON_POLICY_GAP_MAX
        ),
        "dropped": {
            name.removeprefix(prefix): int(n)
            for name, n in totals.items()
            if name.startswith(prefix)
        },
        "errors": recorder.errors(),
    }


def _mean_and_max(recorder: Recorder, mean_name: str, max_name: str) -> dict[str, float | None]:
    # Every step consumes the same number of groups, so the mean of the steps' means is the mean
    # over groups.
    return {
        "mean": describe(recorder.series(mean_name)).mean,
        "max": describe(recorder.series(max_name)).max,
    }


def write_json(path: Path, content: Any) -> None:
    """Write a file whole or not at all: a reader, or a kill, never meets half of it."""
    draft = path.with_name(path.name + ".partial")
    draft.write_text(json.dumps(content, indent=2, sort_keys=False) + "\n")
    os.replace(draft, path)


def write_summary(run_dir: Path | str, summary: Mapping[str, Any]) -> Path:
    """Validate and write summary.json. Raises DataError if the summary breaks its schema."""
    schema.check(summary)
    path = Path(run_dir) / "summary.json"
    write_json(path, dict(summary))
    return path


def write_report(recorder: Recorder, run: str, mode: str) -> dict[str, Any]:
    """End of a run: close the recorder, write summary.json and reward.png, return the summary."""
    recorder.close()
    summary = summarize(recorder, run, mode)
    write_summary(recorder.run_dir, summary)
    if recorder.metrics_path.exists():
        plot_rewards(recorder.metrics_path, recorder.run_dir / "reward.png")
    return summary


def plot_rewards(metrics: Path, out: Path) -> bool:
    """Reward over steps as a PNG, from metrics.jsonl (so a resumed run shows the whole curve).
    False if there is nothing."""
    points = [
        (row["step"], row[names.REWARD])
        for row in read_metrics(metrics)
        if row.get(names.REWARD) is not None
    ]
    if not points:
        return False
    # Imported here because only the end of a run draws: it takes a second, and the servers'
    # environment has no matplotlib.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot(xlabel="step", ylabel="mean reward", title="Reward")
    axes.plot([step for step, _ in points], [reward for _, reward in points], marker=".")
    axes.grid(visible=True, alpha=0.3)
    figure.savefig(out, dpi=120)
    return True


def seconds(value: float | None) -> str:
    """A duration for people: ``0.0123 -> "12.3 ms"``, ``1.5 -> "1.50 s"``, None -> "-"."""
    if value is None:
        return "-"
    return f"{value:.2f} s" if value >= 1 else f"{value * 1e3:.1f} ms"


def number(value: float | None) -> str:
    """A figure for people: four significant digits, None -> "-"."""
    return "-" if value is None else f"{value:.4g}"


def table(rows: list[tuple[str, str]], title: str) -> str:
    """Two aligned columns under a title.

    Example: ``table([("steps", "60")], "run")`` gives the lines ``run``, ``---------`` and ``steps  60``.
    """
    width = max((len(name) for name, _ in rows), default=0)
    lines = [f"{name:<{width}}  {text}" for name, text in rows]
    return (
        "\n".join([title, "-" * max(len(title), *(len(line) for line in lines)), *lines])
        if lines
        else title
    )


def final_table(summary: Mapping[str, Any]) -> str:
    """The table that a run prints at its end, from a summary."""
    s = summary
    rows = [
        ("steps", f"{s['steps']}  ({number(s['steps_per_s'])} per second)"),
        (
            "reward",
            (
                f"{number(s['reward_first'])} -> {number(s['reward_last'])}  (means of"
                f" {s['reward_window']} steps)"
            ),
        ),
        ("syncs", f"{s['sync_count']} committed, {s['skipped_versions']} versions skipped"),
        ("digest mismatches", str(s["digest_mismatches"])),
    ]
    rows += [
        (server, f"{len(v['committed'])} versions, last {'-' if v['last'] is None else v['last']}")
        for server, v in s["versions_committed"].items()
    ]
    rows += [(m["server"], f"{m['event']} at version {m['version']}") for m in s["membership"]]
    rows += [
        (
            f"{key.removesuffix('_s')} time",
            f"median {seconds(s[key]['median'])}, p95 {seconds(s[key]['p95'])}",
        )
        for key in _TIMES
    ]
    rows += [
        (key.replace("_", " "), f"mean {number(s[key]['mean'])}, max {number(s[key]['max'])}")
        for key in ("staleness", "logprob_gap", "logprob_gap_on_policy")
    ]
    rows += [
        (
            "dropped groups",
            ", ".join(f"{n} {reason}" for reason, n in s["dropped"].items()) or "none",
        )
    ]
    rows += [("error", text) for text in s["errors"]] or [("errors", "none")]
    return table(rows, f"{s['run']} ({s['mode']})")


def progress_line(
    step: int, last_step: int, metrics: Mapping[str, float], versions: Mapping[str, int | None]
) -> str:
    """One line for the terminal at the end of a step.

    ``versions`` is what each server holds (None: unknown). Example::

        step  12/60  reward 0.431  stale 1  blocked 2.1 ms  step 612.0 ms  gap 0.003  versions
        127.0.0.1:8000=11
    """
    held = " ".join(
        f"{url.split('://')[-1].rstrip('/')}={'?' if v is None else v}"
        for url, v in versions.items()
    )
    parts = [
        f"step {step:>{len(str(last_step))}}/{last_step}",
        f"reward {_fixed(metrics.get(names.REWARD))}",
        f"stale {number(metrics.get(names.STALENESS_MAX))}",
        f"blocked {seconds(metrics.get(names.BLOCKED_S))}",
        f"step {seconds(metrics.get(names.STEP_S))}",
        f"gap {_fixed(metrics.get(names.LOGPROB_GAP))}",
    ]
    return "  ".join(parts + ([f"versions {held}"] if held else []))


def _fixed(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
