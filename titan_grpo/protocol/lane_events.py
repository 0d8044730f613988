"""Events of a lane, for its observers: the pause guard and fault injection."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum


class Point(Enum):
    """A place between two steps of the protocol. A lane passes them in this order, for every
    version from BEGIN on."""

    GREET = "greet"
    """Before the hello of a new epoch."""

    CONNECTED = "connected"
    """The receiver joined and took the manifest, and the server is settled."""

    BEGIN = "begin"
    """Before the order that announces a version."""

    EXTENT = "extent"
    """A bucket has been sent; passed once per bucket."""

    SENT = "sent"
    """After the last bucket, before the receiver's answer."""

    STAGED = "staged"
    """The receiver's digests match; before the commit."""

    PAUSE = "pause"
    """Before the call that pauses generation."""

    LOAD = "load"
    """Paused; before the load."""

    LABEL = "label"
    """Loaded; before the label is set."""

    RESUME = "resume"
    """Labelled; before the call that resumes."""

    RESUMED = "resumed"
    """Generation goes on; before the read-back."""

    HELD = "held"
    """The read-back shows the version."""


@dataclass(frozen=True, slots=True)
class LaneEvent:
    """One lane at one point. ``version`` is -1 at GREET and CONNECTED; ``label``: the commit's."""

    point: Point
    url: str
    run_id: str
    epoch: int
    version: int = -1
    label: str = ""


Observer = Callable[[LaneEvent], None]
"""Called by the lane's thread at every point; must not block. A PeerError that it raises is met as
if the server had failed."""


def no_observer(_: LaneEvent) -> None:
    """Observer that ignores all events."""
