"""Seeded bugs: the production tables with one rule broken each. An exploration that does not catch
them proves nothing."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from tests.model_check.rollouts import explore_rollouts
from tests.model_check.search import Bounds, Explorer
from tests.model_check.small import Bug
from tests.model_check.tables import Step, Tables
from titan_grpo.protocol import admission, image_slots, server
from titan_grpo.protocol import lane as lanes
from titan_grpo.protocol.messages import Entry, Standing
from titan_grpo.protocol.recovery import Relabel, settle

Laned = tuple[lanes.Lane, tuple[lanes.Action, ...]]
Slotted = tuple[image_slots.SlotTable, tuple[Any, ...]]
Fenced = server.FenceOutcome
Admitted = tuple[admission.Admission, tuple[Any, ...]]
"""What a table makes of an event: the state after it, and actions."""


BUGS: list[Bug] = []


def _weights(name: str, breaks: str, tables: Tables, versions: int = 2, faults: int = 1) -> None:
    """One server is enough for each; as many versions and faults as it needs to show in the way
    that its rule is about."""
    bounds = Bounds(servers=1, versions=versions, faults=faults)
    BUGS.append(Bug(name, breaks, lambda: Explorer(bounds, tables).run()))


def _seeded(
    table: str, name: str, breaks: str, behind: bool = False, **bounds: int
) -> Callable[[Step], Step]:
    """The step below, in place of a table's. ``behind``: where clocks are."""

    def seed(step: Step) -> Step:
        make = Tables.with_clocks_behind if behind else Tables
        changed: dict[str, Any] = {table: step}
        _weights(name, breaks, make(**changed), **bounds)
        return step

    return seed


def _rollouts(name: str, breaks: str, tables: Tables, versions: int, faults: int = 1) -> None:
    BUGS.append(Bug(name, breaks, lambda: explore_rollouts(2, versions, tables, faults=faults)))


def _admitted(name: str, breaks: str, versions: int, faults: int = 1) -> Callable[[Step], Step]:
    """The step below, in place of the admission table's."""

    def seed(step: Step) -> Step:
        _rollouts(name, breaks, Tables(admission=step), versions, faults)
        return step

    return seed


def _holding(phase: lanes.Phase, event: type) -> Tables:
    """A lane that takes its version for held at one event of one phase."""

    def step(s: lanes.Lane, e: Any) -> Laned:
        after, actions = lanes.step(s, e)
        if s.phase is phase and isinstance(e, event):
            after = replace(after, entry=Entry(Standing.HOLDS, s.version))
        return after, actions

    return Tables(lane=step)


_weights(
    "HOLDS is said before the read-back",
    "rule 1",
    _holding(lanes.Phase.PAUSING, lanes.Paused),
)
_weights(
    "a lost answer to the load counts as HOLDS",
    "rule 2",
    _holding(lanes.Phase.LOADING, lanes.Failed),
)
# a server that is restarted between load and label, on which a zombie's late call opens an update
_weights(
    "no engine is asked after the read-back",
    "rule 1: not by its own commit",
    Tables(ping=False),
    versions=1,
    faults=2,
)
_weights(
    "ranks choose their slots alone",
    "a version is published the same way on all ranks",
    Tables(same_slot=False),
)


@_seeded("lane", "a server that was away is still believed", "rule 3")
def _no_forgetting(s: lanes.Lane, e: Any) -> Laned:
    after, actions = lanes.step(s, e)
    return replace(after, entry=s.entry) if after.entry == Entry() else after, actions


@_seeded("lane", "a transfer is retried in its old epoch", "rule 4")
def _kept_epoch(s: lanes.Lane, e: Any) -> Laned:
    after, actions = lanes.step(s, e)
    if not isinstance(e, lanes.Rested):
        return after, actions
    return replace(after, epoch=s.epoch), (lanes.Connect(s.epoch, s.term),)


@_seeded(
    "lane",
    "a trainer that was replaced raises its term",
    "a zombie cannot take a server",
    behind=True,
)
def _raises_its_term_again(s: lanes.Lane, e: Any) -> Laned:
    return lanes.step(replace(s, admitted=False) if isinstance(e, lanes.Outranked) else s, e)


@_seeded(
    "lane",
    "a new trainer does not raise its term",
    "a trainer takes over whatever its clock says",
    behind=True,
)
def _never_raises_its_term(s: lanes.Lane, e: Any) -> Laned:
    return lanes.step(replace(s, admitted=True) if isinstance(e, lanes.Outranked) else s, e)


@_seeded("lane", "a half-loaded server is resumed", "rule 7: no error is swallowed")
def _resumes_whatever_was_loaded(s: lanes.Lane, e: Any) -> Laned:
    if s.phase is lanes.Phase.LABELLING and isinstance(e, lanes.Labelled):
        return lanes.step(replace(s, outcome=lanes.Outcome.NEW), e)
    return lanes.step(s, e)


