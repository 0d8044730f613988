"""The trainer's record of what each server holds. A pure table; only a read-back leads to HOLDS.

::

    UNKNOWN --Receiving--> RECEIVING v --Committing--> COMMITTING v --Holds--> HOLDS v --> ..
       ^                        | TransferFailed: back to HOLDS, or UNKNOWN if it held nothing known
       `-- Forgotten: a failure in or after the commit, a restart, a lost answer
    QUARANTINED: half loaded; GONE: removed from the run"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

from titan_grpo.errors import ProtocolError


class Standing(Enum):
    """State of one server in the ledger."""

    UNKNOWN = "unknown"
    HOLDS = "holds"
    RECEIVING = "receiving"
    COMMITTING = "committing"
    QUARANTINED = "quarantined"
    GONE = "gone"


@dataclass(frozen=True, slots=True)
class Entry:
    """One server's entry. ``held``: the version that it serves, as read back from it; ``incoming``:
    the version being transferred or committed."""

    standing: Standing = Standing.UNKNOWN
    held: int | None = None
    incoming: int | None = None

    def __repr__(self) -> str:
        held = "?" if self.held is None else f"v{self.held}"
        incoming = "" if self.incoming is None else f" <- v{self.incoming}"
        return f"{self.standing.value}({held}{incoming})"

    @property
    def accepting(self) -> bool:
        """Whether the server may get new rollouts: it serves one known version and no commit runs.

        A receiving server still serves what it holds. During a commit the version of a new request
        would be ambiguous, so the server gets none.
        """
        return self.held is not None and self.standing in (Standing.HOLDS, Standing.RECEIVING)

    @property
    def committing(self) -> int | None:
        """The version whose commit runs, else None. The server begins to serve it at an unknown
        moment between the pause and the read-back."""
        return self.incoming if self.standing is Standing.COMMITTING else None


@dataclass(frozen=True, slots=True)
class Receiving:
    """A transfer of ``version`` starts; what the server serves does not change."""

    version: int


@dataclass(frozen=True, slots=True)
class Committing:
    """The staged version is about to be loaded: any later error leaves the server UNKNOWN."""


@dataclass(frozen=True, slots=True)
class Holds:
    """The read-back shows ``version``."""

    version: int


@dataclass(frozen=True, slots=True)
class TransferFailed:
    """The transfer ended before the commit began: the server still serves what it held."""


@dataclass(frozen=True, slots=True)
class Forgotten:
    """A restart, an uncertain answer or a lost connection: what the server holds is unknown until
    the next read-back."""


@dataclass(frozen=True, slots=True)
class Quarantined:
    """The server is half loaded: no requests until a full sync has replaced every tensor."""


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
    # The lane of a removed server may still report while it ends.
    Standing.GONE: (
        {Came: _to(Standing.UNKNOWN), Left: _to(Standing.GONE)}
        | dict.fromkeys(
            (Receiving, Committing, Holds, Forgotten, Quarantined, TransferFailed),
            _to(Standing.GONE),
        )
    ),
}


def step(entry: Entry, event: Event) -> Entry:
    """Return the next entry.

    Raises ProtocolError, and changes nothing, for an event that the standing does not list and for
    a version that would go back.
    """
    transition = TRANSITIONS[entry.standing].get(type(event))
    if transition is None:
        raise ProtocolError(f"event {event!r} is not listed for {entry!r}")
    return transition(entry, event)


@dataclass(frozen=True, slots=True)
class Lag:
    """Count of versions since any server last committed.

    With live rollouts such a run stops by itself: without commits no group is fresh enough, and the
    wait for groups reaches its deadline. With recorded rollouts only this count stops a run whose
    servers are all dead. ``held``: highest version read back from each server so far; ``since``:
    the trainer's version when ``held`` last changed.
    """

    held: Mapping[str, int] = field(default_factory=dict)
    since: int | None = None

    def at(self, version: int, held: Mapping[str, int]) -> tuple["Lag", int]:
        """Return, at a boundary with the trainer at ``version``, the next state and for how many
        versions no server has committed. Any commit counts, however old its version.

        >>> lag, _ = Lag().at(4, {"a": 4})
        >>> lag.at(6, {"a": 4})[1], lag.at(6, {"a": 5})[1]
        (2, 0)
        """
        if held != self.held or self.since is None:
            return Lag(dict(held), version), 0
        return self, version - self.since
