"""Which fault strikes which server at which version: a pure function of a seed."""

import random
from dataclasses import dataclass
from enum import Enum

from tests.rigs.proxy import Act

FAULT_SHARE = 0.7
"""Part of a window in which faults begin; the rest lets the last ones be recovered from."""

COMMIT_ROUTES = (
    "/pause",
    "/start_weight_update",
    "/update_weights",
    "/finish_weight_update",
    "/resume",
    "/weight_info",
)
"""Calls of every commit: what strikes one of them is met by the next version."""


class Kind(Enum):
    """What happens to a server."""

    STOP_RECEIVER = "receiver stopped past the deadline"
    STOP_SERVER = "server stopped past the deadline"
    KILL_RECEIVER = "receiver killed"
    RESTART_SERVER = "server killed and restarted"
    RESET = "connection reset"
    FAIL = "answer 500"
    LOSE = "answer lost"
    CORRUPT = "bytes corrupted"


CALLS = {Kind.RESET: Act.RESET, Kind.FAIL: Act.FAIL, Kind.LOSE: Act.LOSE}
"""Kinds that strike one call -> what the proxy does to it."""


@dataclass(frozen=True, slots=True)
class Fault:
    """``kind`` strikes ``server`` (an index) ``delay`` of a step after ``version`` was published;
    ``path`` for CALLS."""

    version: int
    delay: float
    server: int
    kind: Kind
    path: str = ""


def calm_versions(versions: int, window: int) -> tuple[int, ...]:
    """The versions after which faults rest until every server holds the newest: ``calm_versions(7,
    3) == (3, 6, 7)``."""
    ends = list(range(window, versions + 1, window))
    return tuple(ends if ends and ends[-1] == versions else [*ends, versions])


def schedule(
    seed: int, versions: int, window: int, fault_every: int, servers: int
) -> tuple[Fault, ...]:
    """All faults in order of version, one per ``fault_every`` versions on average; 0: none.

    Kinds come in shuffled rounds, so that each occurs as often as the others. The first server is
    never restarted: its process has to live as long as the run, or its memory would say nothing.
    """
    if not fault_every:
        return ()
    dice = random.Random(seed)
    deck: list[Kind] = []
    faults = []
    first = 1
    for last in calm_versions(versions, window):
        length = last - first + 1
        for _ in range(max(1, round(length / fault_every))):
            deck = deck or dice.sample(list(Kind), len(Kind))
            kind = deck.pop()
            server = servers - 1 if kind is Kind.RESTART_SERVER else dice.randrange(servers)
            version = first + dice.randrange(max(1, int(length * FAULT_SHARE)))
            path = dice.choice(COMMIT_ROUTES) if kind in CALLS else ""
            faults.append(Fault(version, dice.random(), server, kind, path))
        first = last + 1
    return tuple(sorted(faults, key=lambda fault: (fault.version, fault.delay)))
