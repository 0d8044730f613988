"""Groups of an Atropos API (atroposlib's server): its calls as data, its groups as ours, and the
source in the rollout process that takes its batches.

A group of Atropos has, per sequence, ``tokens`` (prompt and completion), ``masks`` (-100 where a
token was not sampled, else the token), a score, and ``inference_logprobs``. The last are aligned
with the tokens: entry t is the log-probability OF token t, and 1.0 where the token is masked. Our
records keep that alignment; algorithm/batch.py shifts it. The API has no policy versions. An
environment may give one, as ``policy_version`` in ``group_overrides`` or ``generation_params``.
"""

import asyncio
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from titan_grpo.engines.http import AsyncDriver, Call, HttpRefused, ignore, want
from titan_grpo.errors import ConfigError, DataError, PeerError, ServerRefused
from titan_grpo.rollout import messages
from titan_grpo.rollout.external import External, Fail, Send
from titan_grpo.rollout.messages import RolloutSpec
from titan_grpo.samples import Completion, Group, Prompt, sound_logprobs

POLL_S = (0.1, 1.0)
"""First and longest pause between two requests to an API that has no batch yet; it cannot say
when."""

OUTAGE_S = (0.5, 15.0)
"""The same after it did not answer."""

MAX_REJECTED_IN_A_ROW = 64
"""Then what makes the groups is at fault, and waiting would not help."""

MASKED = -100
"""Mask of a token that the policy did not sample."""

CALL_S = 30.0
"""Deadline of a call, in seconds; a batch can be some hundred megabytes of JSON."""


@dataclass(frozen=True, slots=True)
class Waiting:
    """The oldest version that a group without one can be of, however long it waited in the API.

    Once the API has no batch, what it still holds is less than a batch, and goes into the next
    ones. ``oldest``: of the groups that it hands out. ``held``: the oldest version that a server
    held at the last answer without a batch that moved it; ``taken``: a batch came since.
    """

    oldest: int
    held: int
    taken: bool = False

    def batch(self) -> "Waiting":
        """A batch was taken."""
        return replace(self, taken=True)

    def none(self, held: int, left: int) -> "Waiting":
        """There was no batch: the API holds ``left`` groups, and ``held`` is the oldest version
        that a server holds.

        >>> Waiting(3, 3).none(4, left=2), Waiting(3, 3).none(4, left=0)
        (Waiting(oldest=3, held=3, taken=False), Waiting(oldest=4, held=4, taken=False))
        >>> Waiting(3, 4).batch().none(5, left=2)
        Waiting(oldest=4, held=5, taken=False)
        """
        if left == 0:
            return Waiting(held, held)
        return Waiting(self.held, held) if self.taken else self


class Rejected(DataError):
    """A group that cannot be trained on; ``reason`` is one word for the counters."""

    def __init__(self, reason: str, text: str) -> None:
        super().__init__(text)
        self.reason = reason


class Override(msgspec.Struct):
    """What an environment sets for one sequence."""

    set_advantage_to_zero: bool | None = None


class Item(msgspec.Struct):
    """The fields of a group that are used. A score or a log-probability may be NaN here."""

    tokens: list[list[int]]
    masks: list[list[int]]
    scores: list[float]
    inference_logprobs: list[list[float]] | None = None
    images: Any = None
    overrides: list[Override] | None = None
    group_overrides: Any = None
    generation_params: Any = None
    env_id: Any = None


Batch = tuple[Mapping[str, Any], ...] | None
"""Groups of one batch, none while there are too few; None: no trainer is registered."""


def batch_of(answer: Any) -> Batch:
    """The answer to ``GET /batch``. Raises ServerRefused for one of another form."""
    if isinstance(answer, Mapping) and answer.get("status") == "error":
        return None
    batch = answer.get("batch", ...) if isinstance(answer, Mapping) else ...
    if batch is None:
        return ()
    if not isinstance(batch, list) or not all(isinstance(group, Mapping) for group in batch):
        raise ServerRefused(
            f"/batch must answer with 'batch', a list of groups or null, got {str(answer)[:200]!r}"
        )
    return tuple(batch)


BATCH = Call("GET", "/batch", CALL_S, batch_of)
"""Take one batch. The first one lets environments register."""

RESET = Call("GET", "/reset_data", CALL_S, ignore)
"""Throw away all that the server holds."""

LEFT = Call("GET", "/status", CALL_S, lambda a: int(want(a, "queue_size", int, "/status")))
"""How many groups wait outside of batches."""


