"""Recovery of a server whose lane, trainer or receiver died, and health of a peer. Pure.

A connecting lane and the pause guard use recovery. A label is a promise about the weights: correct
the label before generation resumes, and resume only over one whole version."""

import math
from dataclasses import dataclass, replace

from titan_grpo.protocol.messages import UNUSABLE, Label


@dataclass(frozen=True, slots=True)
class Pause:
    """Pause generation: the weights are not one whole version."""


@dataclass(frozen=True, slots=True)
class Relabel:
    """Set the label, without an update of the weights."""

    label: str


@dataclass(frozen=True, slots=True)
class Resume:
    """Resume generation."""


Step = Pause | Relabel | Resume


def settle(held: Label | None, intact: bool, shown: str, paused: bool) -> tuple[Step, ...]:
    """Return the recovery steps of a server, in order.

    ``held`` and ``intact``: the receiver's report; ``held`` None: the engine's initial weights.
    ``shown``: the server's label; ``paused``: whether it is paused.

    Worked example: a trainer died after version 8 was loaded and before it was labelled. held
    r:8:ab, shown r:7:cd, paused: (Relabel("r:8:ab"), Resume()).
    """
    if not intact:
        return (() if paused else (Pause(),)) + (() if shown == UNUSABLE else (Relabel(UNUSABLE),))
    wrong = held is not None and shown != str(held)
    return ((Relabel(str(held)),) if wrong else ()) + ((Resume(),) if paused else ())


@dataclass(frozen=True, slots=True)
class Health:
    """Backoff of a peer, in seconds of any monotonic clock: after ``failures`` in a row no request
    before ``until``. The wait doubles from ``first_s`` to ``longest_s``. An answer proves nothing
    about the weights: the peer may have restarted.

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
        """Return whether the peer may get a request at ``now``."""
        return now >= self.until

    def answered(self) -> "Health":
        """Return the state after a good answer: no backoff."""
        return Health(self.first_s, self.longest_s)

    def silent(self, now: float) -> "Health":
        """Return the state after no answer at ``now``, or a bad one."""
        rest_s = min(self.longest_s, self.first_s * 2 ** min(self.failures, 30))
        return replace(self, failures=self.failures + 1, until=now + rest_s)
