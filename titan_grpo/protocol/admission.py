"""How far ahead of the trainer generation may run: the one formula that bounds staleness.

The trainer at version t (t optimizer steps done) takes ``per_step`` groups and makes version t + 1
of them. Number the groups in the order they start, from 0, counted from the version ``base`` at
which the run began or resumed; a group that is given back (dropped, failed, cancelled) gives its
place back too. If nothing overtakes, group k is used by the trainer at version ``base + k //
per_step``, so its staleness is ``base + k // per_step - w`` when a server with version w makes it.
Bounding that by ``max_staleness`` is the rule:

    group k may start on a server that holds w   iff   base + k // per_step - w <= max_staleness

Worked example, base 10, per_step 4, max_staleness 1. Servers hold 10: groups 0..7 start (4..7 are
for the trainer at 11, one version stale). Group 8 is for the trainer at 12 and waits for a server
that holds 11. A server left behind at 9 may start groups 0..3 only (one stale at use), and none
once those are taken.

Nothing starves: where a server holds the trainer's version t, places ``(t - base) * per_step`` up
to ``(t - base + 1 + max_staleness) * per_step - 1`` are open, which is at least the whole batch the
trainer waits for. Groups may finish out of order and overtake each other, so the bound is checked
again at use (``too_stale``), and a group that fails there gives its place back.
"""

from dataclasses import dataclass, replace

from titan_grpo.errors import ProtocolError


def too_stale(made_by: int, used_at: int, max_staleness: int) -> bool:
    """Whether a group made by version ``made_by`` may no longer be used by the trainer at version
    ``used_at``."""
    return used_at - made_by > max_staleness


@dataclass(frozen=True, slots=True)
class Admission:
    """Counter of the groups started and not given back; used ones stay counted."""

    base: int
    per_step: int
    max_staleness: int
    started: int = 0

    def __repr__(self) -> str:
        return f"<{self.started} started, the next needs v{self.needed_version()}>"

    def needed_version(self) -> int:
        """Oldest version whose server may start the next group."""
        return self.base + self.started // self.per_step - self.max_staleness

    def may_start(self, version: int) -> bool:
        """Whether a server that holds ``version`` may start the next group."""
        return version >= self.needed_version()


@dataclass(frozen=True, slots=True)
class Start:
    """A server that holds ``version`` takes the next place."""

    version: int


@dataclass(frozen=True, slots=True)
class GiveBack:
    """A group that was started will not be used."""


Event = Start | GiveBack


@dataclass(frozen=True, slots=True)
class Generate:
    """Make group number ``place``."""

    place: int


def step(a: Admission, event: Event) -> tuple[Admission, tuple[Generate, ...]]:
    """The next counter and the place that was taken.

    Raises ProtocolError for a start on a server that may not, and for a group given back that was
    never started.
    """
    if isinstance(event, Start):
        if not a.may_start(event.version):
            raise ProtocolError(
                f"group {a.started} needs a server at version {a.needed_version()} or later, got"
                f" {event.version}"
            )
        return replace(a, started=a.started + 1), (Generate(a.started),)
    if a.started == 0:
        raise ProtocolError("a group was given back that was never started")
    return replace(a, started=a.started - 1), ()