def register_call(registration: Mapping[str, Any]) -> Call[int]:
    """Register with these fields; the answer is a number without a use. Raises ServerRefused for
    another answer."""

    def number(answer: Any) -> int:
        return int(want(answer, "uuid", int, "/register"))

    return Call("POST", "/register", CALL_S, number, json=dict(registration))


def group_of(data: Mapping[str, Any], version: int) -> Group:
    """One group, with prompt index 0. ``version`` is used where the group gives none.

    The prompt is what all sequences have in common before their first sampled token; what follows
    is the completion, with its masked tokens as context (turns of a tool, say); masked tokens at
    the end are cut, since nothing is learnt from them. ``overrides[i]["set_advantage_to_zero"]``
    takes a sequence out of the training, not out of its group's mean.

    Raises Rejected for a group that breaks its own declaration.
    """
    try:
        item = msgspec.convert(data, Item)
    except msgspec.ValidationError as error:
        raise Rejected(
            "bad_score" if "scores" in str(error) else "malformed", str(error)
        ) from error
    scores, logprobs = item.scores, item.inference_logprobs
    if not all(map(math.isfinite, scores)):
        raise Rejected("bad_score", f"scores must be finite numbers, got {str(scores)[:100]}")
    if logprobs is None:
        text = "inference_logprobs are missing: nothing would correct for how the data was made"
        raise Rejected("no_logprobs", text)
    if item.images:
        raise Rejected("images", "images cannot be trained on")
    counts = (len(item.tokens), len(item.masks), len(scores), len(logprobs))
    if not item.tokens or len(set(counts)) != 1:
        raise Rejected(
            "length_mismatch",
            f"tokens, masks, scores and inference_logprobs must be as many, got {counts}",
        )
    for number, row in enumerate(zip(item.tokens, item.masks, logprobs, strict=True)):
        lengths = tuple(len(values) for values in row)
        if len(set(lengths)) != 1:
            raise Rejected(
                "length_mismatch",
                f"sequence {number}: tokens, masks and inference_logprobs have lengths {lengths}",
            )
    if item.overrides is not None and len(item.overrides) != len(scores):
        text = f"overrides must be one object per sequence ({len(scores)})"
        raise Rejected("malformed", f"{text}, got {len(item.overrides)}")
    start = _prompt_length(item.tokens, item.masks)
    if start == 0:
        raise Rejected(
            "empty_prompt",
            "the sequences must begin with one masked token that they have in common",
        )
    completions = tuple(
        _completion(item, number, start, _version(item, version)) for number in range(len(scores))
    )
    return Group(Prompt(0, tuple(item.tokens[0][:start])), completions)


def _completion(item: Item, number: int, start: int, version: int) -> Completion:
    """Sequence ``number`` from token ``start`` to its last sampled one."""
    assert item.inference_logprobs is not None
    sampled = [mask != MASKED for mask in item.masks[number][start:]]
    if True not in sampled:
        raise Rejected("nothing_sampled", f"sequence {number} has no token that is not masked")
    stop = len(sampled) - sampled[::-1].index(True)
    sampled, end = sampled[:stop], start + stop
    logprobs = item.inference_logprobs[number][start:end]
    for place, (chosen, logprob) in enumerate(zip(sampled, logprobs, strict=True)):
        if chosen and not sound_logprobs((logprob,)):
            raise Rejected(
                "bad_logprob",
                f"sequence {number}: token {place} after the prompt is not masked and its"
                f" inference_logprob is {logprob}",
            )
    return Completion(
        token_ids=tuple(item.tokens[number][start:end]),
        logprobs=tuple(lp if s else 0.0 for lp, s in zip(logprobs, sampled, strict=True)),
        finish_reason="external",
        version_first=version,
        version_last=version,
        server=f"atropos environment {item.env_id}",
        reward=item.scores[number],
        sampled=() if all(sampled) else tuple(sampled),
        zero_advantage=bool(item.overrides and item.overrides[number].set_advantage_to_zero),
    )


def _prompt_length(tokens: Sequence[Sequence[int]], masks: Sequence[Sequence[int]]) -> int:
    """Leading masked tokens that all sequences have in common."""
    length = min(
        next((at for at, mask in enumerate(row) if mask != MASKED), len(row)) for row in masks
    )
    while length and any(row[:length] != tokens[0][:length] for row in tokens):
        length -= 1
    return length


def _version(item: Item, default: int) -> int:
    for given in (item.group_overrides, item.generation_params):
        value = given.get("policy_version") if isinstance(given, Mapping) else None
        if isinstance(value, int) and not isinstance(value, bool):
            return value
    return default