@_seeded("boundary", "the starting version is not published", "rule 5")
def _first_version_is_pinned_by_no_lane(s: image_slots.SlotTable, e: Any) -> Slotted:
    if isinstance(e, image_slots.Pin) and e.newer_than is None:
        return s, ()
    return image_slots.step(s, e)


@_seeded("boundary", "the newest version is dropped at shutdown", "rule 6")
def _sealing_drops_the_newest(s: image_slots.SlotTable, e: Any) -> Slotted:
    if isinstance(e, image_slots.Finish):
        return image_slots.SlotTable((image_slots.Slot(),) * len(s.slots), finished=True), ()
    return image_slots.step(s, e)


@_seeded("boundary", "a pinned slot is reserved", "a pinned slot is not written", versions=3)
def _pins_ignored(s: image_slots.SlotTable, e: Any) -> Slotted:
    if not isinstance(e, image_slots.Reserve):
        return image_slots.step(s, e)
    bare = image_slots.SlotTable(
        tuple(replace(slot, pins=frozenset()) for slot in s.slots), s.finished
    )
    after, actions = image_slots.step(bare, e)
    slots = tuple(
        replace(new, pins=old.pins) for new, old in zip(after.slots, s.slots, strict=True)
    )
    return image_slots.SlotTable(slots, s.finished), actions


@_seeded("boundary", "a version is complete after one rank's part", "no torn weights")
def _complete_after_the_first_part(s: image_slots.SlotTable, e: Any) -> Slotted:
    if not isinstance(e, image_slots.Copied):
        return image_slots.step(s, e)
    index = s.slot_of(e.version)
    slots = tuple(
        replace(slot, missing=frozenset({e.rank})) if i == index else slot
        for i, slot in enumerate(s.slots)
    )
    return image_slots.step(image_slots.SlotTable(slots, s.finished), e)


@_seeded("fence", "any epoch may commit", "a zombie cannot write")
def _any_epoch_may_commit(h: server.EngineState, e: Any) -> Fenced:
    if isinstance(e, server.CommitRequested):
        after, actions = server.fence(replace(h, in_force=(e.run_id, e.epoch)), e)
        return replace(after, in_force=h.in_force), actions
    return server.fence(h, e)


@_seeded("fence", "an older hello is served", "a zombie cannot take a server")
def _older_greetings_accepted(h: server.EngineState, e: Any) -> Fenced:
    if isinstance(e, server.OpenEpoch):
        return replace(h, in_force=(e.run_id, e.epoch), term=e.term), ""
    return server.fence(h, e)


@_seeded("fence", "a broken load is forgotten", "no mixed weights")
def _broken_loads_forgotten(h: server.EngineState, e: Any) -> Fenced:
    if isinstance(e, server.Loaded) and not e.ok:
        return server.fence(h, replace(e, intact=True))
    return server.fence(h, e)


@_seeded("staging", "bytes are lent unchecked", "no mixed weights")
def _unchecked_bytes(s: server.Staging, e: Any) -> server.StagingOutcome:
    if isinstance(e, server.LendRequested) and s.phase in (
        server.Phase.STAGED,
        server.Phase.EMPTY,
        server.Phase.WRITING,
    ):
        return replace(s, phase=server.Phase.LENT), ""
    return server.staging(s, e)


@_seeded("settle", "a settled server keeps a label that lies", "the label is what the engine holds")
def _settles_without_a_label(*found: Any) -> tuple[Any, ...]:
    return tuple(step for step in settle(*found) if not isinstance(step, Relabel))


@_seeded("settle", "a settled server stays paused", "nothing is left paused")
def _leaves_paused(*found: Any) -> tuple[Any, ...]:
    return tuple(step for step in settle(*found) if isinstance(step, Relabel))


@_admitted("one group more than the bound may start", "rule 8", 3)
def _one_too_many(a: admission.Admission, e: Any) -> Admitted:
    after, actions = admission.step(replace(a, max_staleness=a.max_staleness + 1), e)
    return replace(after, max_staleness=a.max_staleness), actions


@_admitted(
    "a prompt that was given up keeps its place",
    "rule 8: every place is trained, given up and counted, or on its way",
    3,
)
def _given_up_prompts_keep_their_places(a: admission.Admission, e: Any) -> Admitted:
    return (a, ()) if isinstance(e, admission.GiveUp) else admission.step(a, e)


@_admitted("a group that made no version counts", "rule 8: nothing starves", 1, 2)
def _what_made_no_version_counts(a: admission.Admission, e: Any) -> Admitted:
    return (a, ()) if isinstance(e, admission.Unversioned) else admission.step(a, e)


_rollouts(
    "what was skipped is never published",
    "rule 8: nothing starves",
    Tables(catches_up=False),
    2,
)
