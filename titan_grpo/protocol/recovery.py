"""Recovery of a server whose lane, trainer or receiver died, and health of a peer. Pure.

Recovery is used by a connecting lane and by the pause guard. The rule: a label is a promise about
the weights. Set it right before generation goes on, and resume over one whole version only.

Health says when a peer may be asked again::

    UNPROVEN --Answered--> ALIVE --Silent--> AWAY (until) --Rested--> UNPROVEN
        `---------Silent--------------------->'  ^-- Silent again: twice as long, bounded

Time is an argument, in seconds of any monotonic clock. Health says nothing about weights: a peer
that answers again may have restarted, so it stays unproven until a read-back."""

from dataclasses import dataclass, replace
from enum import Enum

from titan_grpo.errors import ProtocolError
from titan_grpo.protocol.messages import UNUSABLE, Label


@dataclass(frozen=True, slots=True)
class Pause:
    """Stop generation: the weights are no whole version."""


@dataclass(frozen=True, slots=True)
class Relabel:
    """Set the label, without an update."""

    label: str


@dataclass(frozen=True, slots=True)
class Resume:
    """Let generation go on."""


Step = Pause | Relabel | Resume


def settle(held: Label | None, intact: bool, shown: str, paused: bool) -> tuple[Step, ...]:
    """The steps, in order, for a server whose receiver says that it holds ``held`` and whether that
    is ``intact``.

    ``held`` None: the weights that it was started with. ``shown`` is the label that it shows.

    Worked example: a trainer died after version 8 was loaded and before it was labelled. held
    r:8:ab, shown r:7:cd, paused: (Relabel("r:8:ab"), Resume()).
    """
    if not intact:
        return (() if paused else (Pause(),)) + (() if shown == UNUSABLE else (Relabel(UNUSABLE),))
    wrong = held is not None and shown != str(held)
    return ((Relabel(str(held)),) if wrong else ()) + ((Resume(),) if paused else ())


class Phase(Enum):
    """How a peer has answered lately."""

    UNPROVEN = "unproven"
    ALIVE = "alive"
    AWAY = "away"


@dataclass(frozen=True, slots=True)
class Backoff:
    """The first rest after a failure doubles up to the longest; both in seconds."""

    first_s: float
    longest_s: float


@dataclass(frozen=True, slots=True)
class Health:
    """``failures`` in a row; while AWAY it is left alone before ``until``."""

    pace: Backoff
    phase: Phase = Phase.UNPROVEN
    failures: int = 0
    until: float = 0.0

    def __repr__(self) -> str:
        rest = (
            f" {self.failures} failures, until {self.until:.1f}" if self.phase is Phase.AWAY else ""
        )
        return f"<{self.phase.value}{rest}>"

    def askable(self, now: float) -> bool:
        """Whether it may be asked something at ``now``."""
        return self.phase is not Phase.AWAY or now >= self.until


@dataclass(frozen=True, slots=True)
class Answered:
    """It did what was asked."""


@dataclass(frozen=True, slots=True)
class Silent:
    """No answer at ``now``, or a wrong one."""

    now: float


@dataclass(frozen=True, slots=True)
class Rested:
    """Its rest is over at ``now``."""

    now: float


Event = Answered | Silent | Rested


@dataclass(frozen=True, slots=True)
class Rest:
    """Leave it alone until then."""

    until: float


@dataclass(frozen=True, slots=True)
class Ask:
    """Find out what it holds."""


Action = Rest | Ask


def step(h: Health, event: Event) -> tuple[Health, tuple[Action, ...]]:
    """The next state and what follows.

    Raises ProtocolError for Rested of a peer that is not away, or before its time.

    >>> h = Health(Backoff(0.5, 3.0))
    >>> for _ in range(4):
    ...     h, rest = step(h, Silent(0.0))
    ...     print(rest[0].until)
    0.5
    1.0
    2.0
    3.0
    """
    match event:
        case Answered():
            return Health(h.pace, Phase.ALIVE), ()
        case Silent(now):
            until = now + min(h.pace.longest_s, h.pace.first_s * 2 ** min(h.failures, 30))
            return replace(h, phase=Phase.AWAY, failures=h.failures + 1, until=until), (
                Rest(until),
            )
        case Rested(now):
            if h.phase is not Phase.AWAY or now < h.until:
                raise ProtocolError(f"event {event!r} is not listed for peer {h!r}")
            return replace(h, phase=Phase.UNPROVEN), (Ask(),)