class AtroposSource(External):
    """Takes batches from an Atropos API while less than two steps' worth waits for the trainer (one
    with ``max_staleness = 0``).

    A group without a version counts as made by the oldest version that a server held when it can
    have come to the API (Waiting).
    """

    def __init__(self, spec: RolloutSpec, send: Send, fail: Fail) -> None:
        super().__init__(spec, send, fail)
        self._driver = AsyncDriver(spec.atropos_url, max_connections=1)
        # batch_size counts sequences, not groups.
        self._registration = spec.registration | {"batch_size": self._per_step}
        self._room = asyncio.Event()
        self._room.set()
        self._rejected_in_a_row = 0
        self._age = Waiting(spec.base_version, spec.base_version)
        self._task = asyncio.get_running_loop().create_task(self._take_batches())
        self._task.add_done_callback(self._ended)

    async def close(self) -> None:
        """Leave the API; what it holds stays there."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        await self._driver.close()

    def on(self, message: messages.ToWorker) -> None:
        """As the base; and see whether there is room for a batch."""
        super().on(message)
        self._update_room()

    def _update_room(self) -> None:
        # The rest stays in the API, which hands out the newest first.
        if self.waiting < self._per_step * (1 + min(self._spec.max_staleness, 1)):
            self._room.set()
        else:
            self._room.clear()

    async def _take_batches(self) -> None:
        known, pause = False, POLL_S[0]
        while True:
            # no deadline: room for a batch, when the trainer takes one; or close(), by cancelling
            await self._room.wait()
            try:
                batch = await (self._driver.run(BATCH) if known else self._register())
                known = batch is not None
                if known and not batch:
                    # The servers first: a group that comes meanwhile is not older than that.
                    held = min(self._versions.values(), default=self._trainer_version)
                    self._age = self._age.none(held, await self._driver.run(LEFT))
            except PeerError as error:
                if isinstance(error, HttpRefused) and error.status < 500:
                    raise ConfigError(
                        f"rollout.atropos_url must be that of an Atropos API: {error}"
                    ) from error
                # It may have been restarted or reset; after a reset it answers 500 until a trainer
                # registers.
                known = False
                self._counts.add("outages")
                self._report(f"{self._driver.url} gave no batch: {error}")
                pause = await _pause(max(pause, OUTAGE_S[0]), OUTAGE_S[1])
                continue
            if batch is None:
                continue
            for item in batch:
                self._take(item)
            self._age = self._age.batch() if batch else self._age
            pause = POLL_S[0] if batch else await _pause(pause, POLL_S[1])

    async def _register(self) -> Batch:
        """Register (repeating it does no harm) and ask for a batch."""
        register = register_call(self._registration)
        await self._driver.run(register)
        batch = await self._driver.run(BATCH)
        if batch is None:
            # It was given groups before a trainer, so it takes no registration any more and would
            # never hand them out.
            self._report(
                f"{self._driver.url} held groups from before its registration, and has to throw"
                " them away"
            )
            await self._driver.run(RESET)
            await self._driver.run(register)
            batch = await self._driver.run(BATCH)
        if batch is None:
            raise ServerRefused(f"{self._driver.url} does not take our registration")
        return batch

    def _take(self, item: Mapping[str, Any]) -> None:
        try:
            group = group_of(item, self._age.oldest)
            newest = max([self._trainer_version, *self._versions.values()])
            if group.version > newest:
                raise Rejected(
                    "unknown_version",
                    f"its version {group.version} does not exist, the newest is {newest}",
                )
        except Rejected as error:
            self._counts.add(f"dropped.{error.reason}")
            self._rejected_in_a_row += 1
            self._report(
                f"a group of atropos environment {item.get('env_id')} is not trained on: {error}"
            )
            if self._rejected_in_a_row >= MAX_REJECTED_IN_A_ROW:
                raise DataError(
                    f"{MAX_REJECTED_IN_A_ROW} groups in a row cannot be trained on; the last:"
                    f" {error}"
                ) from error
            return
        self._rejected_in_a_row = 0
        self._deliver(group)
        self._update_room()

    def _ended(self, task: "asyncio.Task[None]") -> None:
        # no deadline: the task has ended: this is its callback
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self._fail(error)


async def _pause(seconds: float, longest: float) -> float:
    """Wait; returns the length of the next pause."""
    await asyncio.sleep(min(seconds, longest))
    return min(2 * seconds, longest)
