"""Which fault strikes which server at which version, a pure function of a seed; and what carries
them out, each at its time, and undoes what has to be undone."""

import heapq
import itertools
import logging
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum

from tests.rigs.proxy import Act, Proxy
from tests.rigs.server_handle import ServerProcess
from tests.rigs.signals import send
from titan_grpo.errors import PeerError

RETRY_S = 0.3
"""A fault whose victim is not there (its receiver is starting, it is stopped itself) is tried again
after this, in seconds."""

TRIES = 400
"""After so many tries a fault counts as missed."""

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


log = logging.getLogger("titan_grpo.soak")


@dataclass(order=True, slots=True)
class _Due:
    at_s: float
    number: int
    act: Callable[[], bool] = field(compare=False)
    name: str = field(compare=False)
    tries: int = field(compare=False, default=0)


class Injector:
    """Used by one thread, which calls ``work`` often; restarts run on threads of their own."""

    def __init__(
        self,
        servers: Sequence[ServerProcess],
        proxies: Sequence[Proxy],
        stop_s: float,
        before_kill: Callable[[int], object],
    ) -> None:
        """``proxies``: one in front of each server. ``stop_s``: how long a stopped process stays
        so. ``before_kill`` gets the index of a server right before its end."""
        self._servers, self._proxies = servers, proxies
        self._stop_s, self._before_kill = stop_s, before_kill
        self._due: list[_Due] = []
        self._numbers = itertools.count()
        self._restarts: dict[int, threading.Thread] = {}
        self._stopped: set[int] = set()
        self.struck: dict[Kind, int] = dict.fromkeys(Kind, 0)
        self.missed: list[str] = []
        self.failed_starts: list[str] = []

    def plan(self, fault: Fault, at_s: float) -> None:
        """Carry ``fault`` out at ``at_s`` on the monotonic clock. Corrupted bytes are the trainer's
        business."""
        if fault.kind is not Kind.CORRUPT:
            self._push(
                at_s, lambda: self._strike(fault), f"{fault.kind.value} (server {fault.server})"
            )

    @property
    def next_s(self) -> float | None:
        """When ``work`` has something to do; None: nothing is planned."""
        return self._due[0].at_s if self._due else None

    @property
    def busy(self) -> bool:
        """Whether something is planned, stopped or restarting."""
        return bool(self._due) or any(thread.is_alive() for thread in self._restarts.values())

    def work(self) -> None:
        while self._due and self._due[0].at_s <= time.monotonic():
            due = heapq.heappop(self._due)
            if due.act():
                continue
            due.tries += 1
            if due.tries > TRIES:
                self.missed.append(due.name)
                continue
            due.at_s = time.monotonic() + RETRY_S
            heapq.heappush(self._due, due)

    def finish(self, timeout_s: float) -> None:
        """Wait for restarts that are under way."""
        for thread in self._restarts.values():
            thread.join(timeout_s)

    def _push(self, at_s: float, act: Callable[[], bool], name: str) -> None:
        heapq.heappush(self._due, _Due(at_s, next(self._numbers), act, name))

    def _strike(self, fault: Fault) -> bool:
        """Whether it could be carried out."""
        index, server = fault.server, self._servers[fault.server]
        if index in self._stopped or (index in self._restarts and self._restarts[index].is_alive()):
            return False
        match fault.kind:
            case Kind.STOP_RECEIVER | Kind.KILL_RECEIVER:
                pids = server.receiver_pids
                if not pids or (
                    fault.kind is Kind.STOP_RECEIVER and not self._stop(index, pids[-1])
                ):
                    return False
                if fault.kind is Kind.KILL_RECEIVER:
                    send(pids[-1], signal.SIGKILL)
            case Kind.STOP_SERVER:
                if not self._stop(index, server.pid):
                    return False
            case Kind.RESTART_SERVER:
                self._restarts[index] = threading.Thread(
                    target=self._restart, args=(index,), name=f"restart {index}"
                )
                self._restarts[index].start()
            case _:
                self._proxies[index].script(CALLS[fault.kind], fault.path)
        self.struck[fault.kind] += 1
        return True

    def _stop(self, index: int, pid: int) -> bool:
        try:
            # a descriptor and not the number: the process may be gone, and the number another's,
            # when it is let go
            descriptor = os.pidfd_open(pid)
        except ProcessLookupError:
            return False
        signal.pidfd_send_signal(descriptor, signal.SIGSTOP)
        self._stopped.add(index)

        def let_go() -> bool:
            self._stopped.discard(index)
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(descriptor, signal.SIGCONT)
            os.close(descriptor)
            return True

        self._push(time.monotonic() + self._stop_s, let_go, f"letting process {pid} go on")
        return True

    def _restart(self, index: int) -> None:
        server = self._servers[index]
        self._before_kill(index)
        server.kill()
        try:
            server.start()
        except PeerError as error:
            log.error("%s", error)
            self.failed_starts.append(str(error))
