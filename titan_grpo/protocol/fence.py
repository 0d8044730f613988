"""What an engine holds and which epoch may commit to it: the part of a server that outlives every
receiver. A pure table.

::

    OpenEpoch        a higher epoch of the run in force, or another run with a higher (term, run
                     id), is served and replaces the epoch in force; any other one is refused
    CommitRequested  by the (run, epoch) in force, not older than what this run has committed:
                     granted; otherwise refused
    Loaded           how the granted commit ended: the only event that changes what the engine holds

A run id begins with the start time of its run, so that with right clocks the newest run wins, at
term 1. A new trainer whose clock is behind is refused by the run before it, which is older than
itself: both ages come from monotonic clocks. It then takes that run's term plus one
(protocol.lane). A trainer that was replaced does not: the run in force is younger, or the server
has admitted it before.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from titan_grpo.errors import ProtocolError


@dataclass(frozen=True, slots=True)
class EngineState:
    """``in_force``: the (run, epoch) admitted last, ``term``: its term; ``run``, ``version``,
    ``fingerprint``: what was loaded last.

    ``intact`` is false if a load broke off half-way and no whole one followed. ``granted``: (run,
    version) of the commit that is being loaded.
    """

    in_force: tuple[str, int] = ("", 0)
    term: int = 0
    run: str = ""
    version: int = -1
    fingerprint: str = ""
    intact: bool = True
    granted: tuple[str, int] | None = None

    def __repr__(self) -> str:
        run, epoch = self.in_force
        force = f"{run}/{epoch} term {self.term}" if run else "no epoch"
        held = f"{self.run} v{self.version} {self.fingerprint}" if self.run else "its own weights"
        broken = "" if self.intact else ", broken"
        granted = "" if self.granted is None else f", loading {self.granted[0]} v{self.granted[1]}"
        return f"<in force {force}, holds {held}{broken}{granted}>"


# Events.


@dataclass(frozen=True, slots=True)
class OpenEpoch:
    """A trainer's lane, or its pause guard, opens an epoch."""

    run_id: str
    epoch: int
    term: int


@dataclass(frozen=True, slots=True)
class CommitRequested:
    """A trainer wants a version loaded."""

    run_id: str
    epoch: int
    version: int


@dataclass(frozen=True, slots=True)
class Loaded:
    """The load of the granted commit ended. ``intact`` without ``ok``: no weight was touched."""

    run_id: str
    version: int
    fingerprint: str
    ok: bool
    intact: bool


# Actions.


@dataclass(frozen=True, slots=True)
class Serve:
    """Start a receiver for the epoch; the one of the epoch before ends."""


@dataclass(frozen=True, slots=True)
class Grant:
    """Hand the image to the engine."""


@dataclass(frozen=True, slots=True)
class Refuse:
    """Answer no; the state is as it was."""

    reason: str


Event = OpenEpoch | CommitRequested | Loaded
Action = Serve | Grant | Refuse
Outcome = tuple[EngineState, tuple[Action, ...]]


def _open_epoch(s: EngineState, e: OpenEpoch) -> Outcome:
    run, epoch = s.in_force
    later = not run or (e.term, e.run_id) > (s.term, run)
    if e.epoch > epoch if e.run_id == run else later:
        # A pause guard does not know its lane's term: its epoch must not lower the term.
        term = max(e.term, s.term) if e.run_id == run else e.term
        return replace(s, in_force=(e.run_id, e.epoch), term=term), (Serve(),)
    reason = (
        f"epoch {e.epoch} of run {e.run_id} (term {e.term}) is not newer than epoch {epoch} of run"
        f" {run} (term {s.term}), which is in force: "
    )
    if e.run_id == run:
        reason += (
            "the run's pause guard, or another of its lanes under another name, has the server"
        )
    else:
        reason += "a trainer that was replaced, or two trainers with the same server"
    return s, (Refuse(reason),)


def _commit_requested(s: EngineState, e: CommitRequested) -> Outcome:
    run, epoch = s.in_force
    reason = ""
    if (e.run_id, e.epoch) != (run, epoch):
        reason = (
            f"commit for epoch {e.epoch} of run {e.run_id}, but epoch {epoch} of run {run} is in"
            " force"
        )
    # the same version again is allowed: it is what repairs a broken load
    elif e.run_id == s.run and e.version < s.version:
        reason = f"version {e.version} is older than version {s.version}, which the engine holds"
    elif s.granted is not None:
        reason = f"version {s.granted[1]} of run {s.granted[0]} is being loaded"
    if reason:
        return s, (Refuse(reason),)
    return replace(s, granted=(e.run_id, e.version)), (Grant(),)


def _loaded(s: EngineState, e: Loaded) -> Outcome:
    if s.granted != (e.run_id, e.version):
        raise ProtocolError(f"event {e!r} is not about a commit that was granted: {s!r}")
    if e.ok and not e.intact:
        raise ProtocolError(f"a load that went well leaves whole weights: {e!r} reached {s!r}")
    if not e.ok:
        # a load that touched nothing makes broken weights no better
        return replace(s, intact=s.intact and e.intact, granted=None), ()
    return EngineState(s.in_force, s.term, e.run_id, e.version, e.fingerprint), ()


TRANSITIONS: dict[type, Callable[[EngineState, Any], Outcome]] = {
    OpenEpoch: _open_epoch,
    CommitRequested: _commit_requested,
    Loaded: _loaded,
}


def step(state: EngineState, event: Event) -> Outcome:
    """The next state and what to do. An event that is not listed raises ProtocolError and changes
    nothing."""
    transition = TRANSITIONS.get(type(event))
    if transition is None:
        raise ProtocolError(f"event {event!r} is not listed for fence {state!r}")
    return transition(state, event)
