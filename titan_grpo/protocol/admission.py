"""Admission: how far ahead of the trainer groups may start, and in which order. It bounds staleness
without selecting groups by their speed.

The trainer at version t (t optimizer steps done) makes version t + 1 from ``per_step`` groups. Each
prompt has a place in prompt order, counted from the version ``base`` at which the run began or
resumed. The group in place k is for the trainer at version ``base + k // per_step``, and the
trainer waits for it (``rollout.consume = "started"``). If a server with version w makes it, its
staleness is ``base + k // per_step - w``. The rule bounds that by ``max_staleness``:

    place k may start on a server that holds w   iff   base + k // per_step - w <= max_staleness

A group that is dropped, fails or is cancelled keeps its place and is made again. A prompt that is
given up, or a used group that made no version, moves all later places forward by one: those groups
are used earlier than admitted for, so they are only fresher.

Worked example, base 10, per_step 4, max_staleness 1. Servers hold 10: places 0..7 start (4..7 are
for the trainer at 11, one version stale). Place 8 is for the trainer at 12 and waits for a server
that holds 11. A server left behind at 9 may start places 0..3 only (one stale at use).

``urgency`` orders the admitted groups; which groups a step takes does not depend on it.

Nothing starves: a server that holds the trainer's version t may start all places of the trainer's
batch and of the next ``max_staleness`` batches, and the trainer publishes version t before it waits
if every version that may start its batch was skipped. Where steps take any finished groups
(``consume = "ready"``), groups overtake each other, so the bound is checked again at use
(``too_stale``, or by token: ``Completion.fresh_enough``).
"""

from bisect import bisect_left
from dataclasses import dataclass, replace

from titan_grpo.errors import ProtocolError


def too_stale(made_by: int, used_at: int, max_staleness: int) -> bool:
    """Return whether version ``made_by`` is too stale for the trainer at version ``used_at``."""
    return used_at - made_by > max_staleness


@dataclass(frozen=True, slots=True)
class Admission:
    """State of admission. ``used``: groups used since ``base``, less those that made no version.
    ``open``: prompts that have a place and were not used yet, ascending."""

    base: int
    per_step: int
    max_staleness: int
    used: int = 0
    open: tuple[int, ...] = ()

    def __repr__(self) -> str:
        return f"<{self.used} used, {len(self.open)} open>"

    def used_at(self, prompt: int) -> int:
        """Return the trainer's version that uses the group of ``prompt``, if none overtakes it."""
        return self.base + (self.used + bisect_left(self.open, prompt)) // self.per_step

    def needed_version(self, prompt: int) -> int:
        """Return the oldest version that may make the group of ``prompt``."""
        return self.used_at(prompt) - self.max_staleness

    def may_start(self, prompt: int, version: int) -> bool:
        """Return whether a server that holds ``version`` may start the group of ``prompt``."""
        return version >= self.needed_version(prompt)


@dataclass(frozen=True, slots=True)
class Admit:
    """``prompt`` gets its place; ``version`` is the newest that a server holds."""

    prompt: int
    version: int


@dataclass(frozen=True, slots=True)
class Start:
    """A server that holds ``version`` makes the group of ``prompt``, perhaps not the first time."""

    prompt: int
    version: int


@dataclass(frozen=True, slots=True)
class Used:
    """The trainer took these groups."""

    prompts: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class GiveUp:
    """The group of ``prompt`` will never be made."""

    prompt: int


@dataclass(frozen=True, slots=True)
class Unversioned:
    """``count`` used groups made no version."""

    count: int


Event = Admit | Start | Used | GiveUp | Unversioned


@dataclass(frozen=True, slots=True)
class Generate:
    """Make the group, for the trainer at version ``used_at``."""

    used_at: int


def step(a: Admission, event: Event) -> tuple[Admission, tuple[Generate, ...]]:
    """Return the next state, and for Start the group to make.

    Raises ProtocolError for a version too old for the place, for a second place of one prompt, and
    for a group without a place that is started, used or given up.
    """
    match event:
        case Admit(prompt, version) | Start(prompt, version):
            at = bisect_left(a.open, prompt)
            if (a.open[at : at + 1] == (prompt,)) != isinstance(event, Start):
                raise ProtocolError(f"prompt {prompt} must be admitted once, and then started")
            if not a.may_start(prompt, version):
                raise ProtocolError(
                    f"the group of prompt {prompt} needs a server at version"
                    f" {a.needed_version(prompt)} or later, got {version}"
                )
            if isinstance(event, Start):
                return a, (Generate(a.used_at(prompt)),)
            return replace(a, open=(*a.open[:at], prompt, *a.open[at:])), ()
        case Used(prompts):
            left = _without(a.open, prompts)
            return replace(a, used=a.used + len(prompts), open=left), ()
        case GiveUp(prompt):
            return replace(a, open=_without(a.open, (prompt,))), ()
        case Unversioned(count):
            return replace(a, used=a.used - count), ()


def _without(prompts: tuple[int, ...], gone: tuple[int, ...]) -> tuple[int, ...]:
    leaving = set(gone)
    if not leaving <= set(prompts):
        raise ProtocolError(f"prompts {gone} must have places, got {prompts}")
    return tuple(prompt for prompt in prompts if prompt not in leaving)


def urgency(used_at: int, expected_s: float, step_s: float) -> float:
    """Return a group's latest start, lower first: a step takes ``step_s`` seconds, the group
    ``expected_s`` (0: unknown). Which step uses the group does not depend on it.

    Least slack first: of one step the longest groups start first, and a group of a later step
    starts before them if its step would wait for it otherwise. With no durations known, groups
    start in the order of their steps.

    >>> urgency(11, 1.0, 2.0) < urgency(12, 1.0, 2.0), urgency(12, 5.0, 2.0) < urgency(11, 1.0, 2.0)
    (True, True)
    """
    return used_at * step_s - expected_s
