"""State of one server, as two pure tables: the engine's fence, which outlives every receiver, and
the staging memory of one epoch's receiver.

Fence: what the engine holds and which epoch may commit to it::

    OpenEpoch        a higher epoch of the run in force, or another run with a higher (term, run
                     id), is served and replaces the epoch in force; any other one is refused
    CommitRequested  by the (run, epoch) in force, not older than what this run has committed:
                     granted; otherwise refused
    Loaded           how the granted commit ended: the only event that changes what the engine holds

A run id begins with the start time of its run: with right clocks the newest run wins, at term 1.
With its clock behind, a new trainer's id sorts before that of the run in force, and the server
refuses it. The lane then compares ages by monotonic clocks: if the run in force is the older one,
the lane retries with that run's term plus one (protocol.lane). A replaced trainer does not: the run
in force is younger, or the server has admitted the trainer before.

Staging: the memory's content and its user::

    EMPTY --begin--> WRITING --arrived, ok--> STAGED --lend--> LENT --returned--> STAGED
      ^                 | not ok                |                | (streamed: EMPTY)
      `-----------------'<-- begin: WRITING ----'                `-- begin: refused until it returns

There is one image (streamed: one window): a transfer overwrites a staged version, never one that
the engine reads. Streamed, a version is STAGED once its digests have arrived, before its bytes
move; they move while it is LENT.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from titan_grpo.errors import ProtocolError

# The fence.


@dataclass(frozen=True, slots=True)
class EngineState:
    """State of the fence. ``in_force``: the (run, epoch) admitted last, ``term``: its term;
    ``run``, ``version``, ``fingerprint``: of the last successful load.

    ``intact`` is false from a load that failed half-way until a load succeeds. ``granted``: (run,
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


@dataclass(frozen=True, slots=True)
class OpenEpoch:
    """A trainer's lane, or its pause guard, opens an epoch."""

    run_id: str
    epoch: int
    term: int


@dataclass(frozen=True, slots=True)
class CommitRequested:
    """A trainer orders the load of a version."""

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


FenceEvent = OpenEpoch | CommitRequested | Loaded
FenceOutcome = tuple[EngineState, str]
"""The next state, and the reason of a refusal, empty without one."""


def _open_epoch(s: EngineState, e: OpenEpoch) -> FenceOutcome:
    run, epoch = s.in_force
    later = not run or (e.term, e.run_id) > (s.term, run)
    if e.epoch > epoch if e.run_id == run else later:
        # A pause guard sends term 1, whatever its lane's term: its epoch must not lower the term.
        term = max(e.term, s.term) if e.run_id == run else e.term
        return replace(s, in_force=(e.run_id, e.epoch), term=term), ""
    if e.run_id != run:
        # Without epochs: a lane reports a text only once, and its next attempt has another epoch.
        return s, (
            f"run {run} (term {s.term}) is in force, and run {e.run_id} is not newer: end run"
            f" {run}, or restart the server if it is over"
        )
    return s, (
        f"epoch {e.epoch} is not newer than epoch {epoch}, which is in force for run {run}: its"
        " pause guard, or another of its lanes under another name, has the server"
    )


def _commit_requested(s: EngineState, e: CommitRequested) -> FenceOutcome:
    run, epoch = s.in_force
    if (e.run_id, e.epoch) != (run, epoch):
        return s, (
            f"commit for epoch {e.epoch} of run {e.run_id}, but epoch {epoch} of run {run} is in"
            " force"
        )
    # The same version may come again: that repairs a load that failed half-way.
    if e.run_id == s.run and e.version < s.version:
        return s, f"version {e.version} is older than version {s.version}, which the engine holds"
    if s.granted is not None:
        return s, f"version {s.granted[1]} of run {s.granted[0]} is being loaded"
    return replace(s, granted=(e.run_id, e.version)), ""


def fence(s: EngineState, event: FenceEvent) -> FenceOutcome:
    """Return the next state and the reason of a refusal. The driver starts a receiver for an
    admitted epoch; a commit that is not refused is granted.

    Raises ProtocolError for a Loaded without a granted commit, or with ``ok`` but not ``intact``.
    """
    match event:
        case OpenEpoch():
            return _open_epoch(s, event)
        case CommitRequested():
            return _commit_requested(s, event)
        case Loaded(run_id, version, fingerprint, ok, intact):
            if s.granted != (run_id, version):
                raise ProtocolError(
                    f"event {event!r} is not about a commit that was granted: {s!r}"
                )
            if ok and not intact:
                raise ProtocolError(
                    f"a load that went well leaves whole weights: {event!r} reached {s!r}"
                )
            if not ok:
                # A load that touched no weight leaves broken weights broken.
                return replace(s, intact=s.intact and intact, granted=None), ""
            return EngineState(s.in_force, s.term, run_id, version, fingerprint), ""


# The staging memory.


class Phase(Enum):
    """Use of the staging memory."""

    EMPTY = "empty"
    WRITING = "writing"
    STAGED = "staged"
    LENT = "lent"


@dataclass(frozen=True, slots=True)
class Staging:
    """State of the staging memory. ``number``, ``version``: of the last transfer that began;
    ``fingerprint``: of the staged version."""

    streamed: bool = False
    phase: Phase = Phase.EMPTY
    number: int = 0
    version: int = -1
    fingerprint: str = ""

    def __repr__(self) -> str:
        what = "" if self.phase is Phase.EMPTY else f" v{self.version}"
        streamed = " streamed" if self.streamed else ""
        return (
            f"<{self.phase.value}{what} {self.fingerprint or '-'}, transfer"
            f" {self.number}{streamed}>"
        )


@dataclass(frozen=True, slots=True)
class Begin:
    """A transfer needs the memory."""

    number: int
    version: int


@dataclass(frozen=True, slots=True)
class Arrived:
    """The transfer ended with this check of its bytes (streamed: of its digests only)."""

    number: int
    version: int
    fingerprint: str
    ok: bool


@dataclass(frozen=True, slots=True)
class LendRequested:
    """The engine is about to load this version."""

    number: int
    version: int
    fingerprint: str


@dataclass(frozen=True, slots=True)
class Returned:
    """The engine reported the end of a commit; of a refused one too, for which nothing was lent."""


@dataclass(frozen=True, slots=True)
class Spent:
    """Streamed: all bytes went through the window, or no more will come."""


StagingEvent = Begin | Arrived | LendRequested | Returned | Spent
StagingOutcome = tuple[Staging, str]
"""The next state, and the reason of a refusal, empty without one."""


def _begin(s: Staging, e: Begin) -> StagingOutcome:
    if e.number <= s.number:
        raise ProtocolError(f"transfers count up: {e!r} reached {s!r}")
    return Staging(s.streamed, Phase.WRITING, e.number, e.version), ""


def _begin_lent(s: Staging, _: Any) -> StagingOutcome:
    return s, "the engine still loads the previous version; the next one cannot be received over it"


def _arrived(s: Staging, e: Arrived) -> StagingOutcome:
    if (e.number, e.version) != (s.number, s.version):
        raise ProtocolError(f"event {e!r} is not about the transfer under way: {s!r}")
    if not e.ok:
        return _emptied(s), ""
    return replace(s, phase=Phase.STAGED, fingerprint=e.fingerprint), ""


def _lend(s: Staging, e: LendRequested) -> StagingOutcome:
    asked, here = (e.number, e.version, e.fingerprint), (s.number, s.version, s.fingerprint)
    if asked != here:
        return s, f"commit asks for (number, version, fingerprint) {asked}, staged is {here}"
    return replace(s, phase=Phase.LENT), ""


def _lend_nothing(s: Staging, e: LendRequested) -> StagingOutcome:
    return s, f"version {e.version} is not staged here: nothing is, or a transfer is under way"


def _lend_lent(s: Staging, _: Any) -> StagingOutcome:
    return s, f"version {s.version} is lent already"


def _returned(s: Staging, _: Any) -> StagingOutcome:
    # A whole image can be committed again; a window's bytes are gone.
    return (_emptied(s) if s.streamed else replace(s, phase=Phase.STAGED)), ""


def _spent(s: Staging, _: Any) -> StagingOutcome:
    return _emptied(s), ""


def _same(s: Staging, _: Any) -> StagingOutcome:
    return s, ""


def _emptied(s: Staging) -> Staging:
    return replace(s, phase=Phase.EMPTY, version=-1, fingerprint="")


_Transition = Callable[[Staging, Any], StagingOutcome]

TRANSITIONS: dict[Phase, dict[type, _Transition]] = {
    Phase.EMPTY: {
        Begin: _begin,
        LendRequested: _lend_nothing,
        Returned: _same,
        Spent: _same,
    },
    # A transfer that ends without an answer leaves WRITING behind; the next one begins over it.
    Phase.WRITING: {
        Begin: _begin,
        Arrived: _arrived,
        LendRequested: _lend_nothing,
        Returned: _same,
    },
    Phase.STAGED: {
        Begin: _begin,
        LendRequested: _lend,
        Returned: _same,
        Spent: _spent,
    },
    Phase.LENT: {
        Begin: _begin_lent,
        LendRequested: _lend_lent,
        Returned: _returned,
        Spent: _same,
    },
}


def staging(s: Staging, event: StagingEvent) -> StagingOutcome:
    """Return the next state and the reason of a refusal. Raises ProtocolError, and changes nothing,
    for an event that the state does not list."""
    transition = TRANSITIONS[s.phase].get(type(event))
    if transition is None:
        raise ProtocolError(f"event {event!r} is not listed for staging {s!r}")
    return transition(s, event)
