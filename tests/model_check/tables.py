"""The production tables in one bundle, so that an exploration can run with one of them changed."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from titan_grpo.protocol import admission, fence, image_slots, lane, ledger, staging
from titan_grpo.protocol.recovery import settle

Step = Callable[[Any, Any], tuple[Any, tuple[Any, ...]]]


@dataclass(frozen=True, slots=True)
class Tables:
    """What production runs on. ``same_slot``: all ranks publish to the slot that travels with the
    batch. ``ping``: a lane asks the receiver of its epoch for a sign of life after the read-back.
    """

    boundary: Step = image_slots.step
    lane: Step = lane.step
    ledger: Step = ledger.step
    fence: Step = fence.step
    staging: Step = staging.step
    admission: Step = admission.step
    settle: Callable[..., tuple[Any, ...]] = settle
    same_slot: bool = True
    ping: bool = True


class Violation(Exception):
    """A state that breaks an invariant; the text says which one."""
