"""Timeline of a run: what servers did against the trainer's steps, and which versions they held.
Pure."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from titan_grpo.observe import names
from titan_grpo.observe.names import short
from titan_grpo.views.run import TRAINER, Array, Spans, Trace

TRAINER_STATES = {"waiting": "rollout wait", "training": "train", "publishing": "publish"}
SERVER_STATES = {
    "connecting": names.CONNECT_S,
    "receiving": names.SEND_S,
    "draining": names.DRAIN_S,
    "paused": names.PAUSE_S,
    "evaluated": names.HELD_S,
}
"""State -> name of its spans in the trace. A server that holds a version generates unless it is
paused: also while it receives, and while an evaluation holds its version."""

BINS = 480
"""Columns of the overview."""

EXACT_SPANS = 6000
"""Spans that the page shows individually: a whole short run, or the end of a long one."""

MARKS = 2000
"""Faults that are marked, taken evenly: a server that fails at every step has thousands."""

FAULTS = ("error", "sync failure", "server joined", "server left", "version skipped")
"""Instants marked on the timeline."""


@dataclass(frozen=True, slots=True)
class ServerFigures:
    """Figures of one server in a run; times in seconds."""

    url: str
    commits: int
    reconnects: int
    """Times that its lane went to connect again in a process of the run."""
    send_median_s: float
    send_s: float
    """Part of ``served_s``, like ``drain_s`` and ``pause_s``, since a server generates nothing
    before its first version; of one that held none, the whole time."""
    drain_s: float
    pause_median_s: float
    pause_s: float
    served_s: float
    """Time in which it held a version: without that before its first commit, or while it was away
    from the run."""
    lag: float
    """Mean over that time of the newest published version minus its own."""
    faults: int
    """Errors of its lane, each once, also of several in one step."""
    held_s: float = 0.0
    """Time that evaluations held its version."""
    waited_meanwhile_s: float = 0.0
    """Part of that time in which the trainer waited for rollouts, not in a process's first step."""


def published(trace: Trace) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.int64]]:
    """Return when the trainer made each version, also without a free slot: (times, versions),
    rising within a process: a resumed one makes those again that came after its checkpoint."""
    sealed = trace.of("sealer", names.DIGEST_S)
    skipped = [(i.time_s, i.version) for i in trace.instants if i.name == "version skipped"]
    times = np.concatenate([sealed.start, [t for t, _ in skipped]])
    versions = np.concatenate([sealed.number, [v for _, v in skipped]]).astype(np.int64)
    order = np.argsort(times, kind="stable")
    times, versions = times[order], versions[order]
    for each in np.split(versions, np.searchsorted(times, trace.ends, side="right")):
        np.maximum.accumulate(each, out=each)
    return times, versions


def held(trace: Trace, url: str) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.int64]]:
    """Return when a server was verified to hold each version: (times, versions); -1: it left, does
    not answer, or the run's process ended, and the next one may have other servers."""
    commits = trace.of(url, names.COMMIT_S)
    own = [i for i in trace.instants if i.track == url]
    left = [i.time_s for i in own if i.name == "server left"]
    known = [i for i in own if i.name == "server holds"]
    # A commit in which it left is ended all the same, and does not bring it back.
    stays = np.searchsorted(left, commits.start) == np.searchsorted(left, commits.stop)
    gone = [*left, *trace.ends]
    found = [i.version for i in known] + [-1] * len(gone)
    times = np.concatenate([commits.stop[stays], [i.time_s for i in known], gone])
    versions = np.concatenate([commits.number[stays], found]).astype(np.int64)
    order = np.argsort(times, kind="stable")
    return times[order], versions[order]


def figures(trace: Trace, url: str) -> ServerFigures:
    """Return a server's figures."""
    times, versions = held(trace, url)
    new, number = published(trace)
    connect, send, drain, pause, kept = (trace.of(url, name) for name in SERVER_STATES.values())
    at = np.unique(np.concatenate([times, new, [trace.seconds]]))
    own, newest = steps_at(times, versions, at[:-1]), steps_at(new, number, at[:-1])
    # Not the time after it left: it serves nothing then, and versions go on without it.
    serving = np.where(own >= 0, np.diff(at), 0.0)
    served_s = float(serving.sum())
    lag = max(0.0, float((serving * (newest - own)).sum()) / served_s) if served_s else 0.0
    faults = [i for i in trace.instants if i.track == url and i.name == "sync failure"]

    process = np.searchsorted(trace.ends, connect.start, side="right")

    def served(spans: Spans) -> float:
        if not spans.start.size or not served_s:
            return spans.total_s
        return float(np.diff(_done(spans.start, spans.stop, at))[own >= 0].sum())

    return ServerFigures(
        url=url,
        commits=int(trace.of(url, names.COMMIT_S).start.size),
        reconnects=connect.start.size - np.unique(process).size,
        send_median_s=send.median_s,
        send_s=served(send),
        drain_s=served(drain),
        pause_median_s=pause.median_s,
        pause_s=served(pause),
        served_s=served_s,
        lag=lag,
        faults=len(faults),
        held_s=kept.total_s,
        waited_meanwhile_s=overlap(later(trace, TRAINER_STATES["waiting"]), kept),
    )


