"""Seeded bugs: the production tables with one rule broken each. An exploration that does not catch
them proves nothing."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from tests.model_check.tables import Tables
from titan_grpo.protocol import admission, fence, image_slots, ledger, staging
from titan_grpo.protocol import lane as lanes
from titan_grpo.protocol.recovery import Relabel, settle


@dataclass(frozen=True, slots=True)
class Bug:
    """``breaks``: the rule in the words of docs/protocol.md. ``rollouts``: it shows among rollouts,
    not among weights.

    ``versions`` and ``faults``: as many as it needs to show in the way that its rule is about.
    """

    name: str
    breaks: str
    tables: Tables
    rollouts: bool = False
    versions: int = 2
    faults: int = 1


def _noting(phase: lanes.Phase, event: type, note: Callable[[lanes.Lane], ledger.Event]) -> Tables:
    """A lane that tells the ledger something else at one event of one phase."""

    def step(s: lanes.Lane, e: Any) -> tuple[lanes.Lane, tuple[lanes.Action, ...]]:
        after, actions = lanes.step(s, e)
        if s.phase is not phase or not isinstance(e, event):
            return after, actions
        kept = tuple(a for a in actions if not isinstance(a, lanes.Note))
        return after, (lanes.Note(note(s)), *kept)

    return Tables(lane=step)


def _holds(s: lanes.Lane) -> ledger.Event:
    return ledger.Holds(s.version if s.version is not None else 0)


def _no_forgetting(s: lanes.Lane, e: Any) -> tuple[lanes.Lane, tuple[lanes.Action, ...]]:
    after, actions = lanes.step(s, e)
    forgets = lanes.Note(ledger.Forgotten())
    return after, tuple(a for a in actions if a != forgets)


def _kept_epoch(s: lanes.Lane, e: Any) -> tuple[lanes.Lane, tuple[lanes.Action, ...]]:
    after, actions = lanes.step(s, e)
    if not isinstance(e, lanes.Rested):
        return after, actions
    return replace(after, epoch=s.epoch), (lanes.Connect(s.epoch, s.term),)


def _raises_its_term_again(s: lanes.Lane, e: Any) -> tuple[lanes.Lane, tuple[lanes.Action, ...]]:
    return lanes.step(replace(s, admitted=False) if isinstance(e, lanes.Outranked) else s, e)


def _never_raises_its_term(s: lanes.Lane, e: Any) -> tuple[lanes.Lane, tuple[lanes.Action, ...]]:
    return lanes.step(replace(s, admitted=True) if isinstance(e, lanes.Outranked) else s, e)


def _resumes_whatever_was_loaded(
    s: lanes.Lane, e: Any
) -> tuple[lanes.Lane, tuple[lanes.Action, ...]]:
    if s.phase is lanes.Phase.LABELLING and isinstance(e, lanes.Labelled):
        return lanes.step(replace(s, outcome=lanes.Outcome.NEW), e)
    return lanes.step(s, e)


def _first_version_is_pinned_by_no_lane(
    s: image_slots.SlotTable, e: Any
) -> tuple[image_slots.SlotTable, tuple[Any, ...]]:
    if isinstance(e, image_slots.Pin) and e.newer_than is None:
        return s, ()
    return image_slots.step(s, e)


def _sealing_drops_the_newest(
    s: image_slots.SlotTable, e: Any
) -> tuple[image_slots.SlotTable, tuple[Any, ...]]:
    if isinstance(e, image_slots.Seal):
        return image_slots.SlotTable((image_slots.Slot(),) * len(s.slots), sealed=True), ()
    return image_slots.step(s, e)


def _pins_ignored(
    s: image_slots.SlotTable, e: Any
) -> tuple[image_slots.SlotTable, tuple[Any, ...]]:
    if not isinstance(e, image_slots.Reserve):
        return image_slots.step(s, e)
    bare = image_slots.SlotTable(
        tuple(replace(slot, pins=frozenset()) for slot in s.slots), s.sealed
    )
    after, actions = image_slots.step(bare, e)
    slots = tuple(
        replace(new, pins=old.pins) for new, old in zip(after.slots, s.slots, strict=True)
    )
    return image_slots.SlotTable(slots, s.sealed), actions


def _complete_after_the_first_part(
    s: image_slots.SlotTable, e: Any
) -> tuple[image_slots.SlotTable, tuple[Any, ...]]:
    if not isinstance(e, image_slots.Copied):
        return image_slots.step(s, e)
    index = s.slot_of(e.version)
    slots = tuple(
        replace(slot, missing=frozenset({e.rank})) if i == index else slot
        for i, slot in enumerate(s.slots)
    )
    return image_slots.step(image_slots.SlotTable(slots, s.sealed), e)


def _any_epoch_may_commit(
    h: fence.EngineState, e: Any
) -> tuple[fence.EngineState, tuple[Any, ...]]:
    if isinstance(e, fence.CommitRequested):
        after, actions = fence.step(replace(h, in_force=(e.run_id, e.epoch)), e)
        return replace(after, in_force=h.in_force), actions
    return fence.step(h, e)


def _older_greetings_accepted(
    h: fence.EngineState, e: Any
) -> tuple[fence.EngineState, tuple[Any, ...]]:
    if isinstance(e, fence.OpenEpoch):
        return replace(h, in_force=(e.run_id, e.epoch), term=e.term), (fence.Serve(),)
    return fence.step(h, e)


def _broken_loads_forgotten(
    h: fence.EngineState, e: Any
) -> tuple[fence.EngineState, tuple[Any, ...]]:
    if isinstance(e, fence.Loaded) and not e.ok:
        return fence.step(h, replace(e, intact=True))
    return fence.step(h, e)


def _unchecked_bytes(s: staging.Staging, e: Any) -> tuple[staging.Staging, tuple[Any, ...]]:
    if isinstance(e, staging.LendRequested) and s.phase in (
        staging.Phase.STAGED,
        staging.Phase.EMPTY,
        staging.Phase.WRITING,
    ):
        return replace(s, phase=staging.Phase.LENT), (fence.Grant(),)
    return staging.step(s, e)


def _settles_without_a_label(*found: Any) -> tuple[Any, ...]:
    return tuple(step for step in settle(*found) if not isinstance(step, Relabel))


def _leaves_paused(*found: Any) -> tuple[Any, ...]:
    return tuple(step for step in settle(*found) if isinstance(step, Relabel))


def _one_too_many(a: admission.Admission, e: Any) -> tuple[admission.Admission, tuple[Any, ...]]:
    after, actions = admission.step(replace(a, max_staleness=a.max_staleness + 1), e)
    return replace(after, max_staleness=a.max_staleness), actions


def _given_up_prompts_keep_their_places(
    a: admission.Admission, e: Any
) -> tuple[admission.Admission, tuple[Any, ...]]:
    return (a, ()) if isinstance(e, admission.GiveUp) else admission.step(a, e)


def _what_made_no_version_counts(
    a: admission.Admission, e: Any
) -> tuple[admission.Admission, tuple[Any, ...]]:
    return (a, ()) if isinstance(e, admission.Unversioned) else admission.step(a, e)


BUGS = (
    Bug(
        "HOLDS is said before the read-back",
        "rule 1",
        _noting(lanes.Phase.PAUSING, lanes.Paused, _holds),
    ),
    Bug(
        "a lost answer to the load counts as HOLDS",
        "rule 2",
        _noting(lanes.Phase.LOADING, lanes.Failed, _holds),
    ),
    # a server that is restarted between load and label, on which a zombie's late call opens an
    # update
    Bug(
        "no engine is asked after the read-back",
        "rule 1: not by its own commit",
        Tables(ping=False),
        versions=1,
        faults=2,
    ),
    Bug("a server that was away is still believed", "rule 3", Tables(lane=_no_forgetting)),
    Bug("a transfer is retried in its old epoch", "rule 4", Tables(lane=_kept_epoch)),
    Bug(
        "the starting version is not published",
        "rule 5",
        Tables(boundary=_first_version_is_pinned_by_no_lane),
    ),
    Bug(
        "the newest version is dropped at shutdown",
        "rule 6",
        Tables(boundary=_sealing_drops_the_newest),
    ),
    Bug(
        "a half-loaded server is resumed",
        "rule 7: no error is swallowed",
        Tables(lane=_resumes_whatever_was_loaded),
    ),
    Bug(
        "one group more than the bound may start",
        "rule 8",
        Tables(admission=_one_too_many),
        True,
        3,
    ),
    Bug(
        "a prompt that was given up keeps its place",
        "rule 8: every place is trained, given up and counted, or on its way",
        Tables(admission=_given_up_prompts_keep_their_places),
        True,
        3,
    ),
    Bug(
        "a group that made no version counts",
        "rule 8: nothing starves",
        Tables(admission=_what_made_no_version_counts),
        True,
        1,
        2,
    ),
    Bug(
        "a pinned slot is reserved",
        "a pinned slot is not written",
        Tables(boundary=_pins_ignored),
        versions=3,
    ),
    Bug(
        "a version is complete after one rank's part",
        "no torn weights",
        Tables(boundary=_complete_after_the_first_part),
    ),
    Bug(
        "ranks choose their slots alone",
        "a version is published the same way on all ranks",
        Tables(same_slot=False),
    ),
    Bug("any epoch may commit", "a zombie cannot write", Tables(fence=_any_epoch_may_commit)),
    Bug(
        "an older hello is served",
        "a zombie cannot take a server",
        Tables(fence=_older_greetings_accepted),
    ),
    Bug(
        "a trainer that was replaced raises its term",
        "a zombie cannot take a server",
        Tables.with_clocks_behind(lane=_raises_its_term_again),
    ),
    Bug(
        "a new trainer does not raise its term",
        "a trainer takes over whatever its clock says",
        Tables.with_clocks_behind(lane=_never_raises_its_term),
    ),
    Bug("a broken load is forgotten", "no mixed weights", Tables(fence=_broken_loads_forgotten)),
    Bug("bytes are lent unchecked", "no mixed weights", Tables(staging=_unchecked_bytes)),
    Bug(
        "a settled server keeps a label that lies",
        "the label is what the engine holds",
        Tables(settle=_settles_without_a_label),
    ),
    Bug("a settled server stays paused", "nothing is left paused", Tables(settle=_leaves_paused)),
)
