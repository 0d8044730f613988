"""What a soak has seen, and whether it passes. Pure: numbers in, verdicts out."""

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from tests.rigs.census import Holdings
from tests.rigs.trainer_handle import Step
from titan_grpo.protocol.messages import Label

FLAT = 0.05
"""Memory may grow by this share between the end of the warm-up and the end."""

STALL_S = 0.5
"""A step that waited longer waited for a server: half of a lane's deadline in a soak. A machine's
noise is shorter."""

JUDGED_CALMS = 10
"""Memory is judged with this many measurements or more: a short run has not warmed up."""

WARM_UP = 0.2
"""Share of the measurements that count as warm-up."""

SLACK = {"fds": 3, "memfds": 0, "threads": 2}
"""What a process may hold more at the end than after the warm-up: connections that happen to be
open or idle."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """One line of the table."""

    what: str
    figure: str
    demanded: str
    ok: bool


@dataclass
class Seen:
    """Everything that a run has shown; filled by the harness."""

    run_id: str = ""
    digests: dict[int, str] = field(default_factory=dict)
    """Version -> digest of what the trainer held, of every published version."""
    visible: dict[str, list[tuple[str, str]]] = field(default_factory=dict)
    """URL -> (label, digest) in the order in which requests could meet them, over all restarts."""
    steps: list[Step] = field(default_factory=list)
    errors: int = 0
    late: list[str] = field(default_factory=list)
    """Servers that did not hold the newest version in time after faults had ceased, one line
    each."""
    paused: list[str] = field(default_factory=list)
    wrong_now: list[str] = field(default_factory=list)
    strangers: list[str] = field(default_factory=list)
    """Processes that no owner accounts for at a calm moment, or that are left at the end."""
    shm_left: list[str] = field(default_factory=list)
    calms: list[dict[str, Holdings]] = field(default_factory=list)
    """One per calm version: role -> what the process of that role holds."""
    recoveries: list[float] = field(default_factory=list)
    """Seconds from the end of the last fault to the newest version everywhere, one per calm
    version."""
    final: list[str] = field(default_factory=list)
    """Why the end is not as it must be."""


def mismatches(seen: Seen) -> list[str]:
    """What requests could meet and is not, bit for bit, a version of the trainer under its own
    label.

    A server's own weights under its own label, before the first version, are its own business.
    """
    wrong = []
    for url, visible in seen.visible.items():
        for text, digest in visible:
            label = Label.parse(text)
            if label is None:
                wrong += [f"{url} served under the label {text!r}"] if text != "default" else []
            elif label.run_id != seen.run_id or seen.digests.get(label.version) != digest:
                wrong.append(
                    f"{url} served {digest[:8]} as {text}, the trainer held"
                    f" {seen.digests.get(label.version, '?')[:8]}"
                )
    return wrong


def went_back(visible: Sequence[tuple[str, str]]) -> list[str]:
    """Labels of one server, over all restarts, that follow one of a newer version."""
    newest, out = -1, []
    for text, _ in visible:
        label = Label.parse(text)
        if label is not None:
            out += [text] if label.version < newest else []
            newest = max(newest, label.version)
    return out


def growth(values: Sequence[int]) -> tuple[float, float]:
    """Medians of the window after the warm-up and of the last window of the same length.

    Worked example: 10 values; the first 2 are warm-up, the next 4 are compared with the last 4.
    """
    first = int(len(values) * WARM_UP)
    length = max(1, (len(values) - first) // 2)
    return statistics.median(values[first : first + length]), statistics.median(values[-length:])


def _column(seen: Seen, role: str, what: str) -> list[int]:
    return [getattr(calm[role], what) for calm in seen.calms if role in calm]


def _roles(seen: Seen) -> list[str]:
    return sorted({role for calm in seen.calms for role in calm})


def _count(what: str, found: Sequence[str], demanded: str = "0") -> Verdict:
    return Verdict(what, f"{len(found)}" + (f": {found[0]}" if found else ""), demanded, not found)


def judge_memory(seen: Seen) -> list[Verdict]:
    """Resident memory per role; figures only, if the run is short."""
    out = []
    judged = len(seen.calms) >= JUDGED_CALMS
    for role in _roles(seen):
        warm, end = growth(_column(seen, role, "rss"))
        pss_warm, pss_end = growth(_column(seen, role, "pss"))
        share = (end - warm) / warm
        figure = (
            f"{warm / 2**20:.1f} -> {end / 2**20:.1f} MiB ({share:+.1%}); PSS"
            f" {pss_warm / 2**20:.1f} -> {pss_end / 2**20:.1f}"
        )
        demanded = f"within {FLAT:.0%}" if judged else "not judged in a short run"
        out.append(Verdict(f"memory, {role}", figure, demanded, not judged or share <= FLAT))
    return out


def judge_handles(seen: Seen) -> list[Verdict]:
    """Descriptors, shared memory and threads per role."""
    out = []
    for role in _roles(seen):
        parts, ok = [], True
        for what, slack in SLACK.items():
            warm, end = growth(_column(seen, role, what))
            parts.append(f"{what} {warm:g} -> {end:g}")
            ok = ok and end - warm <= slack
        out.append(Verdict(f"handles, {role}", ", ".join(parts), "none left behind", ok))
    return out


def judge_stalls(seen: Seen) -> Verdict:
    """Steps that waited for a server; what they lost to the machine is no wait."""
    waits, blocked = [s.waited for s in seen.steps], [s.blocked for s in seen.steps]
    stalls = sum(wait > STALL_S for wait in waits)
    figure = (
        f"{stalls} over {1e3 * STALL_S:.0f} ms; longest wait {1e3 * max(waits):.1f} ms;"
        f" in the sync: median {1e3 * statistics.median(blocked):.1f} ms,"
        f" longest {1e3 * max(blocked):.1f} ms"
    )
    return Verdict("steps that waited", figure, "0", stalls == 0)


def judge(seen: Seen) -> list[Verdict]:
    """Every line of the table."""
    served = {url: len({label for label, _ in visible}) for url, visible in seen.visible.items()}
    return [
        Verdict(
            "versions that requests could meet",
            ", ".join(f"{n}" for n in served.values()),
            "> 0 each",
            all(served.values()),
        ),
        _count("served weights that are no version", mismatches(seen) + seen.wrong_now),
        _count(
            "versions that went back",
            [text for visible in seen.visible.values() for text in went_back(visible)],
        ),
        judge_stalls(seen),
        _count("servers left paused", seen.paused),
        _count("servers late after the faults", seen.late),
        *judge_memory(seen),
        *judge_handles(seen),
        _count("processes left behind", seen.strangers),
        _count("shared memory left behind", seen.shm_left),
        _count("the end", seen.final, "both servers hold the newest version"),
    ]


def record(seen: Seen, verdicts: Sequence[Verdict]) -> dict[str, Any]:
    return {
        "passed": all(v.ok for v in verdicts),
        "rows": [asdict(v) for v in verdicts],
        "published": len(seen.digests),
        "background_errors": seen.errors,
        "recoveries_s": seen.recoveries,
        "steps": len(seen.steps),
        "calms": [{role: asdict(held) for role, held in calm.items()} for calm in seen.calms],
    }
