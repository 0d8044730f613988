"""How far ahead of the trainer generation may run, and in which order groups start: the rules that
bound staleness without choosing groups by their speed.

The trainer at version t (t optimizer steps done) takes ``per_step`` groups and makes version t + 1
of them. Prompts have places in their order, counted from the version ``base`` at which the run
began or resumed. The group in place k is for the trainer at version ``base + k // per_step``, and
the trainer waits for it (``rollout.consume = "started"``), so its staleness is ``base + k //
per_step - w`` when a server with version w makes it. Bounding that by ``max_staleness`` is the
rule:

    place k may start on a server that holds w   iff   base + k // per_step - w <= max_staleness

A group that is dropped, fails or is cancelled keeps its place and is made again. A prompt that is
given up, or a used group that made no version, moves all places behind it forward by one: those
groups are used earlier than they were admitted for, which only makes them fresher.

Worked example, base 10, per_step 4, max_staleness 1. Servers hold 10: places 0..7 start (4..7 are
for the trainer at 11, one version stale). Place 8 is for the trainer at 12 and waits for a server
that holds 11. A server left behind at 9 may start places 0..3 only (one stale at use).

Which admitted group starts first is another question (``urgency``): the set of groups of a step
does not depend on it.

Nothing starves: where a server holds the trainer's version t, all places of the trainer's batch and
of ``max_staleness`` batches after it are open to it. Where steps take any finished groups
(``consume = "ready"``), groups overtake each other, so the bound is checked again at use
(``too_stale``, or by token: ``samples.fresh_enough``).
"""

from bisect import bisect_left
from dataclasses import dataclass, replace

from titan_grpo.errors import ProtocolError


def too_stale(made_by: int, used_at: int, max_staleness: int) -> bool:
    """Whether a group made by version ``made_by`` may no longer be used by the trainer at version
    ``used_at``."""
    return used_at - made_by > max_staleness


@dataclass(frozen=True, slots=True)
class Admission:
    """``used``: groups used since ``base``, less those that made no version. ``open``: the prompts
    that have a place and were not used yet, in their order."""

    base: int
    per_step: int
    max_staleness: int
    used: int = 0
    open: tuple[int, ...] = ()

    def __repr__(self) -> str:
        return f"<{self.used} used, {len(self.open)} open>"

    def used_at(self, prompt: int) -> int:
        """The trainer's version at which the group of ``prompt`` is used, if none overtakes."""
        return self.base + (self.used + bisect_left(self.open, prompt)) // self.per_step

    def needed_version(self, prompt: int) -> int:
        """Oldest version whose server may start the group of ``prompt``."""
        return self.used_at(prompt) - self.max_staleness

    def may_start(self, prompt: int, version: int) -> bool:
        """Whether a server that holds ``version`` may start the group of ``prompt``."""
        return version >= self.needed_version(prompt)


@dataclass(frozen=True, slots=True)
class Admit:
    """The next prompt gets its place; ``version`` is the newest that a server holds."""

    prompt: int
    version: int


@dataclass(frozen=True, slots=True)
class Start:
    """A server that holds ``version`` makes the group of ``prompt``, for the first time or
    again."""

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
    """The places after an event, and what is made.

    Raises ProtocolError for a version that is too old for the place, and for a group started, used
    or given up that has no place.
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
    """How soon a group should start, lower first: its latest start if a step takes ``step_s``
    seconds and the group ``expected_s`` (0: unknown). Which step uses it does not depend on it.

    Groups of one step that are expected to take long start first; one of a later step starts before
    them if it takes so much longer that its step would wait for it (least slack first). With
    nothing known the order is that of the steps.

    >>> urgency(11, 1.0, 2.0) < urgency(12, 1.0, 2.0), urgency(12, 5.0, 2.0) < urgency(11, 1.0, 2.0)
    (True, True)
    """
    return used_at * step_s - expected_s
