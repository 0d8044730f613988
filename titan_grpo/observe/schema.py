"""What summary.json holds. One table; the tests and the scripts validate with it."""

import math
from collections.abc import Callable, Mapping
from typing import Any

from titan_grpo.errors import DataError

Rule = tuple[str, Callable[[Any], bool]]


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _optional(value: Any) -> bool:
    return value is None or _number(value)


def _count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _figures(*names: str) -> Rule:
    text = "an object of numbers or null with the keys " + ", ".join(names)
    return (
        text,
        lambda v: (
            isinstance(v, dict) and set(v) == set(names) and all(_optional(x) for x in v.values())
        ),
    )


def _server(value: Any) -> bool:
    if not isinstance(value, dict) or set(value) != {"committed", "last"}:
        return False
    committed, last = value["committed"], value["last"]
    return (
        isinstance(committed, list)
        and all(_count(v) for v in committed)
        and last == (committed[-1] if committed else None)
    )


def _change(value: Any) -> bool:
    if not isinstance(value, dict) or set(value) != {"server", "event", "version"}:
        return False
    return (
        isinstance(value["server"], str)
        and value["event"] in ("joined", "left")
        and isinstance(value["version"], int)
    )


TEXT: Rule = ("a string", lambda v: isinstance(v, str))
NUMBER: Rule = ("a number or null", _optional)
COUNT: Rule = ("an integer, 0 or greater", _count)
TEXTS: Rule = (
    "a list of strings",
    lambda v: isinstance(v, list) and all(isinstance(x, str) for x in v),
)
COUNTS: Rule = (
    "an object of counts",
    lambda v: isinstance(v, dict) and all(_count(x) for x in v.values()),
)
SERVERS: Rule = (
    'an object: server URL -> {"committed": versions in order, "last": the last of them or null}',
    lambda v: isinstance(v, dict) and all(_server(x) for x in v.values()),
)

CHANGES: Rule = (
    (
        'a list of {"server": URL, "event": "joined" or "left", "version": the trainer\'s at that'
        " moment}, in order"
    ),
    lambda v: isinstance(v, list) and all(_change(x) for x in v),
)

SUMMARY: dict[str, Rule] = {
    "run": TEXT,
    "mode": TEXT,
    "steps": COUNT,
    "reward_first": NUMBER,
    "reward_last": NUMBER,
    "reward_window": COUNT,
    "versions_committed": SERVERS,
    "membership": CHANGES,
    "sync_count": COUNT,
    "skipped_versions": COUNT,
    "digest_mismatches": COUNT,
    "blocked_s": _figures("median", "p95"),
    "copy_s": _figures("median", "p95"),
    "send_s": _figures("median", "p95"),
    "verify_s": _figures("median", "p95"),
    "commit_s": _figures("median", "p95"),
    "pause_s": _figures("median", "p95"),
    "step_s": _figures("median", "p95"),
    "steps_per_s": NUMBER,
    "staleness": _figures("mean", "max"),
    "logprob_gap": _figures("mean", "max"),
    "logprob_gap_on_policy": _figures("mean", "max"),
    "dropped": COUNTS,
    "errors": TEXTS,
}
"""Key -> rule. ``*_s`` are seconds; ``dropped`` is groups by reason; a statistic without values is
null."""


def violations(summary: Mapping[str, Any]) -> list[str]:
    """All broken rules, each as one sentence; empty if the summary is whole. Pure."""
    out = [f"{key} is missing" for key in SUMMARY if key not in summary]
    out += [f"{key} is not a key of summary.json" for key in summary if key not in SUMMARY]
    for key, (rule, holds) in SUMMARY.items():
        if key in summary and not holds(summary[key]):
            out.append(f"{key} must be {rule}, got {summary[key]!r}")
    return out


def check(summary: Mapping[str, Any]) -> None:
    """Raise DataError with every broken rule."""
    broken = violations(summary)
    if broken:
        raise DataError(
            "summary.json breaks its schema, so tools that read it would be misled: "
            + "; ".join(broken)
        )
