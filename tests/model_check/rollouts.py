"""All schedules of a few groups over a few servers: the bound on staleness holds at use, and the
trainer is never starved."""

import time
from typing import NamedTuple

from tests.model_check.search import Result
from tests.model_check.tables import Tables, Violation
from titan_grpo.errors import ProtocolError
from titan_grpo.protocol.admission import Admission, GiveBack, Start, too_stale


class State(NamedTuple):
    """``running`` and ``ready``: the versions that make, or made, a group each; ``held``: what each
    server holds. Sorted."""

    admission: Admission
    trained: int
    held: tuple[int, ...]
    running: tuple[int, ...] = ()
    ready: tuple[int, ...] = ()


def _without(versions: tuple[int, ...], version: int) -> tuple[int, ...]:
    index = versions.index(version)
    return versions[:index] + versions[index + 1 :]


def _moves(s: State, versions: int, t: Tables) -> list[tuple[str, State]]:
    out = []
    for held in sorted(set(s.held)):
        if len(s.running) + len(s.ready) < 2 * s.admission.per_step * (
            s.admission.max_staleness + 2
        ):
            try:
                after, _ = t.admission(s.admission, Start(held))
            except ProtocolError:
                continue
            out.append(
                (
                    f"a group starts on v{held}",
                    s._replace(admission=after, running=tuple(sorted((*s.running, held)))),
                )
            )
    for version in sorted(set(s.running)):
        left = _without(s.running, version)
        out.append(
            ("a group ends", s._replace(running=left, ready=tuple(sorted((*s.ready, version)))))
        )
        dropped, _ = t.admission(s.admission, GiveBack())
        out.append(("a group fails", s._replace(admission=dropped, running=left)))
    for held in sorted(set(s.held)):
        if held < s.trained:
            servers = tuple(sorted((*_without(s.held, held), s.trained)))
            out.append((f"a server goes from v{held} to v{s.trained}", s._replace(held=servers)))
    if s.trained < versions:
        out += _train(s, t)
    return out


def _train(s: State, t: Tables) -> list[tuple[str, State]]:
    """The trainer drops what is too stale, and uses the oldest groups, or the freshest."""
    admission, fresh = (
        s.admission,
        tuple(v for v in s.ready if not too_stale(v, s.trained, s.admission.max_staleness)),
    )
    for _ in range(len(s.ready) - len(fresh)):
        admission, _ = t.admission(admission, GiveBack())
    count = admission.per_step
    if len(fresh) < count:
        return []
    out = []
    for used, left in ((fresh[:count], fresh[count:]), (fresh[-count:], fresh[:-count])):
        if any(s.trained - v > admission.max_staleness or v > s.trained for v in used):
            raise Violation(
                f"the trainer at {s.trained} uses groups of {used}, the bound is"
                f" {admission.max_staleness}"
            )
        out.append(
            (
                "the trainer uses a batch",
                s._replace(admission=admission, trained=s.trained + 1, ready=left),
            )
        )
    return out


def _check(s: State, t: Tables) -> None:
    """With every server up to date and nothing more failing, the trainer's batch can be made:
    nothing starves."""
    bound, count = s.admission.max_staleness, s.admission.per_step
    if len(s.running) + len(s.ready) > (bound + 1) * count:
        raise Violation(
            f"{len(s.running) + len(s.ready)} groups wait or run, {(bound + 1) * count} can be used"
            " in time"
        )
    admission, made = s.admission, [*s.running, *s.ready]
    for version in made:
        if too_stale(version, s.trained, bound):
            admission, _ = t.admission(admission, GiveBack())
    usable = sum(not too_stale(v, s.trained, bound) for v in made)
    try:
        for _ in range(usable, count):
            admission, _ = t.admission(admission, Start(s.trained))
    except ProtocolError as error:
        raise Violation(f"the trainer at {s.trained} is starved: {error}") from error


def explore_rollouts(
    servers: int, versions: int, tables: Tables | None = None, per_step: int = 2, bound: int = 1
) -> Result:
    """Every reachable state of admission, servers and groups."""
    t, start, result = tables or Tables(), time.monotonic(), Result()
    first = State(Admission(0, per_step, bound), 0, (0,) * servers)
    parents: dict[State, tuple[State, str] | None] = {first: None}
    todo, at, doing = [first], first, ""
    try:
        while todo:
            at = todo.pop()
            for doing, after in _moves(at, versions, t):
                result.steps += 1
                if after not in parents:
                    parents[after] = (at, doing)
                    _check(after, t)
                    todo.append(after)
    except (Violation, ProtocolError) as error:
        result.violation = str(error)
        result.trace = [doing]
        while (parent := parents[at]) is not None:
            at, name = parent
            result.trace.insert(0, name)
    result.states, result.seconds = len(parents), time.monotonic() - start
    return result
