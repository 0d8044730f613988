"""What the trainer knows that each server holds. A pure table; only a server's own read-back makes it HOLDS.

::

    UNKNOWN --receiving--> RECEIVING v --committing--> COMMITTING v --holds--> HOLDS v --receiving--> ...
       ^                        | failed before commit: back to what it held (HOLDS or UNKNOWN)
       `-- failed in or after the commit, a restart, a lost answer
    QUARANTINED: half loaded; GONE: removed from the run
"""

from dataclasses import dataclass, replace
from enum import Enum

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
    """One server's line. ``held`` is the version it serves, read back from it; ``incoming`` the one on its way."""

    standing: Standing = Standing.UNKNOWN
    held: int | None = None
    incoming: int | None = None

    def __repr__(self) -> str:
        held = "?" if self.held is None else f"v{self.held}"
        incoming = "" if self.incoming is None else f" <- v{self.incoming}"
        return f"{self.standing.value}({held}{incoming})"

    @property
    def accepting(self) -> bool:
        """Whether it may be given new rollouts: it serves one known version and no commit is running.

        A server that receives goes on serving what it holds. During a commit the version of a new request would be
        ambiguous, so it takes none for that moment.
        """
        return self.held is not None and self.standing in (Standing.HOLDS, Standing.RECEIVING)


def receiving(e: Entry, version: int) -> Entry:
    """A transfer of ``version`` starts; what the server serves does not change."""
    _demand(e, "receiving", Standing.UNKNOWN, Standing.HOLDS, Standing.QUARANTINED)
    if e.held is not None and version <= e.held:
        raise ProtocolError(f"a server's version never goes back: {e!r} was to receive v{version}")
    standing = Standing.QUARANTINED if e.standing is Standing.QUARANTINED else Standing.RECEIVING
    return replace(e, standing=standing, incoming=version)


def committing(e: Entry) -> Entry:
    """The staged version is about to be loaded: from here on an error leaves the server UNKNOWN."""
    _demand(e, "committing", Standing.RECEIVING, Standing.QUARANTINED)
    if e.incoming is None:
        raise ProtocolError(f"nothing is on its way to commit: {e!r}")
    return replace(e, standing=Standing.COMMITTING)


def holds(e: Entry, version: int) -> Entry:
    """The server's own read-back says ``version``; the only way to HOLDS."""
    if e.standing is Standing.GONE:
        raise ProtocolError(f"a server that left cannot hold v{version}")
    if e.held is not None and version < e.held:
        raise ProtocolError(f"a server's version never goes back: {e!r} was read back as v{version}")
    return Entry(Standing.HOLDS, held=version)


def transfer_failed(e: Entry) -> Entry:
    """The transfer ended before the commit began: the server still serves what it held."""
    _demand(e, "transfer_failed", Standing.RECEIVING, Standing.QUARANTINED)
    if e.standing is Standing.QUARANTINED:
        return replace(e, incoming=None)
    return Entry(Standing.HOLDS if e.held is not None else Standing.UNKNOWN, held=e.held)


def unknown(e: Entry) -> Entry:
    """An uncertain answer, a restart, a lost connection: nothing is known until a read-back."""
    return Entry(Standing.GONE) if e.standing is Standing.GONE else Entry()


def quarantined(e: Entry) -> Entry:
    """Half loaded: it serves nobody until a full sync replaced every tensor."""
    return Entry(Standing.GONE) if e.standing is Standing.GONE else Entry(Standing.QUARANTINED)


def gone(_: Entry) -> Entry:
    """The server left the run."""
    return Entry(Standing.GONE)


def _demand(e: Entry, event: str, *allowed: Standing) -> None:
    if e.standing not in allowed:
        raise ProtocolError(f"event {event} is not listed for {e!r}")