def later(trace: Trace, name: str) -> Spans:
    """Return the trainer's spans of a name without the first of each process."""
    spans = trace.of(TRAINER, name)
    process = np.searchsorted(trace.ends, spans.start, side="right")
    kept = np.ones(spans.start.size, dtype=np.bool_)
    kept[np.unique(process, return_index=True)[1]] = False
    return Spans(spans.start[kept], spans.stop[kept], spans.number[kept])


def timeline(trace: Trace, exact_spans: int = EXACT_SPANS) -> dict[str, Any]:
    """Lay out a run for the page, in plain JSON with short numbers.

    Each row has its shares of BINS bins in hundredths, and its version at each bin's end (trainer:
    the newest published; server: how many behind that, -1 without one). The last ``exact_spans``
    spans are [row, state, start ms, length ms, version or step]; marks are [row, ms, fault, text].
    """
    tracks = [TRAINER, *trace.servers]
    bounds = np.linspace(0.0, max(trace.seconds, 1e-9), BINS + 1)
    newest = steps_at(*published(trace), bounds[1:])
    rows = []
    for track in tracks:
        shares = {
            state: np.rint(100 * covered(spans.start, spans.stop, bounds)).astype(int).tolist()
            for state, spans in _states(trace, track).items()
            if spans.start.size
        }
        if track == TRAINER:
            rows.append({"name": "trainer", "shares": shares, "version": newest.tolist()})
        else:
            version = steps_at(*held(trace, track), bounds[1:])
            behind = np.where(version < 0, -1, np.maximum(newest - version, 0))
            rows.append({"name": short(track), "shares": shares, "behind": behind.tolist()})
    starts = [spans.start for track in tracks for spans in _states(trace, track).values()]
    every = np.sort(np.concatenate(starts))
    begin = float(every[-exact_spans]) if every.size > exact_spans else 0.0
    states = [*TRAINER_STATES, *SERVER_STATES]
    exact = [
        [row, states.index(state), round(start * 1e3), max(1, round((stop - start) * 1e3)), number]
        for row, track in enumerate(tracks)
        for state, spans in _states(trace, track).items()
        for start, stop, number in zip(
            *(c[spans.start >= begin].tolist() for c in (spans.start, spans.stop, spans.number)),
            strict=True,
        )
    ]
    marks, places = [], {track: row for row, track in enumerate(tracks)}
    faults = [i for i in trace.instants if i.name in FAULTS]
    for i in faults[:: -(-len(faults) // MARKS) or 1]:
        row = places.get(i.track, 0)
        text = i.text or (f"version {i.version}" if i.version >= 0 else "")
        marks.append([row, round(i.time_s * 1e3), i.name, text[:300]])
    return {
        "seconds": round(trace.seconds, 3),
        "states": states,
        "rows": rows,
        "exactFrom": round(begin, 3),
        "exact": exact,
        "marks": marks,
    }


def _states(trace: Trace, track: str) -> dict[str, Spans]:
    table = TRAINER_STATES if track == TRAINER else SERVER_STATES
    return {state: trace.of(track, name) for state, name in table.items()}


def covered(start: Array, stop: Array, bounds: Array) -> Array:
    """Return the share, in [0, 1], of each interval of ``bounds`` (seconds, rising) that the spans
    cover. Spans are sorted by start; one that overlaps the next is cut at the next's start.

    Example: a span from 1 to 3 over the bounds 0, 2, 4 covers 0.5 and 0.5.
    """
    if not start.size:
        return np.zeros(bounds.size - 1)
    stop = np.minimum(stop, np.append(start[1:], np.inf))
    stop = np.maximum(stop, start)
    shares: Array = np.diff(_done(start, stop, bounds)) / np.maximum(np.diff(bounds), 1e-12)
    return shares.clip(0.0, 1.0)


def _done(start: Array, stop: Array, at: Array) -> Array:
    """Return the seconds of spans, sorted and disjoint, that lie before each time of ``at``."""
    total = np.append(0.0, np.cumsum(stop - start))
    times = np.stack([start, stop], axis=1).ravel()
    so_far = np.stack([total[:-1], total[1:]], axis=1).ravel()
    done: Array = np.interp(at, times, so_far)
    return done


def overlap(one: Spans, other: Spans) -> float:
    """Return the seconds covered by spans of both; the spans of each are disjoint.

    Example: 1 to 3 and 5 to 6 overlap 2 to 5.5 by 1.5.
    """
    if not one.start.size:
        return 0.0
    before, after = (_done(one.start, one.stop, at) for at in (other.start, other.stop))
    return float((after - before).sum())


def steps_at(times: Array, values: npt.NDArray[np.int64], at: Array) -> npt.NDArray[np.int64]:
    """Return the values of a step function at the times ``at``: the last of ``values`` at or
    before, -1 before the first. ``times`` is sorted.

    Example: values 5, 6 at times 1, 2 are -1, 5, 6 at times 0, 1.5, 9.
    """
    index = np.searchsorted(times, at, side="right") - 1
    return (
        np.where(index >= 0, values[np.maximum(index, 0)], -1)
        if times.size
        else np.full(at.shape, -1, dtype=np.int64)
    )
