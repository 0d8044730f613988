"""Recovery of a server whose lane, trainer or receiver died, and health of a peer. Pure.

Recovery is used by a connecting lane and by the pause guard. The rule: a label is a promise about
the weights. Set it right before generation goes on, and resume over one whole version only."""

import math
from dataclasses import dataclass, replace

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


@dataclass(frozen=True, slots=True)
class Health:
    """When a peer may be asked again, in seconds of any monotonic clock: after ``failures`` in a
    row not before ``until``. The first rest doubles up to the longest. It says nothing about
    weights: a peer that answers again may have restarted.

    >>> h = Health(first_s=0.5, longest_s=3.0)
    >>> for _ in range(4):
    ...     h = h.silent(0.0)
    ...     print(h.until)
    0.5
    1.0
    2.0
    3.0
    """

    first_s: float
    longest_s: float
    failures: int = 0
    until: float = -math.inf

    def askable(self, now: float) -> bool:
        """Whether it may be asked something at ``now``."""
        return now >= self.until

    def answered(self) -> "Health":
        """After it did what was asked."""
        return Health(self.first_s, self.longest_s)

    def silent(self, now: float) -> "Health":
        """After no answer at ``now``, or a wrong one."""
        rest_s = min(self.longest_s, self.first_s * 2 ** min(self.failures, 30))
        return replace(self, failures=self.failures + 1, until=now + rest_s)
