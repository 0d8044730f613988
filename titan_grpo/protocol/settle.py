"""What must be done to a server that is found after its lane, its trainer or its receiver died. Pure.

Used by a lane that connects and by the caretaker of a dead trainer's servers. The rule: a label is a promise about the
weights, so it is set right before generation goes on, and generation goes on only over one whole version.
"""

from dataclasses import dataclass

from titan_grpo.protocol.version import UNUSABLE, Label


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
    """The steps, in order, for a server whose receiver says that it holds ``held`` and whether that is ``intact``.

    ``held`` None: the weights that it was started with. ``shown`` is the label that it shows.

    Worked example: a trainer died after version 8 was loaded and before it was labelled. held r:8:ab, shown r:7:cd, paused:
    (Relabel("r:8:ab"), Resume()).
    """
    if not intact:
        return (() if paused else (Pause(),)) + (() if shown == UNUSABLE else (Relabel(UNUSABLE),))
    wrong = held is not None and shown != str(held)
    return ((Relabel(str(held)),) if wrong else ()) + ((Resume(),) if paused else ())
