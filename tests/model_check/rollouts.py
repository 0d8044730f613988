"""All schedules of a few groups over a few servers: the bound on staleness holds at use, no place
is lost, and the trainer is never starved."""

from collections.abc import Iterator
from typing import NamedTuple

from tests.model_check.small import Result, search_from
from tests.model_check.tables import Tables, Violation
from titan_grpo.errors import ProtocolError
from titan_grpo.protocol.admission import (
    Admission,
    Admit,
    GiveUp,
    Start,
    Unversioned,
    Used,
    too_stale,
)

Made = tuple[int, int]
"""A prompt, and the version that makes or made its group."""


class State(NamedTuple):
    """``held``: what each server holds; ``published``: the newest version that had a slot;
    ``waiting``: prompts to be started; ``trained`` groups are those of the prompts below ``next``
    that are nowhere else. Sorted."""

    admission: Admission
    version: int
    held: tuple[int, ...]
    published: int = 0
    faults: int = 0
    next: int = 0
    waiting: tuple[int, ...] = ()
    running: tuple[Made, ...] = ()
    ready: tuple[Made, ...] = ()
    trained: tuple[int, ...] = ()
    given_up: tuple[int, ...] = ()

    @property
    def unused(self) -> tuple[int, ...]:
        """The prompts that the trainer waits for, in their order."""
        return tuple(p for p in range(self.next) if p not in (*self.trained, *self.given_up))


def _add(values: tuple[int, ...], value: int) -> tuple[int, ...]:
    return tuple(sorted((*values, value)))


def _start(s: State, prompt: int, held: int, t: Tables) -> State:
    after, _ = t.admission(s.admission, Start(prompt, held))
    waiting = tuple(p for p in s.waiting if p != prompt)
    running = tuple(sorted((*s.running, (prompt, held))))
    return s._replace(admission=after, waiting=waiting, running=running)


def _admit(s: State, version: int, t: Tables) -> State:
    after, _ = t.admission(s.admission, Admit(s.next, version))
    return s._replace(admission=after, next=s.next + 1, waiting=_add(s.waiting, s.next))


def _moves(s: State, versions: int, t: Tables) -> Iterator[tuple[str, State]]:
    if len(s.unused) < s.admission.per_step * (s.admission.max_staleness + 3):
        try:
            admitted = _admit(s, max(s.held), t)
        except ProtocolError:
            pass  # No place is free.
        else:
            yield f"prompt {s.next} gets its place", admitted
    for held in sorted(set(s.held)):
        for prompt in s.waiting:
            try:
                after = _start(s, prompt, held, t)
            except ProtocolError:
                continue
            yield f"the group of prompt {prompt} starts on v{held}", after
    for made in s.running:
        prompt, left = made[0], tuple(other for other in s.running if other != made)
        ready = tuple(sorted((*s.ready, made)))
        yield f"the group of prompt {prompt} ends", s._replace(running=left, ready=ready)
        failed = s._replace(running=left, faults=s.faults + 1)
        again = failed._replace(waiting=_add(s.waiting, prompt))
        yield f"the group of prompt {prompt} fails", again
        admission, _ = t.admission(s.admission, GiveUp(prompt))
        given_up = _add(s.given_up, prompt)
        gone = failed._replace(admission=admission, given_up=given_up)
        yield f"prompt {prompt} is given up, and counted", gone
    for held in sorted(set(s.held)):
        if held < s.published:
            at = s.held.index(held)
            servers = tuple(sorted((*s.held[:at], *s.held[at + 1 :], s.published)))
            yield f"a server goes from v{held} to v{s.published}", s._replace(held=servers)
    if (caught_up := _catch_up(s, t)) != s:
        yield f"v{s.version}, which was skipped, is published before its step", caught_up
    if s.version < versions:
        yield from _train(s, t)


def _catch_up(s: State, t: Tables) -> State:
    late = t.catches_up and too_stale(s.published, s.version, s.admission.max_staleness)
    return s._replace(published=s.version) if late else s


def _train(s: State, t: Tables) -> Iterator[tuple[str, State]]:
    """The trainer takes the groups that were started for it, or waits for them."""
    bound, taken = s.admission.max_staleness, s.unused[: s.admission.per_step]
    versions = dict(s.ready)
    if len(taken) < s.admission.per_step or not set(taken) <= versions.keys():
        return
    for prompt in taken:
        if too_stale(versions[prompt], s.version, bound) or versions[prompt] > s.version:
            raise Violation(
                f"the trainer at {s.version} uses a group of v{versions[prompt]}, the bound is"
                f" {bound}"
            )
    admission, _ = t.admission(s.admission, Used(taken))
    ready = tuple(made for made in s.ready if made[0] not in taken)
    trained = tuple(sorted((*s.trained, *taken)))
    after = s._replace(admission=admission, ready=ready, trained=trained)
    made = after._replace(version=s.version + 1)
    yield "the trainer uses a batch", made._replace(published=made.version)
    yield "the trainer uses a batch, and no slot is free for what it makes", made
    admission, _ = t.admission(admission, Unversioned(len(taken)))
    skipped = after._replace(admission=admission, faults=s.faults + 1)
    yield "a batch makes no version", skipped


def _check(s: State, t: Tables) -> None:
    """Every place is trained, given up and counted, or on its way; none is on its way in vain."""
    bound, count = s.admission.max_staleness, s.admission.per_step
    on_its_way = sorted([*s.waiting, *(p for p, _ in s.running), *(p for p, _ in s.ready)])
    if not tuple(on_its_way) == s.unused == s.admission.open:
        raise Violation(
            f"prompts {on_its_way} wait, run or are ready, the trainer waits for {s.unused}, and"
            f" places have {s.admission.open}"
        )
    if len(on_its_way) > (bound + 1) * count:
        raise Violation(
            f"{len(on_its_way)} groups are on their way, {(bound + 1) * count} can be used in time"
        )
    _progress(s, t)


def _progress(s: State, t: Tables) -> None:
    """With every server up to date and nothing more failing, the trainer gets its next step."""
    settled = _catch_up(s, t)
    version = settled.published
    settled = settled._replace(held=(version,))
    try:
        while len(settled.unused) < s.admission.per_step:
            settled = _admit(settled, version, t)
        for prompt in settled.waiting:
            if prompt in settled.unused[: s.admission.per_step]:
                settled = _start(settled, prompt, version, t)
    except ProtocolError as error:
        raise Violation(f"the trainer at {s.version} is starved: {error}") from error
    settled = settled._replace(ready=tuple(sorted((*settled.ready, *settled.running))), running=())
    if not any(True for _ in _train(settled, t)):
        raise Violation(f"the trainer at {s.version} waits for ever for {settled.unused}")


def explore_rollouts(
    servers: int, versions: int, tables: Tables | None = None, faults: int = 1
) -> Result:
    """Every reachable state of admission, servers and groups: two of these a step, which may be one
    version old. A fault is a group that fails or is given up, or a step that makes no version; that
    no slot is free for a version is none."""
    t = tables or Tables()
    return search_from(
        State(Admission(0, 2, 1), 0, (0,) * servers),
        lambda s: _moves(s, versions, t),
        lambda s: _check(s, t),
        faults,
    )
