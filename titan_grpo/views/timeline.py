"""What every server did, against the trainer's steps: who held which version when. Pure."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from titan_grpo.observe import names
from titan_grpo.views.bands import covered, integral, steps_at
from titan_grpo.views.run import NO_SPANS, TRAINER, Instant, Spans, Trace

TRAINER_STATES = {"waiting": "rollout wait", "training": "train", "publishing": "publish"}
SERVER_STATES = {
    "connecting": names.CONNECT_S,
    "receiving": names.SEND_S,
    "draining": names.DRAIN_S,
    "paused": names.PAUSE_S,
}
"""State -> name of its spans in the trace. A server that holds a version and is not paused
generates, also while it receives."""

BINS = 480
"""Columns of the overview."""

EXACT_SPANS = 6000
"""Spans that the page shows one by one: a whole short run, or the end of a long one."""

FAULTS = ("error", "sync failure", "server joined", "server left", "version skipped")
"""Instants that the timeline marks."""


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the timeline: the trainer (``track`` is TRAINER) or a server (its URL)."""

    track: str
    shares: dict[str, npt.NDArray[np.float64]]
    """State -> share of each bin, [BINS]."""
    version: npt.NDArray[np.int64]
    """At each bin's end, [BINS]; -1: none. The trainer's is the newest one that was published."""


@dataclass(frozen=True, slots=True)
class Timeline:
    """The overview of the whole run, and the spans from ``exact_from_s`` on."""

    seconds: float
    rows: tuple[Row, ...]
    exact_from_s: float
    exact: tuple[tuple[int, str, float, float, int], ...]
    """(row, state, start s, stop s, version or step)."""
    marks: tuple[tuple[int, Instant], ...]
    """(row, fault)."""


@dataclass(frozen=True, slots=True)
class ServerFigures:
    """What one server did in a run; seconds."""

    url: str
    commits: int
    last_version: int
    """-1: it never held one."""
    connects: int
    connect_s: float
    send_median_s: float
    send_s: float
    drain_s: float
    pause_median_s: float
    pause_s: float
    served_s: float
    """From its first commit to the end of the run, or until it left."""
    lag: float
    """Mean over that time of the newest published version minus its own."""
    faults: int
    left: bool


def published(trace: Trace) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.int64]]:
    """When the trainer made each version: (times, versions), both rising. Versions that no slot was
    free for count too."""
    sealed = trace.of("sealer", names.DIGEST_S)
    skipped = [(i.time_s, i.version) for i in trace.instants if i.name == "version skipped"]
    times = np.concatenate([sealed.start, [t for t, _ in skipped]])
    versions = np.concatenate([sealed.number, [v for _, v in skipped]]).astype(np.int64)
    order = np.argsort(times, kind="stable")
    return times[order], np.maximum.accumulate(versions[order]) if times.size else versions


def held(trace: Trace, url: str) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.int64]]:
    """When a server was verified to hold each version: (times, versions). -1 once it has left."""
    commits = trace.of(url, names.COMMIT_S)
    gone = [i.time_s for i in trace.instants if i.track == url and i.name == "server left"]
    times = np.concatenate([commits.stop, gone])
    versions = np.concatenate([commits.number, np.full(len(gone), -1)]).astype(np.int64)
    order = np.argsort(times, kind="stable")
    return times[order], versions[order]


def figures(trace: Trace, url: str) -> ServerFigures:
    """Compute a server's figures."""
    times, versions = held(trace, url)
    new, number = published(trace)
    connect, send, drain, pause = (trace.of(url, name) for name in SERVER_STATES.values())
    left = bool(versions.size) and versions[-1] == -1
    begin = float(times[0]) if times.size else trace.seconds
    end = float(times[-1]) if left else trace.seconds
    lag = 0.0
    if end > begin and new.size and versions[0] >= 0:
        behind = integral(new, number, begin, end) - integral(times, versions, begin, end)
        lag = max(0.0, behind / (end - begin))
    own = versions[versions >= 0]
    marks = [i for i in trace.instants if concerns(i, url) and i.name in ("error", "sync failure")]
    return ServerFigures(
        url=url,
        commits=int(own.size),
        last_version=int(own[-1]) if own.size else -1,
        connects=int(connect.start.size),
        connect_s=connect.total_s,
        send_median_s=send.median_s,
        send_s=send.total_s,
        drain_s=drain.total_s,
        pause_median_s=pause.median_s,
        pause_s=pause.total_s,
        served_s=max(0.0, end - begin),
        lag=lag,
        faults=len(marks),
        left=left,
    )


def concerns(instant: Instant, url: str) -> bool:
    """Whether an instant is about a server: on its track, or an error that names it."""
    return instant.track == url or (instant.name == "error" and url in instant.text)


def timeline(trace: Trace, exact_spans: int = EXACT_SPANS) -> Timeline:
    """Lay out a run; the last ``exact_spans`` spans one by one."""
    tracks = [TRAINER, *trace.servers]
    bounds = np.linspace(0.0, max(trace.seconds, 1e-9), BINS + 1)
    rows = tuple(_row(trace, track, bounds) for track in tracks)
    begin = _exact_from(trace, tracks, exact_spans)
    exact = [
        (row, state, float(start), float(stop), int(number))
        for row, track in enumerate(tracks)
        for state, spans in _states(trace, track).items()
        for start, stop, number in zip(
            *(column[spans.start >= begin] for column in (spans.start, spans.stop, spans.number)),
            strict=True,
        )
    ]
    marks = [
        (next((k for k, url in enumerate(tracks) if k and concerns(i, url)), 0), i)
        for i in trace.instants
        if i.name in FAULTS
    ]
    return Timeline(trace.seconds, rows, begin, tuple(exact), tuple(_thinned(marks)))


def _states(trace: Trace, track: str) -> dict[str, Spans]:
    table = TRAINER_STATES if track == TRAINER else SERVER_STATES
    return {state: trace.spans.get((track, name), NO_SPANS) for state, name in table.items()}


def _row(trace: Trace, track: str, bounds: npt.NDArray[np.float64]) -> Row:
    shares = {
        state: covered(spans.start, spans.stop, bounds)
        for state, spans in _states(trace, track).items()
    }
    times, versions = published(trace) if track == TRAINER else held(trace, track)
    return Row(track, shares, steps_at(times, versions, bounds[1:]))


def _exact_from(trace: Trace, tracks: list[str], limit: int) -> float:
    """When the last ``limit`` spans begin; 0 if there are no more."""
    starts = [spans.start for track in tracks for spans in _states(trace, track).values()]
    every = np.sort(np.concatenate(starts))
    return float(every[-limit]) if every.size > limit else 0.0


def _thinned(marks: list[tuple[int, Instant]], limit: int = 2000) -> list[tuple[int, Instant]]:
    """At most ``limit`` marks, evenly taken: a server that fails at every step has thousands."""
    return marks if len(marks) <= limit else marks[:: -(-len(marks) // limit)]
