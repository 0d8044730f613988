"""One server and the lane to it, as an explorable machine: production tables, and an environment
that loses, delays, repeats and kills.

A request of the lane is executed by the server in a later move, and its answer reaches the lane in
yet another one; between any two of them anything may fail. Weights are two halves, so that a load
that stops in between shows. Runs are the present trainer's, the one before (it died, or froze and
comes back) and all that were longer ago; epochs are renumbered in order, so that states which
differ in the number of reconnections are one state."""

from dataclasses import replace
from itertools import pairwise
from typing import Any, NamedTuple

from tests.model_check.tables import Violation
from titan_grpo.protocol import lane as lanes
from titan_grpo.protocol import server
from titan_grpo.protocol.messages import Entry, Label, Standing

NOW, BEFORE, LONG_AGO = "1", "0", "-"
"""Run ids; as in production, a later one is greater."""

OLDER = {"": "", NOW: BEFORE, BEFORE: LONG_AGO, LONG_AGO: LONG_AGO}
OWN = "default"

Half = tuple[str, int] | None
"""(run, version) of half of the weights; None: what the server was started with."""


HARMLESS = ("look", "read", "ping", "send", "sending", "manifest")
"""Requests that change nothing if they come late."""


class Request(NamedTuple):
    """Something that the lane asked for and that was not executed yet."""

    kind: str
    run: str
    epoch: int
    version: int = -1
    text: str = ""
    term: int = 0
    admitted: bool = False
    """Of the lane of a stray hello."""


class Server(NamedTuple):
    """State of one server, its receiver and its lane."""

    lane: lanes.Lane = lanes.Lane()
    request: Request | None = None
    answer: tuple[Any, ...] | None = None
    joined: tuple[str, bool] | None = None
    plan: tuple[Any, ...] = ()
    before: str = ""
    stray: Request | None = None
    up: bool = True
    weights: tuple[Half, Half] = (None, None)
    loading: Request | None = None
    paused: bool = False
    label: str = OWN
    session: bool = False
    engine: server.EngineState = server.EngineState()
    receiver: tuple[str, int] | None = None
    memory: server.Staging = server.Staging()
    meddled: bool = False


_READS_MEMORY = frozenset({lanes.Phase.SENDING, lanes.Phase.PAUSING, lanes.Phase.LOADING})


class Move(NamedTuple):
    """One step: its name, the state after it, and what it asks of the trainer's side ("pin",
    "unpin" or nothing)."""

    name: str
    after: Server
    effect: str = ""
    fault: bool = False


def label_of(run: str, version: int) -> str:
    """The label of a version; fingerprints play no part here."""
    return str(Label(run, version, ""))


def broken(s: Server) -> bool:
    """Whether the weights are not one whole version."""
    return s.weights[0] != s.weights[1]


def settled(s: Server, newest: int) -> bool:
    """Whether everything is as it should be in the end: the newest version, whole, labelled, known
    and generating."""
    wanted = (NOW, newest)
    whole = s.up and s.weights == (wanted, wanted) and not s.paused and s.label == label_of(*wanted)
    return whole and s.lane.entry == Entry(Standing.HOLDS, held=newest)


def check(s: Server) -> None:
    """Raise Violation where the state breaks an invariant."""
    if s.up and broken(s) and not s.paused and s.loading is None and not s.meddled:
        raise Violation(f"torn weights are served: {s.weights}")
    entry = s.lane.entry
    if entry.accepting and s.up:
        held = (NOW, entry.held)
        if broken(s) and s.loading is None:
            raise Violation(f"rollouts are sent to torn weights: {entry!r}, {s.weights}")
        if s.weights[0] is not None and s.weights[0] != held and s.loading is None:
            raise Violation(f"{entry!r}, but the server holds {s.weights[0]}")
        # a lane that is connecting has not asked the receiver for the second time yet, and the
        # ledger is what it was before
        lies = s.weights[0] is None and s.label == label_of(NOW, entry.held or 0)
        if lies and s.loading is None and s.lane.phase is not lanes.Phase.CONNECTING:
            raise Violation(
                f"{entry!r}, and the label says so, but the server runs on what it was started with"
            )


def receiving(s: Server) -> bool:
    """Whether the receiver is the one that the present request is for."""
    return s.request is not None and s.receiver == (s.request.run, s.request.epoch)


def canonical(s: Server) -> Server:
    """The same state without what is never read again, and with epochs renumbered from 1 in each
    run."""
    busy = (
        s.lane.phase in _READS_MEMORY
        or s.loading is not None
        or (s.stray is not None and s.stray.kind == "load")
    )
    if not busy and s.memory.phase in (
        server.Phase.STAGED,
        server.Phase.EMPTY,
        server.Phase.WRITING,
    ):
        s = s._replace(memory=server.Staging())
    seen: dict[str, set[int]] = {NOW: {s.lane.epoch}, BEFORE: set(), LONG_AGO: set()}
    pairs = [(r.run, r.epoch) for r in (s.request, s.stray, s.loading) if r is not None]
    pairs += [
        p
        for p in (s.receiver, s.engine.in_force if s.engine.in_force[0] else None)
        if p is not None
    ]
    for run, epoch in pairs:
        seen[run].add(epoch)
    rank = {
        run: {epoch: i for i, epoch in enumerate(sorted(epochs), start=1)}
        for run, epochs in seen.items()
    }
    if s.lane.epoch == 0:
        rank[NOW] = {epoch: i - 1 for epoch, i in rank[NOW].items()}
    terms = {s.lane.term, s.engine.term}
    terms |= {r.term for r in (s.request, s.stray) if r is not None and r.kind == "greet"}
    term = _closer(sorted(terms))
    if all(epoch == i for numbers in rank.values() for epoch, i in numbers.items()) and all(
        old == new for old, new in term.items()
    ):
        return s

    def renumbered(r: Request | None) -> Request | None:
        if r is None:
            return None
        return r._replace(epoch=rank[r.run][r.epoch], term=term.get(r.term, 0))

    order = s.engine.in_force
    return s._replace(
        lane=replace(s.lane, epoch=rank[NOW][s.lane.epoch], term=term[s.lane.term]),
        request=renumbered(s.request),
        stray=renumbered(s.stray),
        loading=renumbered(s.loading),
        receiver=(
            None if s.receiver is None else (s.receiver[0], rank[s.receiver[0]][s.receiver[1]])
        ),
        engine=replace(
            s.engine,
            in_force=(order[0], rank[order[0]][order[1]]) if order[0] else order,
            term=term[s.engine.term],
        ),
    )


def _closer(terms: list[int]) -> dict[int, int]:
    """Terms with the same order and nearer together: only sums of one or two are compared."""
    near = {terms[0]: min(terms[0], 1)}
    for low, high in pairwise(terms):
        near[high] = near[low] + min(high - low, 3)
    return near
