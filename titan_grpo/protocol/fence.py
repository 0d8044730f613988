"""What an engine has loaded and whom it obeys: the part of a server that outlives every receiver. A
pure table.

::

    Greeted      a newer (run, epoch) is served and replaces the one in force; any other one is refused
    CommitAsked  by the (run, epoch) in force, not older than what this run has committed: lend; otherwise refuse
    Loaded       how the load of the lent commit ended: the only event that changes what the engine holds

A hello that is replayed is refused by the first rule, since its epoch is not newer than itself; a
trainer that was replaced by the same. The engine serves one call at a time, yet nothing here relies
on it: a hello during a load changes whom the engine obeys, and not the truth about its weights.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from titan_grpo.errors import ProtocolError


@dataclass(frozen=True, slots=True)
class Holding:
    """``order``: the newest (run, epoch) that was admitted; ``run``, ``version``, ``fingerprint``:
    what was loaded last.

    ``intact`` is false if a load broke off half-way and no whole one followed. ``lent``: (run,
    version) of the commit that is being loaded.
    """

    order: tuple[str, int] = ("", 0)
    run: str = ""
    version: int = -1
    fingerprint: str = ""
    intact: bool = True
    lent: tuple[str, int] | None = None

    def __repr__(self) -> str:
        order = f"{self.order[0]}/{self.order[1]}" if self.order[0] else "nobody"
        held = f"{self.run} v{self.version} {self.fingerprint}" if self.run else "its own weights"
        broken = "" if self.intact else ", broken"
        lent = "" if self.lent is None else f", loading {self.lent[0]} v{self.lent[1]}"
        return f"<obeys {order}, holds {held}{broken}{lent}>"


# Events.


@dataclass(frozen=True, slots=True)
class Greeted:
    """A trainer opens an epoch."""

    run_id: str
    epoch: int


@dataclass(frozen=True, slots=True)
class CommitAsked:
    """A trainer wants a version loaded."""

    run_id: str
    epoch: int
    version: int


@dataclass(frozen=True, slots=True)
class Loaded:
    """The load of the lent commit ended. ``intact`` without ``ok``: no weight was touched."""

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
class Lend:
    """Hand the image to the engine."""


@dataclass(frozen=True, slots=True)
class Refuse:
    """Answer no; the state is as it was."""

    reason: str


Event = Greeted | CommitAsked | Loaded
Action = Serve | Lend | Refuse
Outcome = tuple[Holding, tuple[Action, ...]]


def _greeted(h: Holding, e: Greeted) -> Outcome:
    order = (e.run_id, e.epoch)
    if order > h.order:
        return replace(h, order=order), (Serve(),)
    reason = (
        f"epoch {e.epoch} of run {e.run_id} is not newer than epoch {h.order[1]} of run"
        f" {h.order[0]}, which is in force: a trainer that was replaced, or two trainers with the"
        " same server"
    )
    return h, (Refuse(reason),)


def _commit_asked(h: Holding, e: CommitAsked) -> Outcome:
    if (e.run_id, e.epoch) != h.order:
        run, epoch = h.order
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
    if h.lent is not None:
        return h, (Refuse(f"version {h.lent[1]} of run {h.lent[0]} is being loaded"),)
    return replace(h, lent=(e.run_id, e.version)), (Lend(),)


def _loaded(h: Holding, e: Loaded) -> Outcome:
    if h.lent != (e.run_id, e.version):
        raise ProtocolError(f"event {e!r} is not about a commit that was lent: {h!r}")
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
                lent=None,
            ),
            (),
        )
    # a load that touched nothing makes broken weights no better
    return replace(h, intact=h.intact and e.intact, lent=None), ()


_Transition = Callable[[Holding, Any], Outcome]

TRANSITIONS: dict[type, _Transition] = {
    Greeted: _greeted,
    CommitAsked: _commit_asked,
    Loaded: _loaded,
}


def step(holding: Holding, event: Event) -> Outcome:
    """The next state and what to do. An event that is not listed raises ProtocolError and changes
    nothing."""
    transition = TRANSITIONS.get(type(event))
    if transition is None:
        raise ProtocolError(f"event {event!r} is not listed for fence {holding!r}")
    return transition(holding, event)
