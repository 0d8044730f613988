"""One server's lane: a pure state machine. (state, event) -> (state, action); the driver performs the action.

::

    IDLE -> CONNECTING -> READY -> SENDING v -> COMMITTING v -> READY
    any of them, on error or deadline -> BACKOFF -> CONNECTING (a new epoch)
    any of them, on stop -> STOPPED

Each action yields exactly one further event, so a lane is a straight loop: ``event = perform(action)``. A transfer is
retried whole, in a new epoch, never call by call. SENDING covers the bytes and the receiver's digests over them, which
arrive as one answer.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from titan_grpo.errors import ProtocolError


class Phase(Enum):
    """Where a lane stands."""

    IDLE = "idle"
    CONNECTING = "connecting"
    READY = "ready"
    SENDING = "sending"
    COMMITTING = "committing"
    BACKOFF = "backoff"
    STOPPED = "stopped"


@dataclass(frozen=True, slots=True)
class Lane:
    """State of one lane. ``epoch`` counts connections, ``failures`` those since the last commit."""

    phase: Phase = Phase.IDLE
    epoch: int = 0
    version: int | None = None
    failures: int = 0

    def __repr__(self) -> str:
        version = "" if self.version is None else f" v{self.version}"
        failures = f" failures {self.failures}" if self.failures else ""
        return f"<{self.phase.value}{version} epoch {self.epoch}{failures}>"


# Events: what an action came back with.


@dataclass(frozen=True, slots=True)
class Started:
    """The run begins, or the server was added."""


@dataclass(frozen=True, slots=True)
class Connected:
    """The receiver joined this epoch and accepted the manifest."""


@dataclass(frozen=True, slots=True)
class Newer:
    """A complete image newer than what the server holds is pinned for this lane."""

    version: int


@dataclass(frozen=True, slots=True)
class Staged:
    """All bytes arrived and the receiver's digests match."""

    version: int


@dataclass(frozen=True, slots=True)
class Committed:
    """The server's read-back shows the version."""

    version: int


@dataclass(frozen=True, slots=True)
class Failed:
    """An error or a deadline."""

    reason: str


@dataclass(frozen=True, slots=True)
class Rested:
    """The backoff is over."""


@dataclass(frozen=True, slots=True)
class Stopped:
    """The run ends, or the server was removed."""


# Actions: what the driver does next.


@dataclass(frozen=True, slots=True)
class Connect:
    """Open a communicator of its own for ``epoch`` and have the server's receiver join it."""

    epoch: int


@dataclass(frozen=True, slots=True)
class AwaitNewer:
    """Wait until a newer complete image exists, and pin it. Read the server's label back now and then."""


@dataclass(frozen=True, slots=True)
class Send:
    """Replicate the pinned image into the server's staging memory."""

    version: int


@dataclass(frozen=True, slots=True)
class Commit:
    """Pause, load, label, resume, read back."""

    version: int


@dataclass(frozen=True, slots=True)
class Rest:
    """Drop pin and communicator, then wait ``failures``-dependent seconds."""

    failures: int


@dataclass(frozen=True, slots=True)
class Leave:
    """Say goodbye to the receiver and close everything."""


Event = Started | Connected | Newer | Staged | Committed | Failed | Rested | Stopped
Action = Connect | AwaitNewer | Send | Commit | Rest | Leave


def _start(s: Lane, _: Any) -> tuple[Lane, Action]:
    epoch = s.epoch + 1
    return replace(s, phase=Phase.CONNECTING, epoch=epoch), Connect(epoch)


def _connected(s: Lane, _: Any) -> tuple[Lane, Action]:
    return replace(s, phase=Phase.READY), AwaitNewer()


def _newer(s: Lane, e: Newer) -> tuple[Lane, Action]:
    return replace(s, phase=Phase.SENDING, version=e.version), Send(e.version)


def _staged(s: Lane, e: Staged) -> tuple[Lane, Action]:
    _same(s, e.version)
    return replace(s, phase=Phase.COMMITTING), Commit(e.version)


def _committed(s: Lane, e: Committed) -> tuple[Lane, Action]:
    _same(s, e.version)
    return replace(s, phase=Phase.READY, version=None, failures=0), AwaitNewer()


def _failed(s: Lane, _: Any) -> tuple[Lane, Action]:
    failures = s.failures + 1
    return replace(s, phase=Phase.BACKOFF, version=None, failures=failures), Rest(failures)


def _stopped(s: Lane, _: Any) -> tuple[Lane, Action]:
    return replace(s, phase=Phase.STOPPED, version=None), Leave()


def _same(s: Lane, version: int) -> None:
    if s.version != version:
        raise ProtocolError(f"an answer for version {version} reached lane {s!r}")


_Transition = Callable[[Lane, Any], tuple[Lane, Action]]

TRANSITIONS: dict[Phase, dict[type, _Transition]] = {
    Phase.IDLE: {Started: _start, Stopped: _stopped},
    Phase.CONNECTING: {Connected: _connected, Failed: _failed, Stopped: _stopped},
    Phase.READY: {Newer: _newer, Failed: _failed, Stopped: _stopped},
    Phase.SENDING: {Staged: _staged, Failed: _failed, Stopped: _stopped},
    Phase.COMMITTING: {Committed: _committed, Failed: _failed, Stopped: _stopped},
    Phase.BACKOFF: {Rested: _start, Stopped: _stopped},
    Phase.STOPPED: {},
}


def step(state: Lane, event: Event) -> tuple[Lane, Action]:
    """The next state and what to do. An event that the state does not list raises ProtocolError and changes nothing."""
    transition = TRANSITIONS[state.phase].get(type(event))
    if transition is None:
        raise ProtocolError(f"event {event!r} is not listed for lane {state!r}")
    return transition(state, event)


def backoff_s(failures: int, first_s: float, most_s: float) -> float:
    """Seconds to rest after the ``failures``-th failure in a row: doubling, bounded.

    >>> [backoff_s(n, 0.5, 3.0) for n in (1, 2, 3, 4)]
    [0.5, 1.0, 2.0, 3.0]
    """
    return float(min(most_s, first_s * 2 ** min(failures - 1, 30)))
