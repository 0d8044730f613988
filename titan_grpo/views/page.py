"""One self-contained HTML page about a run: its data as JSON in the template page.html."""

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from titan_grpo.observe import names
from titan_grpo.observe.names import short
from titan_grpo.observe.report import duration, ends, median_p95
from titan_grpo.observe.schema import ShownStep
from titan_grpo.views.findings import Facts, facts_of, findings, percent
from titan_grpo.views.run import Array, Run, band, columns, edges
from titan_grpo.views.timeline import timeline

PROMPT_TOKENS = 400
"""Tokens shown of a prompt: its last ones."""

Decode = Callable[[Sequence[int]], str]

TEMPLATE = Path(__file__).with_name("page.html")
MARK = "{{data}}"
"""Placeholder for the data in the template."""

BUCKETS = 400
"""Points of a curve; longer runs are down-sampled to bands."""


@dataclass(frozen=True, slots=True)
class Chart:
    """Curves over steps in one frame."""

    title: str
    unit: str
    curves: tuple[tuple[str, str], ...]
    """(metric, its name in the legend)."""
    spread: str = ""
    """Metric drawn as a band around the first curve."""
    stacked: bool = False
    """Whether curves are parts of a whole, drawn on top of each other."""


CHARTS = (
    Chart("Reward", "", ((names.REWARD, "mean"),), spread=names.REWARD_STD),
    Chart(
        "Time per step",
        "s",
        (
            (names.TRAIN_S, "training"),
            (names.ROLLOUT_WAIT_S, "waiting for rollouts"),
            (names.BLOCKED_S, "blocked by weight sync"),
        ),
        stacked=True,
    ),
    Chart("Staleness", "versions", ((names.STALENESS, "mean"), (names.STALENESS_MAX, "largest"))),
    Chart("Servers behind", "versions", ((names.LAG, "mean"), (names.LAG_MAX, "largest"))),
    Chart(
        "Log-probability gap",
        "nats",
        ((names.LOGPROB_GAP, "all tokens"), (names.ON_POLICY_GAP, "trainer's own version")),
    ),
    *(
        Chart(
            f"Log-probability gap by {what}",
            "nats",
            tuple(
                (names.gap(by, high), "more" if high == math.inf else f"{to}{high:g}")
                for high in names.GAP_PARTS[by]
            ),
        )
        for by, what, to in (
            ("position", "place in the completion", "to "),
            ("probability", "the engine's probability", "to "),
            ("lag", "versions behind", ""),
        )
    ),
    Chart("Completion length", "tokens", ((names.COMPLETION_TOKENS, "mean"),)),
    Chart(
        "Clipped and corrected tokens",
        "share",
        (
            (names.CLIPPED_LOW, "clipped low"),
            (names.CLIPPED_HIGH, "clipped high"),
            (names.IMPORTANCE_CUT, "correction cut"),
            (names.VETOED, "vetoed"),
        ),
    ),
)
"""Charts at the start of every page. Every other metric has its own chart below them."""


def render(run: Run, decode: Decode) -> str:
    """Return the page, which a browser shows without network or other files."""
    data = json.dumps(page_data(run, decode), separators=(",", ":"), allow_nan=False)
    # "</script>" or "<!--" in a text would end or break the data's element
    return TEMPLATE.read_text(encoding="utf-8").replace(MARK, data.replace("<", "\\u003c"))


def page_data(run: Run, decode: Decode) -> dict[str, Any]:
    """Return the page's data as plain JSON."""
    facts = facts_of(run)
    bounds = edges(len(run.rows), BUCKETS)
    shown = {name for chart in CHARTS for name, _ in chart.curves} | {names.REWARD_STD}
    # No curves of servers, which the timeline shows: four for each would be most of the page.
    left_out = (f"{names.SERVER}/", f"{names.EVALUATION}/")
    named = {name for name in set[str]().union(*run.rows) if not name.startswith(left_out)}
    table = columns(run.rows, named | {"step"})
    others = sorted(named - shown - {"step", "time_s"})
    first = [_chart(table, bounds, chart) for chart in CHARTS]
    own = [_chart(table, bounds, Chart(name, "", ((name, name),))) for name in others]
    return {
        "run": run.name,
        "state": _state(run),
        "tiles": list(_tiles(run, facts)),
        "findings": [[finding.level, finding.text] for finding in findings(facts)],
        "waits": _waits(facts),
        "steps": rounded(band(table["step"], bounds).low, 9),
        "charts": [c for c in (*first, *_evaluations(run, bounds)) if c["curves"]],
        "others": [chart for chart in own if chart["curves"]],
        "timeline": timeline(run.trace),
        "completions": completions(run.samples, decode),
    }


