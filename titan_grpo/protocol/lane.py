"""One server's lane: a pure state machine. (state, event) -> (state, actions); the driver performs
the actions.

::

    IDLE -> CONNECTING -> READY -> SENDING v -> PAUSING v -> LOADING v -> LABELLING v -> RESUMING v
         -> READING v -> READY
    any of them, on error or deadline -> BACKOFF -> CONNECTING (a new epoch)
    any of them outside a commit, on stop -> STOPPED

The last action is the work: it yields exactly one event, so a lane is a straight loop. The actions
before it (``Note``, ``Release``) yield none. A failed transfer is retried whole, in a new epoch,
never call by call. Staged, SENDING covers the bytes and the receiver's digest check, which come
back as one answer. Streamed, SENDING only opens the window; the bytes move in LOADING.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from titan_grpo.errors import ProtocolError
from titan_grpo.protocol.messages import Entry, Standing


class Phase(Enum):
    """State of a lane."""

    IDLE = "idle"
    CONNECTING = "connecting"
    READY = "ready"
    SENDING = "sending"
    PAUSING = "pausing"
    LOADING = "loading"
    LABELLING = "labelling"
    RESUMING = "resuming"
    READING = "reading"
    BACKOFF = "backoff"
    STOPPED = "stopped"


COMMITTING = frozenset(
    {Phase.PAUSING, Phase.LOADING, Phase.LABELLING, Phase.RESUMING, Phase.READING}
)
"""Phases of a commit: a lane that stopped in one of them could leave its server paused."""


def wire_epoch(epoch: int) -> int:
    """Return the epoch that messages carry for a lane's ``epoch``-th connection: an even number.
    Odd numbers belong to the pause guard.

    >>> wire_epoch(1), wire_epoch(2)
    (2, 4)
    """
    return 2 * epoch


AT_WORK = 8
"""Number of lanes that make the calls of a commit at once (sync/turns.py): enough to keep the sync
process busy while servers answer. With more, each paused server would wait for more lanes' calls.
"""

TURN_S = 0.25
"""Seconds after which a lane's turn to make these calls ends by itself: it waits for its server,
and a server that stands still must not delay the other lanes."""

CALLS = {
    Phase.CONNECTING: 10,
    Phase.PAUSING: 4,
    Phase.LOADING: 5,
    Phase.LABELLING: 4,
    Phase.RESUMING: 3,
    Phase.READING: 3,
}
"""Most calls of each phase, over all engines. The receiver's answers count as calls; each has the
deadline of a commit call. Connecting: hello, the reads of label and pause, the recovery steps, the
call to map memory; the questions of a greeting (which engine it is, a stock server's options) have
shorter deadlines, and connect_deadline_s beside these (sync.pause_guard.deadlines_of). Pausing: the
label, the pause, two that drop the KV cache. Loading: vLLM's start, the end of an update that a
dead lane left open, start, load, the report. Labelling: a ping's two answers, the end; without our
plugin a refusal, SGLang's end and label. Resuming: after a standstill a ping's two answers, the
resume. Reading: the label, a ping's two answers."""


def step_s(phase: Phase, call_s: float, transfer_s: float = 0.0) -> float:
    """Return the most seconds that a phase may take. ``transfer_s``: deadline of the transfer,
    which streamed is part of the load.

    >>> step_s(Phase.LOADING, 10.0, 60.0)
    110.0
    """
    return CALLS[phase] * call_s + (transfer_s if phase is Phase.LOADING else 0.0)


def commit_s(call_s: float, transfer_s: float) -> float:
    """Return the most seconds that a commit may take, from the pause to the read-back."""
    return sum(step_s(phase, call_s, transfer_s) for phase in COMMITTING)


class Outcome(Enum):
    """What the engine holds after a load. Its label must say the same."""

    NEW = "new"
    OLD = "old"
    BROKEN = "broken"


_UNKNOWN, _QUARANTINED = Entry(), Entry(Standing.QUARANTINED)


@dataclass(frozen=True, slots=True)
class Lane:
    """State of one lane. ``epoch`` counts connections. ``streamed``: the image stays pinned until
    the load ends.

    ``term`` orders the runs on this server (protocol.server). ``admitted``: the server has admitted
    this run once, so its term does not rise any more. ``entry``: the server's ledger entry.
    """

    phase: Phase = Phase.IDLE
    epoch: int = 0
    version: int | None = None
    outcome: Outcome | None = None
    streamed: bool = False
    term: int = 1
    admitted: bool = False
    entry: Entry = _UNKNOWN

    def __repr__(self) -> str:
        version = "" if self.version is None else f" v{self.version}"
        outcome = "" if self.outcome is None else f" {self.outcome.value}"
        return f"<{self.phase.value}{version}{outcome} epoch {self.epoch}>"

    @property
    def pinned(self) -> bool:
        """Whether an image is pinned for this lane."""
        return self.phase is Phase.SENDING or (
            self.streamed and self.phase in (Phase.PAUSING, Phase.LOADING)
        )

    @property
    def stoppable(self) -> bool:
        """Whether ``Stopped`` is listed: not in a commit, which has its own deadlines."""
        return self.phase not in COMMITTING and self.phase is not Phase.STOPPED


# Events: results of the work.


@dataclass(frozen=True, slots=True)
class Started:
    """Start of the run, or the server was added to it."""


@dataclass(frozen=True, slots=True)
class Connected:
    """The receiver joined this epoch and the server is settled.

    ``held``: the version of this run that the engine holds and its label shows, else None.
    ``intact``: its weights are one whole version.
    """

    held: int | None
    intact: bool


@dataclass(frozen=True, slots=True)
class Outranked:
    """The server refused the epoch: another run is in force there, with ``term``. ``earlier``: that
    run started before this one. Its id or term outranks ours all the same: a clock is wrong."""

    term: int
    earlier: bool


@dataclass(frozen=True, slots=True)
class Newer:
    """A complete image newer than what the server holds is pinned for this lane."""

    version: int


@dataclass(frozen=True, slots=True)
class Staged:
    """All bytes arrived and the receiver's digests match; streamed: the window is ready."""

    version: int


@dataclass(frozen=True, slots=True)
class Paused:
    """Generation is paused."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """The engine's report. ``ok``: it holds ``version``; otherwise ``intact`` tells whether it
    still holds the previous one."""

    version: int
    ok: bool
    intact: bool


@dataclass(frozen=True, slots=True)
class Labelled:
    """The server shows what it holds."""


@dataclass(frozen=True, slots=True)
class Resumed:
    """Generation runs again."""


@dataclass(frozen=True, slots=True)
class ReadBack:
    """The version of this run that the server's label shows; None: any other label."""

    version: int | None


@dataclass(frozen=True, slots=True)
class Failed:
    """An error or a deadline."""


@dataclass(frozen=True, slots=True)
class Rested:
    """The backoff is over."""


@dataclass(frozen=True, slots=True)
class Stopped:
    """End of the run, or the server was removed from it."""


Event = (
    Started
    | Connected
    | Outranked
    | Newer
    | Staged
    | Paused
    | Loaded
    | Labelled
    | Resumed
    | ReadBack
    | Failed
    | Rested
    | Stopped
)  # fmt: skip


# Actions that yield no event.


@dataclass(frozen=True, slots=True)
class Note:
    """Report the server's ledger entry."""

    entry: Entry


@dataclass(frozen=True, slots=True)
class Release:
    """Unpin the image."""


# Work: each yields one event.


@dataclass(frozen=True, slots=True)
class Connect:
    """Open a connection for ``epoch``, have the server's receiver join it, settle the server."""

    epoch: int
    term: int


@dataclass(frozen=True, slots=True)
class AwaitNewer:
    """Wait for a newer complete image, and pin it. Check the server's label from time to time."""


@dataclass(frozen=True, slots=True)
class Send:
    """Replicate the pinned image into the server's staging memory."""

    version: int


@dataclass(frozen=True, slots=True)
class Pause:
    """Freeze generation; running requests keep their state."""


@dataclass(frozen=True, slots=True)
class Load:
    """Have the engine load the version."""

    version: int


@dataclass(frozen=True, slots=True)
class SetLabel:
    """Set the label that says what the engine holds: ``version``, the label from before the commit,
    or UNUSABLE."""

    outcome: Outcome
    version: int


@dataclass(frozen=True, slots=True)
class Resume:
    """Resume generation."""


@dataclass(frozen=True, slots=True)
class ReadLabel:
    """Read the server's label."""


@dataclass(frozen=True, slots=True)
class Rest:
    """Close the connection, then wait before the next one."""


@dataclass(frozen=True, slots=True)
class Leave:
    """Send the receiver a "bye" order and close everything."""


Work = Connect | AwaitNewer | Send | Pause | Load | SetLabel | Resume | ReadLabel | Rest | Leave
Action = Note | Release | Work
_Next = tuple[Lane, Work]


def _connect(s: Lane, _: Any) -> _Next:
    epoch = s.epoch + 1
    return replace(s, phase=Phase.CONNECTING, epoch=epoch), Connect(epoch, s.term)


def _connected(s: Lane, e: Connected) -> _Next:
    entry = _UNKNOWN if e.intact else _QUARANTINED
    if e.intact and e.held is not None:
        entry = Entry(Standing.HOLDS, e.held)
    return replace(s, phase=Phase.READY, admitted=True, entry=entry), AwaitNewer()


def _outranked(s: Lane, e: Outranked) -> _Next:
    if s.admitted or not e.earlier:
        # A newer run has the server: do not take it back with a higher term.
        return _rest(s, _UNKNOWN)
    return _connect(replace(s, term=e.term + 1), None)


def _newer(s: Lane, e: Newer) -> _Next:
    held, standing = s.entry.held, s.entry.standing
    if held is not None and e.version <= held:
        raise ProtocolError(
            f"a server's version never goes back: {s.entry!r} was to receive v{e.version}"
        )
    standing = standing if standing is Standing.QUARANTINED else Standing.RECEIVING
    entry = Entry(standing, held, e.version)
    return replace(s, phase=Phase.SENDING, version=e.version, entry=entry), Send(e.version)


def _staged(s: Lane, e: Staged) -> _Next:
    _same(s, e.version)
    entry = replace(s.entry, standing=Standing.COMMITTING)
    return replace(s, phase=Phase.PAUSING, entry=entry), Pause()


def _paused(s: Lane, _: Any) -> _Next:
    return replace(s, phase=Phase.LOADING), Load(_version(s))


def _loaded(s: Lane, e: Loaded) -> _Next:
    _same(s, e.version)
    outcome = Outcome.NEW if e.ok else Outcome.OLD if e.intact else Outcome.BROKEN
    return replace(s, phase=Phase.LABELLING, outcome=outcome), SetLabel(outcome, e.version)


def _labelled(s: Lane, _: Any) -> _Next:
    if s.outcome is Outcome.BROKEN:
        return _rest(s, _QUARANTINED)  # no resume: a half-loaded version must not serve
    return replace(s, phase=Phase.RESUMING), Resume()


def _resumed(s: Lane, _: Any) -> _Next:
    if s.outcome is Outcome.OLD:
        return _rest(s, _UNKNOWN)
    return replace(s, phase=Phase.READING), ReadLabel()


def _read_back(s: Lane, e: ReadBack) -> _Next:
    if e.version != s.version:
        return _rest(s, _UNKNOWN)
    entry = Entry(Standing.HOLDS, _version(s))
    return replace(s, phase=Phase.READY, version=None, outcome=None, entry=entry), AwaitNewer()


def _failed(s: Lane, _: Any) -> _Next:
    return _rest(s, _UNKNOWN)


def _transfer_failed(s: Lane, _: Any) -> _Next:
    return _rest(s, _before_transfer(s.entry))


def _label_failed(s: Lane, _: Any) -> _Next:
    return _rest(s, _QUARANTINED if s.outcome is Outcome.BROKEN else _UNKNOWN)


def _stopped(s: Lane, _: Any) -> _Next:
    entry = _before_transfer(s.entry) if s.phase is Phase.SENDING else s.entry
    return replace(s, phase=Phase.STOPPED, version=None, entry=entry), Leave()


def _rest(s: Lane, entry: Entry) -> _Next:
    return replace(s, phase=Phase.BACKOFF, version=None, outcome=None, entry=entry), Rest()


def _before_transfer(entry: Entry) -> Entry:
    """Return the entry after a transfer that did not reach its commit: the server still serves what
    it held."""
    if entry.standing is Standing.QUARANTINED:
        return _QUARANTINED
    return _UNKNOWN if entry.held is None else Entry(Standing.HOLDS, entry.held)


def _same(s: Lane, version: int) -> None:
    if s.version != version:
        raise ProtocolError(f"an answer for version {version} reached lane {s!r}")


def _version(s: Lane) -> int:
    if s.version is None:
        raise ProtocolError(f"lane {s!r} has no version on its way")
    return s.version


_Transition = Callable[[Lane, Any], _Next]

TRANSITIONS: dict[Phase, dict[type, _Transition]] = {
    Phase.IDLE: {Started: _connect, Stopped: _stopped},
    Phase.CONNECTING: {
        Connected: _connected,
        Outranked: _outranked,
        Failed: _failed,
        Stopped: _stopped,
    },
    Phase.READY: {Newer: _newer, Failed: _failed, Stopped: _stopped},
    Phase.SENDING: {Staged: _staged, Failed: _transfer_failed, Stopped: _stopped},
    Phase.PAUSING: {Paused: _paused, Failed: _failed},
    Phase.LOADING: {Loaded: _loaded, Failed: _failed},
    Phase.LABELLING: {Labelled: _labelled, Failed: _label_failed},
    Phase.RESUMING: {Resumed: _resumed, Failed: _failed},
    Phase.READING: {ReadBack: _read_back, Failed: _failed},
    Phase.BACKOFF: {Rested: _connect, Stopped: _stopped},
    Phase.STOPPED: {},
}


def step(state: Lane, event: Event) -> tuple[Lane, tuple[Action, ...]]:
    """Return the next state and the actions: ``Release`` once the image is not read any more,
    ``Note`` if the entry changed, or was found out anew, then the work.

    Raises ProtocolError, and changes nothing, for an event that the state does not list, and for a
    version that would go back.
    """
    transition = TRANSITIONS[state.phase].get(type(event))
    if transition is None:
        raise ProtocolError(f"event {event!r} is not listed for lane {state!r}")
    after, work = transition(state, event)
    release = (Release(),) if state.pinned and not after.pinned else ()
    # Unchanged too: the lane of a restarted process does not know what was noted before it.
    anew = after.phase in (Phase.READY, Phase.BACKOFF) or isinstance(event, Outranked)
    note = (Note(after.entry),) if anew or after.entry != state.entry else ()
    return after, (*release, *note, work)


# For observers: the pause guard and fault injection.


class Point(Enum):
    """A place between two steps of the protocol. A lane passes them in this order, from BEGIN on
    once per version."""

    GREET = "greet"
    """A new epoch's hello is next."""

    CONNECTED = "connected"
    """The receiver joined and took the manifest, and the server is settled."""

    BEGIN = "begin"
    """The order that announces a version is next."""

    EXTENT = "extent"
    """A bucket was transferred; passed once per bucket."""

    SENT = "sent"
    """All buckets were transferred; the receiver's answer is next."""

    STAGED = "staged"
    """The receiver answered that the version is ready; the commit is next."""

    PAUSE = "pause"
    """The call that pauses generation is next."""

    LOAD = "load"
    """Generation is paused; the load is next."""

    LABEL = "label"
    """The load ended; the label is next."""

    RESUME = "resume"
    """The label is set; the call that resumes is next."""

    RESUMED = "resumed"
    """Generation runs again; the read-back is next."""

    HELD = "held"
    """The read-back shows the version."""


@dataclass(frozen=True, slots=True)
class LaneEvent:
    """One lane at one point. ``version`` is -1 at GREET and CONNECTED."""

    point: Point
    url: str
    run_id: str
    epoch: int
    version: int = -1


Observer = Callable[[LaneEvent], None]
"""Callback of the lane's thread at every point; must not block. The lane treats a PeerError from it
as a failure of the server."""


def no_observer(_: LaneEvent) -> None:
    """Observer that ignores all events."""
