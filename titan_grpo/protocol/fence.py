"""What an engine has loaded and whom it obeys: the part of a server that outlives every receiver. A
pure table.

::

    OpenEpoch      a newer (run, epoch) is served and replaces the one in force; any other one is refused
    CommitRequested  by the (run, epoch) in force, not older than what this run has committed: grant; otherwise refuse
    Loaded       how the load of the granted commit ended: the only event that changes what the engine holds

A hello that is replayed is refused by the first rule, since its epoch is not newer than itself; a
trainer that was replaced by the same. The engine serves one call at a time, yet nothing here relies
on it: a hello during a load changes whom the engine obeys, and not the truth about its weights.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from titan_grpo.errors import ProtocolError


@dataclass(frozen=True, slots=True)
class EngineState:
    """``in_force``: the newest (run, epoch) that was admitted; ``run``, ``version``, ``fingerprint``:
    what was loaded last.

    ``intact`` is false if a load broke off half-way and no whole one followed. ``granted``: (run,
    version) of the commit that is being loaded.
    """

    in_force: tuple[str, int] = ("", 0)
    run: str = ""
    version: int = -1
    fingerprint: str = ""
    intact: bool = True
    granted: tuple[str, int] | None = None

    def __repr__(self) -> str:
        order = f"{self.in_force[0]}/{self.in_force[1]}" if self.in_force[0] else "nobody"
        held = f"{self.run} v{self.version} {self.fingerprint}" if self.run else "its own weights"
        broken = "" if self.intact else ", broken"
        lent = "" if self.granted is None else f", loading {self.granted[0]} v{self.granted[1]}"
        return f"<obeys {order}, holds {held}{broken}{lent}>"


# Events.


@dataclass(frozen=True, slots=True)
class OpenEpoch:
    """A trainer opens an epoch."""

    run_id: str
    epoch: int


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


def _greeted(h: EngineState, e: OpenEpoch) -> Outcome:
    order = (e.run_id, e.epoch)
    if order > h.in_force:
        return replace(h, in_force=order), (Serve(),)
    reason = (
        f"epoch {e.epoch} of run {e.run_id} is not newer than epoch {h.in_force[1]} of run"
        f" {h.in_force[0]}, which is in force: a trainer that was replaced, or two trainers with the"
        " same server"
    )
    return h, (Refuse(reason),)


def _commit_asked(h: EngineState, e: CommitRequested) -> Outcome:
    if (e.run_id, e.epoch) != h.in_force:
        run, epoch = h.in_force
        reason = (
            f"commit for epoch {e.epoch} of run {e.run_id}, but epoch {epoch} of run {run} is in"
            " force"
        )
        return h, (Refuse(reason),)
    # the same version again is allowed: it is what repairs a broken load
    if e.run_id == h.run and e.version < h.version:
        return h, (
            Refuse(
                f"version {e.version} is older than version {h.version}, which the engine holds"
            ),
        )
    if h.granted is not None:
        return h, (Refuse(f"version {h.granted[1]} of run {h.granted[0]} is being loaded"),)
    return replace(h, granted=(e.run_id, e.version)), (Grant(),)


def _loaded(h: EngineState, e: Loaded) -> Outcome:
    if h.granted != (e.run_id, e.version):
        raise ProtocolError(f"event {e!r} is not about a commit that was granted: {h!r}")
    if e.ok and not e.intact:
        raise ProtocolError(f"a load that went well leaves whole weights: {e!r} reached {h!r}")
    if e.ok:
        return (
            replace(
                h,
                run=e.run_id,
                version=e.version,
                fingerprint=e.fingerprint,
                intact=True,
                granted=None,
            ),
            (),
        )
    # a load that touched nothing makes broken weights no better
    return replace(h, intact=h.intact and e.intact, granted=None), ()


_Transition = Callable[[EngineState, Any], Outcome]

TRANSITIONS: dict[type, _Transition] = {
    OpenEpoch: _greeted,
    CommitRequested: _commit_asked,
    Loaded: _loaded,
}


def step(holding: EngineState, event: Event) -> Outcome:
    """The next state and what to do. An event that is not listed raises ProtocolError and changes
    nothing."""
    transition = TRANSITIONS.get(type(event))
    if transition is None:
        raise ProtocolError(f"event {event!r} is not listed for fence {holding!r}")
    return transition(holding, event)