def _state(run: Run) -> str:
    if run.summary is not None:
        return "ended early" if run.summary.ended_by else "finished"
    return "ended without a summary" if run.gone else "not finished when this page was made"


def rounded(values: Array | Sequence[float], digits: int = 4) -> list[float | None]:
    """Return numbers with few significant digits for the page's data; None if not finite."""
    out: list[float | None] = []
    for value in np.asarray(values).tolist():
        if not math.isfinite(value):
            out.append(None)
        else:
            short = float(f"{value:.{digits}g}")
            out.append(int(short) if short.is_integer() and abs(short) < 1e15 else short)
    return out


def _chart(
    table: Mapping[str, Array], bounds: npt.NDArray[np.int64], chart: Chart
) -> dict[str, Any]:
    """Return a chart's data, without curves that have no value."""
    curves = []
    for number, (name, label) in enumerate(chart.curves):
        values = table.get(name)
        if values is None or not np.isfinite(values).any():
            continue
        found = band(values, bounds)
        curve: dict[str, Any] = {"label": label, "mean": rounded(found.mean)}
        if values.size >= bounds.size:
            curve |= {"low": rounded(found.low), "high": rounded(found.high)}
        if number == 0 and chart.spread in table:
            around = np.nan_to_num(band(table[chart.spread], bounds).mean)
            curve["spread"] = rounded(around)
        curves.append(curve | {"meaning": names.meaning(name)})
    return {
        "title": chart.title,
        "unit": chart.unit,
        "stacked": chart.stacked,
        "curves": curves,
    }


def _evaluations(run: Run, bounds: npt.NDArray[np.int64]) -> Iterator[dict[str, Any]]:
    """Yield a chart per evaluation: its figures, with confidence intervals, at the steps that began
    from the evaluated versions, and straight lines between. A version that is newer than that of
    every step, as a run's last one, is at the last step, and an older one at the first."""
    places = np.array([row.get(names.VERSION, row["step"] - 1) for row in run.rows], dtype=float)
    for name, curves in evaluated(run).items() if run.rows else ():
        shown = []
        for what, points in curves.items():
            at = {min(max(v, places[0]), places[-1]): point for v, point in points.items()}
            versions = np.array(list(at))
            inside = (places >= versions[0]) & (places <= versions[-1])
            mean, low, high = (
                rounded(band(np.where(inside, np.interp(places, versions, c), np.nan), bounds).mean)
                for c in zip(*at.values(), strict=True)
            )
            text = "mean over prompts with its 95 % confidence interval; in between a straight line"
            shown.append({"label": what, "mean": mean, "low": low, "high": high, "meaning": text})
        yield {"title": f"Evaluation: {name}", "unit": "", "stacked": False, "curves": shown}


Points = dict[int, tuple[float, float, float]]
"""Version -> (value, low, high), rising; without an interval all three are the value."""


def evaluated(run: Run) -> dict[str, dict[str, Points]]:
    """Return evaluation -> figure -> points. A resumed run may have evaluated a version again, the
    last time counts."""
    out: dict[str, dict[str, Points]] = {}
    for found in sorted(run.evaluations, key=lambda each: each.version):
        figures = {"reward": found.reward}
        figures |= {f"pass@{k}": each for k, each in found.passed.items()}
        for what, e in figures.items():
            low, high = (e.value if end is None else end for end in (e.low, e.high))
            out.setdefault(found.name, {}).setdefault(what, {})[found.version] = (
                e.value,
                low,
                high,
            )
    return out


