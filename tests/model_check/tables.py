"""The production tables in one bundle, so that an exploration can run with one of them changed."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from titan_grpo.protocol import admission, image_slots, lane, server
from titan_grpo.protocol.recovery import settle

BACKWARDS = {"1": "-", "0": "0", "-": "1"}
"""Run ids (server.py) with the age turned round."""

Step = Callable[[Any, Any], Any]
"""(state, event) -> the next state, and with most tables the actions, or why it is refused."""


@dataclass(frozen=True, slots=True)
class Tables:
    """What production runs on. ``same_slot``: all ranks publish to the slot that travels with the
    batch. ``ping``: a lane asks the receiver of its epoch for a sign of life after the read-back.
    ``catches_up``: a trainer publishes before a step whose groups no published version may make.
    """

    boundary: Step = image_slots.step
    lane: Step = lane.step
    fence: Step = server.fence
    staging: Step = server.staging
    admission: Step = admission.step
    settle: Callable[..., tuple[Any, ...]] = settle
    same_slot: bool = True
    ping: bool = True
    catches_up: bool = True
    clocks_behind: bool = False

    @classmethod
    def with_clocks_behind(cls, **changed: Any) -> "Tables":
        """Each trainer's clock is behind that of the one before it: its run id is less."""
        step = changed.pop("fence", server.fence)

        def reversed_step(state: server.EngineState, event: Any) -> Any:
            if not isinstance(event, server.OpenEpoch):
                return step(state, event)
            run, epoch = state.in_force
            new, refused = step(
                replace(state, in_force=(BACKWARDS.get(run, run), epoch)),
                replace(event, run_id=BACKWARDS[event.run_id]),
            )
            run, epoch = new.in_force
            return replace(new, in_force=(BACKWARDS.get(run, run), epoch)), refused

        return cls(fence=reversed_step, clocks_behind=True, **changed)


class Violation(Exception):
    """A state that breaks an invariant; the text says which one."""
