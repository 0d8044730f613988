"""Lease of the rollout service: the newest run has it while its lease lasts. Pure.

::

    free --open--> taken by that run --renew--> taken, later end --close--> free
                     |  --open by the same or a newer run--> taken by that one
                     |  --open by an older run--> refused
                     `--end of the lease--> free

Run ids sort by age (messages.new_run_id). An older run is refused only while a newer one has the
service: the clocks in the ids are those of several hosts. Time is an argument, in seconds of any
monotonic clock."""

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Lease:
    """``run`` and ``session`` are empty while the service is free. ``until``: end of the lease."""

    lease_s: float
    run: str = ""
    session: str = ""
    until: float = 0.0

    def __repr__(self) -> str:
        taken = f"<{self.run} until {self.until:.1f}, session {self.session}>"
        return taken if self.session else "<free>"

    @property
    def due(self) -> float | None:
        """End of the lease; None while the service is free."""
        return self.until if self.session else None

    def open(self, run: str, session: str, now: float) -> "Lease | None":
        """Return the lease of a run's new session, which replaces the present one; None if a newer
        run has the service.

        >>> taken = Lease(10.0).open("run1", "a", 0.0)
        >>> taken, taken.open("run2", "b", 1.0), taken.open("run0", "b", 1.0)
        (<run1 until 10.0, session a>, <run2 until 11.0, session b>, None)
        """
        if run < self.run:  # a free service has none
            return None
        return replace(self, run=run, session=session, until=now + self.lease_s)

    def renew(self, session: str, now: float) -> "Lease | None":
        """Extend the lease after a request of ``session``; None if that session has no lease."""
        if not session or session != self.session:
            return None
        return replace(self, until=max(self.until, now + self.lease_s))

    def close(self, session: str) -> "Lease | None":
        """End the session's lease: return the free service; None if that session has no lease."""
        return Lease(self.lease_s) if session and session == self.session else None

    def expire(self, now: float) -> "Lease | None":
        """Return the free service after the end of the lease; None before it."""
        return Lease(self.lease_s) if self.session and now >= self.until else None
