"""The way between the trainer's rank 0 and what makes its rollouts: a child process, or a service elsewhere. The seam."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from titan_grpo.errors import TitanGrpoError
from titan_grpo.rollout import messages
from titan_grpo.rollout.spec import RolloutSpec


class RolloutStopped(TitanGrpoError):
    """The rollout process ended, or stopped delivering: no further batch can come."""


@dataclass(frozen=True, slots=True)
class Forgotten:
    """The far end was restarted, or let go of us: it knows nothing, and what was sent and not answered is lost.

    ``tell`` opens a new session there: its spec, and the messages that come first in it. Whatever is sent after ``tell``
    belongs to the new session, so whoever calls it holds the lock under which it sends. Never blocks.
    """

    tell: Callable[[RolloutSpec, Sequence[messages.ToWorker]], None]


Heard = messages.FromWorker | Forgotten | TitanGrpoError
"""What comes from a link. An error says that nothing will come any more."""

Hear = Callable[[Heard], None]
"""Called by a thread of the link, with one message after the other in the order in which they were sent; must not block."""


class Link(Protocol):
    """Carries messages both ways, in order and each of them once. Used by one client."""

    def start(self, spec: RolloutSpec, hear: Hear, timeout_s: float) -> None:
        """Begin. What becomes of it is heard: ``Ready``, or an error. ``timeout_s``: deadline of what is done in this call."""

    def send(self, message: messages.ToWorker, within_s: float | None = None) -> None:
        """Any thread; never blocks. A message that is still on its way after ``within_s`` seconds need not be delivered."""

    def close(self, deadline_s: float) -> None:
        """Have the far end abort everything and end; within the deadline. Idempotent; raises nothing. Errors may be heard."""
