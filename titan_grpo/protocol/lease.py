"""Which run has the rollout service: the newest, while its lease lasts. A pure table.

::

    FREE --Open--> TAKEN by that run, until --Renewed--> later --Close--> FREE
                     |  --Open of the same or of a newer run--> TAKEN by that one
                     |  --Open of an older run--> Refuse
                     `--Ticked past the lease--> FREE

The lexicographic order of run ids is their age (messages.new_run_id). An older run is refused only
while a newer one has the service: the clocks in the ids belong to several hosts. Time is an
argument, in seconds of any monotonic clock."""

from dataclasses import dataclass, replace

from titan_grpo.errors import ProtocolError


@dataclass(frozen=True, slots=True)
class Lease:
    """``run`` and ``session`` are empty while the service is free. ``until``: end of the lease."""

    lease_s: float
    run: str = ""
    session: str = ""
    until: float = 0.0

    def __repr__(self) -> str:
        return (
            f"<{self.run} until {self.until:.1f}, session {self.session}>"
            if self.session
            else "<free>"
        )

    @property
    def due(self) -> float | None:
        """When ``Ticked`` will do something."""
        return self.until if self.session else None


@dataclass(frozen=True, slots=True)
class Open:
    """A run asks for the service, under a new session name."""

    run: str
    session: str
    now: float


@dataclass(frozen=True, slots=True)
class Renewed:
    """A request of the session arrived."""

    session: str
    now: float


@dataclass(frozen=True, slots=True)
class Close:
    """The trainer ends its session."""

    session: str


@dataclass(frozen=True, slots=True)
class Ticked:
    """Time has passed."""

    now: float


Event = Open | Renewed | Close | Ticked


@dataclass(frozen=True, slots=True)
class Begin:
    """The session has the service."""

    session: str


@dataclass(frozen=True, slots=True)
class End:
    """Abort what the session runs, and forget it."""

    session: str


@dataclass(frozen=True, slots=True)
class Refuse:
    """A newer run has the service."""

    run: str


@dataclass(frozen=True, slots=True)
class Unknown:
    """There is no such session, or no longer."""


Action = Begin | End | Refuse | Unknown


def step(t: Lease, event: Event) -> tuple[Lease, tuple[Action, ...]]:
    """The next state and what follows.

    >>> t, actions = step(Lease(10.0), Open("run1", "a", 0.0))
    >>> t, actions
    (<run1 until 10.0, session a>, (Begin(session='a'),))
    >>> step(t, Open("run2", "b", 1.0))[1]
    (End(session='a'), Begin(session='b'))
    >>> step(t, Open("run0", "b", 1.0))[1]
    (Refuse(run='run1'),)
    >>> step(t, Ticked(10.0))
    (<free>, (End(session='a'),))
    """
    end: tuple[Action, ...] = (End(t.session),) if t.session else ()
    match event:
        case Open(run, session, now):
            if not (run and session) or session == t.session:
                raise ProtocolError(
                    f"event {event!r} is not listed for {t!r}: a session has a name, and one of"
                    " its own"
                )
            if t.session and run < t.run:
                return t, (Refuse(t.run),)
            return replace(t, run=run, session=session, until=now + t.lease_s), (
                *end,
                Begin(session),
            )
        case Renewed(session, now) if t.session and session == t.session:
            return replace(t, until=max(t.until, now + t.lease_s)), ()
        case Close(session) if t.session and session == t.session:
            return Lease(t.lease_s), end
        case Ticked(now):
            return (Lease(t.lease_s), end) if t.session and now >= t.until else (t, ())
    return t, (Unknown(),)
