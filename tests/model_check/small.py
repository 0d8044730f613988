"""All states of a model that is small enough for a set of tuples, and seeded bugs: what an
exploration must catch, or it proves nothing."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from tests.model_check.tables import Violation
from titan_grpo.errors import ProtocolError


@dataclass(slots=True)
class Result:
    """``violation`` is empty if there is none; ``trace`` are the moves that lead to it.
    ``complete``: in time."""

    states: int = 0
    steps: int = 0
    seconds: float = 0.0
    violation: str = ""
    trace: list[str] = field(default_factory=list)
    complete: bool = True


@dataclass(frozen=True, slots=True)
class Bug:
    """``breaks``: the rule in the words of docs/protocol.md. ``find`` explores with one rule
    broken."""

    name: str
    breaks: str
    find: Callable[[], Result]


class Faulty(Protocol):
    """A state that counts the faults on the way to it."""

    @property
    def faults(self) -> int:
        """So many."""


State = TypeVar("State", bound=Faulty)


@dataclass(frozen=True, slots=True)
class Hope(Generic[State]):
    """From each ``held`` state, moves that are no faults lead to one that is ``done``.
    ``otherwise``: the violation where they do not."""

    done: Callable[[State], bool]
    held: Callable[[State], bool]
    otherwise: str


def search_from(
    start: State,
    moves: Callable[[State], Iterator[tuple[str, State]]],
    check: Callable[[State], None],
    faults: int,
    hope: Hope[State] | None = None,
) -> Result:
    """All states with at most ``faults`` faults, and the hope."""
    result, begun = Result(), time.monotonic()
    parents: dict[State, tuple[State, str] | None] = {start: None}
    calm: dict[State, list[State]] = {}
    level, at, doing = [start], start, ""
    try:
        while level:
            found = []
            for at in level:
                for doing, after in moves(at):
                    if after.faults > faults:
                        continue
                    result.steps += 1
                    if hope is not None and after.faults == at.faults:
                        calm.setdefault(after, []).append(at)
                    if after not in parents:
                        parents[after] = at, doing
                        check(after)
                        found.append(after)
            level = found
        if hope is not None:
            doing = "and no way leads from here to the last version"
            reached = _leading_to([w for w in parents if hope.done(w)], calm)
            for at in parents:
                if hope.held(at) and at not in reached:
                    raise Violation(hope.otherwise)
    except (Violation, ProtocolError) as error:
        result.violation, result.trace = str(error), [doing]
        while (came := parents[at]) is not None:
            at, name = came
            result.trace.insert(0, name)
    result.states, result.seconds = len(parents), time.monotonic() - begun
    return result


def _leading_to(ends: list[State], calm: dict[State, list[State]]) -> set[State]:
    """The ends, and all from which moves without faults lead to one of them."""
    reached = set(ends)
    while ends:
        for before in calm.get(ends.pop(), ()):
            if before not in reached:
                reached.add(before)
                ends.append(before)
    return reached
