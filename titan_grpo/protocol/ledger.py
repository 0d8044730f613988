"""The trainer's record of what each server holds. A pure table; only a read-back makes it HOLDS.

::

    UNKNOWN --Receiving--> RECEIVING v --Committing--> COMMITTING v --Holds--> HOLDS v --> ..
       ^                        | TransferFailed: back to what it held (HOLDS or UNKNOWN)
       `-- Forgotten: a failure in or after the commit, a restart, a lost answer
    QUARANTINED: half loaded; GONE: removed from the run"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

from titan_grpo.errors import ProtocolError


class Standing(Enum):
    """What is known about one server."""

    UNKNOWN = "unknown"
    HOLDS = "holds"
    RECEIVING = "receiving"
    COMMITTING = "committing"
    QUARANTINED = "quarantined"
    GONE = "gone"


@dataclass(frozen=True, slots=True)
class Entry:
    """One server's line. ``held`` is the version it serves, read back from it; ``incoming`` the one
    on its way."""

    standing: Standing = Standing.UNKNOWN
    held: int | None = None
    incoming: int | None = None

    def __repr__(self) -> str:
        held = "?" if self.held is None else f"v{self.held}"
        incoming = "" if self.incoming is None else f" <- v{self.incoming}"
        return f"{self.standing.value}({held}{incoming})"

    @property
    def accepting(self) -> bool:
        """Whether it may be given new rollouts: it serves one known version and no commit is
        running.

        A server that receives goes on serving what it holds. During a commit the version of a new
        request would be ambiguous, so it takes none for that moment.
        """
        return self.held is not None and self.standing in (Standing.HOLDS, Standing.RECEIVING)

    @property
    def committing(self) -> int | None:
        """The version whose commit runs: the server may serve it already, from some moment between
        the pause and the read-back on."""
        return self.incoming if self.standing is Standing.COMMITTING else None


@dataclass(frozen=True, slots=True)
class Receiving:
    """A transfer of ``version`` starts; what the server serves does not change."""

    version: int


@dataclass(frozen=True, slots=True)
class Committing:
    """The staged version is about to be loaded: from here on an error leaves the server UNKNOWN."""


@dataclass(frozen=True, slots=True)
class Holds:
    """The server's own read-back says ``version``; the only way to HOLDS."""

    version: int


@dataclass(frozen=True, slots=True)
class TransferFailed:
    """The transfer ended before the commit began: the server still serves what it held."""


@dataclass(frozen=True, slots=True)
class Forgotten:
    """An uncertain answer, a restart, a lost connection: nothing is known until a read-back."""


@dataclass(frozen=True, slots=True)
class Quarantined:
    """Half loaded: it gets no requests until a full sync has replaced every tensor."""


@dataclass(frozen=True, slots=True)
class Left:
    """The server was removed from the run."""


@dataclass(frozen=True, slots=True)
class Came:
    """The server was added to the run, for the first time or again."""


Event = Receiving | Committing | Holds | TransferFailed | Forgotten | Quarantined | Left | Came


def _receiving(e: Entry, event: Receiving) -> Entry:
    if e.held is not None and event.version <= e.held:
        raise ProtocolError(
            f"a server's version never goes back: {e!r} was to receive v{event.version}"
        )
    standing = Standing.QUARANTINED if e.standing is Standing.QUARANTINED else Standing.RECEIVING
    return replace(e, standing=standing, incoming=event.version)


def _committing(e: Entry, _: Any) -> Entry:
    if e.incoming is None:
        raise ProtocolError(f"nothing is on its way to commit: {e!r}")
    return replace(e, standing=Standing.COMMITTING)


def _holds(e: Entry, event: Holds) -> Entry:
    if e.held is not None and event.version < e.held:
        raise ProtocolError(
            f"a server's version never goes back: {e!r} was read back as v{event.version}"
        )
    return Entry(Standing.HOLDS, held=event.version)


def _transfer_failed(e: Entry, _: Any) -> Entry:
    if e.standing is Standing.QUARANTINED:
        return replace(e, incoming=None)
    return Entry(Standing.HOLDS if e.held is not None else Standing.UNKNOWN, held=e.held)


def _to(standing: Standing) -> Callable[[Entry, Any], Entry]:
    return lambda _e, _event: Entry(standing)


_ALWAYS: dict[type, Callable[[Entry, Any], Entry]] = {
    Forgotten: _to(Standing.UNKNOWN),
    Quarantined: _to(Standing.QUARANTINED),
    Left: _to(Standing.GONE),
}

TRANSITIONS: dict[Standing, dict[type, Callable[[Entry, Any], Entry]]] = {
    Standing.UNKNOWN: _ALWAYS | {Receiving: _receiving, Holds: _holds},
    Standing.HOLDS: _ALWAYS | {Receiving: _receiving, Holds: _holds},
    Standing.RECEIVING: _ALWAYS | {Committing: _committing, TransferFailed: _transfer_failed},
    Standing.COMMITTING: _ALWAYS | {Holds: _holds},
    Standing.QUARANTINED: (
        _ALWAYS | {Receiving: _receiving, Committing: _committing, TransferFailed: _transfer_failed}
    ),
    # what a lane of a removed server still says on its way out changes nothing
    Standing.GONE: (
        {Came: _to(Standing.UNKNOWN), Left: _to(Standing.GONE)}
        | dict.fromkeys(
            (Receiving, Committing, Holds, Forgotten, Quarantined, TransferFailed),
            _to(Standing.GONE),
        )
    ),
}


def step(entry: Entry, event: Event) -> Entry:
    """The next line.

    An event that the standing does not list, or a version that would go back, raises ProtocolError
    and changes nothing.
    """
    transition = TRANSITIONS[entry.standing].get(type(event))
    if transition is None:
        raise ProtocolError(f"event {event!r} is not listed for {entry!r}")
    return transition(entry, event)


@dataclass(frozen=True, slots=True)
class Lag:
    """When a fleet has fallen too far behind to go on.

    Rollouts bound this by themselves: without a commit the trainer soon has no groups that are
    fresh enough, and stops by its deadline for them. On recorded rollouts nothing else would ever
    stop a run whose servers are all dead. ``held``: highest version that each server was read back
    with so far; ``since``: the trainer's version when the last of them rose.
    """

    held: Mapping[str, int] = field(default_factory=dict)
    since: int | None = None

    def at(self, version: int, held: Mapping[str, int]) -> tuple["Lag", int]:
        """At a boundary with the trainer at ``version``: the next state, and for how many versions
        no server has committed anything. A server that commits counts, however old its version is.

        >>> lag, _ = Lag().at(4, {"a": 4})
        >>> lag.at(6, {"a": 4})[1], lag.at(6, {"a": 5})[1]
        (2, 0)
        """
        if held != self.held or self.since is None:
            return Lag(dict(held), version), 0
        return self, version - self.since
