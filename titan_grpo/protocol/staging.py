"""One epoch's staging memory at a receiver: its content and its user. A pure table.

::

    EMPTY --begin--> WRITING --arrived, ok--> STAGED --lend--> LENT --returned--> STAGED
      ^                 | not ok                |                | (streamed: EMPTY)
      `-----------------'<-- begin: WRITING ----'                `-- begin: refused until it returns

There is one image (streamed: one window), so a transfer overwrites what was staged, and never what
the engine reads. Streamed, a version is STAGED once its digests are known and before its bytes
move; they move while it is LENT."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from titan_grpo.errors import ProtocolError
from titan_grpo.protocol.fence import Grant, Refuse


class Phase(Enum):
    """What the memory is used for."""

    EMPTY = "empty"
    WRITING = "writing"
    STAGED = "staged"
    LENT = "lent"


@dataclass(frozen=True, slots=True)
class Staging:
    """``number`` of the last transfer that began, its ``version``, and the ``fingerprint`` of what
    is staged."""

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


# Events.


@dataclass(frozen=True, slots=True)
class Begin:
    """A transfer wants the memory."""

    number: int
    version: int


@dataclass(frozen=True, slots=True)
class Arrived:
    """The transfer's bytes are there and were checked (streamed: its digests were), well or
    badly."""

    number: int
    version: int
    fingerprint: str
    ok: bool


@dataclass(frozen=True, slots=True)
class LendRequested:
    """The engine wants to load this version."""

    number: int
    version: int
    fingerprint: str


@dataclass(frozen=True, slots=True)
class Returned:
    """The engine reported how a commit ended. It reports a refused one too: then nothing was
    lent."""


@dataclass(frozen=True, slots=True)
class Spent:
    """Streamed: the window's bytes have passed, or will not come."""


# Actions, beside fence.Grant and fence.Refuse.


@dataclass(frozen=True, slots=True)
class Write:
    """The memory may be written from now on."""


Event = Begin | Arrived | LendRequested | Returned | Spent
Action = Write | Grant | Refuse
Outcome = tuple[Staging, tuple[Action, ...]]


def _begin(s: Staging, e: Begin) -> Outcome:
    if e.number <= s.number:
        raise ProtocolError(f"transfers count up: {e!r} reached {s!r}")
    return replace(s, phase=Phase.WRITING, number=e.number, version=e.version, fingerprint=""), (
        Write(),
    )


def _begin_lent(s: Staging, _: Any) -> Outcome:
    return s, (
        Refuse(
            "the engine still loads the previous version; the next one cannot be received over it"
        ),
    )


def _arrived(s: Staging, e: Arrived) -> Outcome:
    if (e.number, e.version) != (s.number, s.version):
        raise ProtocolError(f"event {e!r} is not about the transfer under way: {s!r}")
    if not e.ok:
        return _emptied(s), ()
    return replace(s, phase=Phase.STAGED, fingerprint=e.fingerprint), ()


def _lend(s: Staging, e: LendRequested) -> Outcome:
    asked, here = (e.number, e.version, e.fingerprint), (s.number, s.version, s.fingerprint)
    if asked != here:
        return s, (
            Refuse(f"commit asks for (number, version, fingerprint) {asked}, staged is {here}"),
        )
    return replace(s, phase=Phase.LENT), (Grant(),)


def _lend_nothing(s: Staging, e: LendRequested) -> Outcome:
    return s, (
        Refuse(f"version {e.version} is not staged here: nothing is, or a transfer is under way"),
    )


def _lend_lent(s: Staging, _: Any) -> Outcome:
    return s, (Refuse(f"version {s.version} is lent already"),)


def _returned(s: Staging, _: Any) -> Outcome:
    # an image may be committed again; a window's bytes are gone
    return (_emptied(s) if s.streamed else replace(s, phase=Phase.STAGED)), ()


def _spent(s: Staging, _: Any) -> Outcome:
    return _emptied(s), ()


def _same(s: Staging, _: Any) -> Outcome:
    return s, ()


def _emptied(s: Staging) -> Staging:
    return replace(s, phase=Phase.EMPTY, version=-1, fingerprint="")


_Transition = Callable[[Staging, Any], Outcome]

TRANSITIONS: dict[Phase, dict[type, _Transition]] = {
    Phase.EMPTY: {
        Begin: _begin,
        LendRequested: _lend_nothing,
        Returned: _same,
        Spent: _same,
    },
    # A transfer that broke off without an answer leaves WRITING behind; the next one begins over
    # it.
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


def step(staging: Staging, event: Event) -> Outcome:
    """The next state and what to do. An event that the state does not list raises ProtocolError and
    changes nothing."""
    transition = TRANSITIONS[staging.phase].get(type(event))
    if transition is None:
        raise ProtocolError(f"event {event!r} is not listed for staging {staging!r}")
    return transition(staging, event)