def _tiles(run: Run, facts: Facts) -> Iterator[list[str]]:
    """Yield the figures at the top: [title, figure]."""
    yield ["steps", str(run.rows[-1]["step"] if run.rows else 0)]
    yield ["time", duration(run.trace.seconds)]
    # Of all steps, as in summary.json; the findings leave out each process's first.
    step = median_p95([row[names.STEP_S] for row in run.rows if row.get(names.STEP_S) is not None])
    if step.median is not None:
        yield ["median step", duration(step.median)]
    rewards = [row[names.REWARD] for row in run.rows if row.get(names.REWARD) is not None]
    first, last, _ = ends(rewards)
    if first is not None and last is not None:
        yield ["reward", f"{first:.3g} → {last:.3g}"]
    yield ["servers", str(len(facts.servers))]
    yield ["commits", str(sum(server.commits for server in facts.servers))]
    if facts.step_s:
        yield ["waiting for rollouts", percent(facts.waited_s / facts.step_s)]
        yield ["blocked by weight sync", percent(facts.blocked_s / facts.step_s)]


def _waits(facts: Facts) -> list[list[Any]]:
    """Return who waited for what: [who, for what, seconds, share of its time]."""
    waits: list[tuple[str, str, float, float]] = []
    if facts.step_s:
        waits.append(("trainer", "rollouts", facts.waited_s, facts.step_s))
        waits.append(("trainer", "weight sync", facts.blocked_s, facts.step_s))
    for server in facts.servers:
        url, of = short(server.url), server.served_s
        waits.append((url, "loading a version (generation stands still)", server.pause_s, of))
        if server.drain_s:
            waits.append((f"commits of {url}", "its requests to finish", server.drain_s, of))
        versions = f"versions for {url}"
        waits.append((versions, "their transfer (generation goes on)", server.send_s, of))
        if server.held_s:
            waits.append((versions, "evaluations there (generation goes on)", server.held_s, of))
    return [[who, what, *rounded([s, s / of if of else 0.0])] for who, what, s, of in waits]


def decoder(folders: Sequence[Path]) -> Decode:
    """Return a decoder with the first tokenizer.json in ``folders``. Without one that can be read,
    or without the package tokenizers, it shows ids as numbers."""
    path = next((f / "tokenizer.json" for f in folders if (f / "tokenizer.json").is_file()), None)
    try:
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_file(str(path)) if path else None
    except Exception:  # noqa: BLE001 - the boundary to a library, which raises no narrower one
        tokenizer = None
    if tokenizer is None:
        return lambda ids: "".join(f"⟨{token}⟩" for token in ids)
    return lambda ids: str(tokenizer.decode(list(ids), skip_special_tokens=False))


def tokenizers_of(run: Run, folder: Path) -> list[Path]:
    """Return where a run's tokenizer may be: where the run found it, last first, or beside its
    trained weights."""
    found = dict.fromkeys(Path(step.tokenizer) for step in reversed(run.samples))
    return [*found, folder / "hf"]


def pieces(ids: Sequence[int], decode: Decode) -> list[str]:
    """Return one text per token; together they are the decoded whole.

    The text of some tokens depends on their neighbours (parts of a character, words that get a
    space from the word before), so each token's text is what it adds to the decoded text. Parts of
    a character belong to the token that completes it.
    """
    out = []
    known = done = 0
    for end in range(1, len(ids) + 1):
        before, whole = decode(ids[known:done]), decode(ids[known:end])
        if whole.endswith("\ufffd") and end < len(ids):
            out.append("")
        else:
            out.append(whole[len(before) :])
            known, done = done, end
    return out


def completions(steps: Sequence[ShownStep], decode: Decode) -> list[dict[str, Any]]:
    """Return the completions for the page; ``tokens`` are [text, gap in thousandths of a nat or
    None]."""
    return [
        {
            "step": step.step,
            "reward": float(f"{c.reward:.4g}"),
            "first": c.version_first,
            "last": c.version_last,
            "stale": step.version - c.version_first,
            "server": short(c.server),
            "gap": float(f"{c.gap:.4g}"),
            "prompt": decode(c.prompt[-PROMPT_TOKENS:]),
            "tokens": [
                [text, None if own is None else round(abs(own - engine) * 1000)]
                for text, own, engine in zip(
                    pieces(c.tokens, decode), c.trainer, c.engine, strict=True
                )
            ],
        }
        for step in steps
        for c in step.completions
    ]
