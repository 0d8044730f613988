"""Which servers a dead or frozen trainer may have left paused, and when to recover them. Pure.

::

    CONNECTING --CONNECTED--> (removed)    a connecting lane may die before it resumes its server
    PAUSED     --RESUMED----> (removed)    a commit; each call renews the lease of either
    both, when the lease ends, or at once when the trainer ends --> RECOVERING
    RECOVERING --Recovered--> RECOVERED, checked again    --Superseded--> (removed)
               --Failed--> retried, up to Deadlines.tries

Time is an argument, in seconds of any monotonic clock. Cancel a recovery when the lane reports
again. Recover each server twice: a pause of the dead trainer that is in flight may arrive after the
first recovery."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum

from titan_grpo.errors import ProtocolError
from titan_grpo.protocol.lane import LaneEvent, Point
from titan_grpo.protocol.recovery import Health


@dataclass(frozen=True, slots=True)
class Deadlines:
    """Deadlines of the guard, in seconds; ``tries``: attempts to recover one server.

    ``pause_s``: a lane's lease while its server is paused; ``greet_s``: its lease while it
    connects; both include its backoff after a failure. ``again_s``: from the first recovery of a
    dead trainer's server to the second. The waits between tries double from ``first_s`` to
    ``longest_s``.
    """

    pause_s: float
    greet_s: float
    again_s: float = 2.0
    tries: int = 10
    first_s: float = 0.25
    longest_s: float = 5.0


class Phase(Enum):
    """State of a watched server."""

    CONNECTING = "greeting"
    PAUSED = "paused"
    RECOVERING = "settling"
    RECOVERED = "settled"


@dataclass(frozen=True, slots=True)
class GuardedServer:
    """One server. ``epoch``: the newest of its lane. ``opened``: a commit began and its end was not
    reported. ``due``: when its lease, or the wait for the next try, ends.

    ``recoveries``: how often it was recovered; counted anew from the trainer's end. ``number``: of
    its newest recovery.
    """

    run_id: str
    epoch: int
    phase: Phase
    opened: bool
    due: float
    failures: int = 0
    recoveries: int = 0
    number: int = 0

    def __repr__(self) -> str:
        failures = f", {self.failures} failures" if self.failures else ""
        return f"{self.phase.value} epoch {self.epoch} due {self.due:.1f}{failures}"


@dataclass(frozen=True, slots=True)
class GuardState:
    """The servers that may be left paused. ``ended``: the trainer has ended. ``begun``: number of
    recoveries so far."""

    deadlines: Deadlines
    servers: Mapping[str, GuardedServer] = field(default_factory=dict)
    ended: bool = False
    begun: int = 0

    def __repr__(self) -> str:
        servers = ", ".join(f"{url} {w!r}" for url, w in self.servers.items()) or "nothing open"
        return f"<{servers}{', trainer gone' if self.ended else ''}>"

    @property
    def done(self) -> bool:
        """Whether the guard process may end."""
        return self.ended and not self.servers

    @property
    def due(self) -> float | None:
        """Time from which a ``Ticked`` has an effect; None: no server waits."""
        return min(
            (w.due for w in self.servers.values() if w.phase is not Phase.RECOVERING), default=None
        )


# Events.


@dataclass(frozen=True, slots=True)
class LaneReported:
    """A lane event arrived."""

    event: LaneEvent
    now: float


@dataclass(frozen=True, slots=True)
class Ended:
    """The trainer has ended. ``clean``: it closed the guard, after its lanes had ended."""

    clean: bool
    now: float


@dataclass(frozen=True, slots=True)
class Ticked:
    """Time has passed."""

    now: float


@dataclass(frozen=True, slots=True)
class Recovered:
    """The server's label says what it holds; it generates if that is one whole version. ``number``:
    as in Recover, also in the other results."""

    url: str
    number: int
    now: float


@dataclass(frozen=True, slots=True)
class Superseded:
    """A newer epoch or run has the server and recovers it itself."""

    url: str
    number: int


@dataclass(frozen=True, slots=True)
class Failed:
    """The server did not answer, or gave a bad answer."""

    url: str
    number: int
    now: float


Event = LaneReported | Ended | Ticked | Recovered | Superseded | Failed


# Actions.


@dataclass(frozen=True, slots=True)
class Recover:
    """Fence the lane and perform the steps of recovery.settle. ``doubtful``: do nothing unless the
    server is paused. ``number``: of this recovery, for its result."""

    url: str
    run_id: str
    epoch: int
    doubtful: bool
    number: int


@dataclass(frozen=True, slots=True)
class CancelRecovery:
    """The lane reported again: stop before the next step."""

    url: str


@dataclass(frozen=True, slots=True)
class GiveUp:
    """All tries failed."""

    url: str


Action = Recover | CancelRecovery | GiveUp
_Result = tuple[GuardState, tuple[Action, ...]]


def _put(s: GuardState, url: str, server: GuardedServer | None) -> GuardState:
    others = {u: w for u, w in s.servers.items() if u != url}
    return replace(s, servers=others if server is None else others | {url: server})


def _lane_reported(s: GuardState, e: LaneReported) -> _Result:
    p, before = e.event, s.servers.get(e.event.url)
    recovering = before is not None and before.phase is Phase.RECOVERING
    cancel: tuple[Action, ...] = (CancelRecovery(p.url),) if recovering else ()
    match p.point:
        case Point.GREET:
            opened = before is not None and before.opened
            phase, due = Phase.CONNECTING, e.now + s.deadlines.greet_s
        case Point.PAUSE | Point.LOAD | Point.LABEL | Point.RESUME:
            # Each call of a commit repeats the point before it and so renews the lease. A lease as
            # long as the whole commit would leave a frozen trainer's server paused for too long.
            opened, phase, due = True, Phase.PAUSED, e.now + s.deadlines.pause_s
        case Point.CONNECTED | Point.RESUMED | Point.HELD:
            return _put(s, p.url, None), cancel
        case _:
            return s, ()
    return _put(s, p.url, GuardedServer(p.run_id, p.epoch, phase, opened, due)), cancel


def _recovering(s: GuardState, url: str, number: int) -> GuardedServer | None:
    """Return the server if this recovery still runs; None if it was cancelled. A cancelled one may
    still be in a call while the next one of the same epoch runs."""
    server = s.servers.get(url)
    current = server is not None and server.phase is Phase.RECOVERING and server.number == number
    return server if current else None


def step(s: GuardState, event: Event) -> _Result:
    """Return the next state and the actions. Raises ProtocolError for LaneReported or Ended after
    the end.

    Worked example (pause_s 3): PAUSE at 0, nothing more, Ticked(3): RECOVERING, (Recover(url, run,
    epoch, doubtful=False, number=1),).
    """
    if s.ended and isinstance(event, LaneReported | Ended):
        raise ProtocolError(f"event {event!r} is not listed for {s!r}")
    match event:
        case LaneReported():
            return _lane_reported(s, event)
        case Ended(clean, now):
            # A server that only connected gets one try after a clean end: its lane ended by itself.
            last = s.deadlines.tries - 1
            servers = {
                url: replace(
                    w, due=now, recoveries=0, failures=w.failures if w.opened or not clean else last
                )
                for url, w in s.servers.items()
            }
            return replace(s, servers=servers, ended=True), ()
        case Ticked(now):
            due = [
                url
                for url, w in s.servers.items()
                if w.phase is not Phase.RECOVERING and w.due <= now
            ]
            begun = {
                url: replace(s.servers[url], phase=Phase.RECOVERING, number=number)
                for number, url in enumerate(due, start=s.begun + 1)
            }
            actions = tuple(
                Recover(url, w.run_id, w.epoch, w.recoveries > 0 or not w.opened, w.number)
                for url, w in begun.items()
            )
            servers = {**s.servers, **begun}
            return replace(s, servers=servers, begun=s.begun + len(begun)), actions
    server = _recovering(s, event.url, event.number)
    if server is None:
        return s, ()
    match event:
        case Recovered(url, _, now):
            recoveries = server.recoveries + 1
            if s.ended and recoveries >= 2:
                return _put(s, url, None), ()
            again = now + (s.deadlines.again_s if s.ended else s.deadlines.pause_s)
            server = replace(
                server, phase=Phase.RECOVERED, due=again, failures=0, recoveries=recoveries
            )
            return _put(s, url, server), ()
        case Superseded(url):
            return _put(s, url, None), ()
        case Failed(url, _, now):
            d, failures = s.deadlines, server.failures + 1
            if failures >= d.tries:
                return _put(s, url, None), (GiveUp(url),)
            phase = Phase.PAUSED if server.opened else Phase.CONNECTING
            again = Health(d.first_s, d.longest_s, server.failures).silent(now).until
            return _put(s, url, replace(server, phase=phase, due=again, failures=failures)), ()
