"""Groups from an Atropos API (atroposlib's server): its calls as data, the conversion of its
groups, and the source in the rollout process that takes its batches.

A group of Atropos has, per sequence, ``tokens`` (prompt and completion), ``masks`` (-100 where a
token was not sampled, else the token), a score, and ``inference_logprobs``. The last are aligned
with the tokens: entry t is the log-probability OF token t, and 1.0 where the token is masked. Our
records keep that alignment; algorithm/batch.py shifts it. The API has no policy versions. An
environment may give one, as ``policy_version`` in ``group_overrides`` or ``generation_params``.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import msgspec

from titan_grpo.engines.generation import TokenId
from titan_grpo.engines.http import AsyncDriver, Call, HttpRefused, ignore, want
from titan_grpo.errors import ConfigError, DataError, PeerError, ServerRefused
from titan_grpo.protocol.admission import too_stale
from titan_grpo.protocol.messages import ServerState
from titan_grpo.rollout import messages
from titan_grpo.rollout.external import External, Reward, Send
from titan_grpo.rollout.messages import RolloutSpec
from titan_grpo.samples import EXTERNAL, Completion, Group, Prompt, shared_prefix, sound_logprobs

POLL_S = (0.1, 1.0)
"""First and longest pause, in seconds, between two polls of an API that has no batch yet."""

OUTAGE_S = (0.5, 15.0)
"""First and longest pause, in seconds, after the API failed to answer."""

MAX_REJECTED_IN_A_ROW = 64
"""Limit of rejected groups in a row. So many mean that the environment is at fault."""

MASKED = -100
"""Mask of a token that the policy did not sample."""

CALL_S = 30.0
"""Deadline of a call, in seconds, without the time for a batch's tokens."""

TOKEN_S = 1e-5
"""Time of a batch's call for each token, in seconds: four times what atroposlib 0.4.0 needs to
encode one (2.5 us), which leaves time for the network."""


@dataclass(frozen=True, slots=True)
class Waiting:
    """Lower bound for the version of a group without one, however long it waited in the API.

    When the API has no batch, it holds less than a batch of groups; these go into the next batches.
    ``oldest``: lower bound for the groups that it hands out. ``held``: oldest version of a server
    at the last empty answer that moved the bound. ``taken``: whether a batch came since then.
    """

    oldest: int
    held: int
    taken: bool = False

    def batch(self) -> "Waiting":
        """Return the state after a batch was taken."""
        return replace(self, taken=True)

    def none(self, held: int, left: int) -> "Waiting":
        """Return the state after an answer without a batch. ``left``: groups that the API holds;
        ``held``: oldest version that a server holds.

        >>> Waiting(3, 3).none(4, left=2), Waiting(3, 3).none(4, left=0)
        (Waiting(oldest=3, held=3, taken=False), Waiting(oldest=4, held=4, taken=False))
        >>> Waiting(3, 4).batch().none(5, left=2)
        Waiting(oldest=4, held=5, taken=False)
        """
        if left == 0:
            return Waiting(held, held)
        return Waiting(self.held, held) if self.taken else self


class Rejected(DataError):
    """A group cannot be trained on. ``reason``: name of its counter."""

    def __init__(self, reason: str, text: str) -> None:
        super().__init__(text)
        self.reason = reason


class Override(msgspec.Struct):
    """An environment's settings for one sequence."""

    set_advantage_to_zero: bool | None = None


class Item(msgspec.Struct):
    """The fields of a group that we use. Log-probabilities are not checked yet."""

    tokens: list[list[TokenId]]
    masks: list[list[int]]
    scores: list[Reward]
    inference_logprobs: list[list[float]] | None = None
    images: Any = None
    overrides: list[Override] | None = None
    group_overrides: Any = None
    generation_params: Any = None
    env_id: Any = None


Batch = tuple[Mapping[str, Any], ...] | None
"""Groups of one batch; empty while there are too few; None: no trainer is registered."""


def batch_of(answer: Any) -> Batch:
    """Parse the answer to ``GET /batch``. Raises ServerRefused if it has another form."""
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


def batch_call(spec: RolloutSpec) -> Call[Batch]:
    """Return the call that takes one batch. The first one lets environments register."""
    # The API encodes a batch that it no longer has: past the deadline its groups are lost.
    tokens = spec.prompts_per_step * spec.group_size * spec.row_tokens
    return Call("GET", "/batch", CALL_S + TOKEN_S * tokens, batch_of)


RESET = Call("GET", "/reset_data", CALL_S, ignore)
"""Discard all groups and registrations of the server."""

LEFT = Call("GET", "/status", CALL_S, lambda a: int(want(a, "queue_size", int, "/status")))
"""Get the number of groups that wait outside of batches."""


def register_call(registration: Mapping[str, Any]) -> Call[int]:
    """Return the call that registers the trainer with these fields. Its result, a number, is
    unused. Running it raises ServerRefused for another answer."""
    number = partial(want, key="uuid", kind=int, path="/register")
    return Call("POST", "/register", CALL_S, number, json=dict(registration))


def group_of(data: Mapping[str, Any], version: int) -> Group:
    """Return one group, with prompt index 0. ``version``: used if the group names none.

    The prompt is the common prefix of all sequences before their first sampled token. The rest is
    the completion, with its masked tokens as context (a tool's turns, say). Masked tokens at the
    end are cut: nothing is learnt from them. ``overrides[i]["set_advantage_to_zero"]`` takes a
    sequence out of the training, not out of its group's mean.

    Raises Rejected for a group that is malformed or cannot be trained on.
    """
    try:
        item = msgspec.convert(data, Item)
    except msgspec.ValidationError as error:
        raise Rejected(
            "bad_score" if "scores" in str(error) else "malformed", str(error)
        ) from error
    scores, logprobs = item.scores, item.inference_logprobs
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
    """Return sequence ``number`` from token ``start`` to its last sampled one."""
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
        finish_reason=EXTERNAL,
        version_first=version,
        version_last=version,
        server=f"atropos environment {item.env_id}",
        reward=item.scores[number],
        sampled=() if all(sampled) else tuple(sampled),
        zero_advantage=bool(item.overrides and item.overrides[number].set_advantage_to_zero),
    )


def _check_length(group: Group, row_tokens: int) -> None:
    longest = len(group.prompt.token_ids) + max(len(c.token_ids) for c in group.completions)
    if longest > row_tokens:
        raise Rejected(
            "too_long",
            f"a sequence has {longest} tokens, training.seq_len is {row_tokens}: let the"
            " environment make shorter ones, or raise it",
        )


def _prompt_length(tokens: Sequence[Sequence[int]], masks: Sequence[Sequence[int]]) -> int:
    """Return the number of leading masked tokens that all sequences have in common."""
    length = min(
        next((at for at, mask in enumerate(row) if mask != MASKED), len(row)) for row in masks
    )
    return len(shared_prefix([tuple(row[:length]) for row in tokens]))


def _version(item: Item, default: int) -> int:
    for given in (item.group_overrides, item.generation_params):
        value = given.get("policy_version") if isinstance(given, Mapping) else None
        if isinstance(value, int) and not isinstance(value, bool):
            return value
    return default


class AtroposSource(External):
    """Source that takes batches from an Atropos API while fewer completions than two steps' worth
    (one with ``max_staleness = 0``) wait for the trainer.

    A group without a version gets the oldest one that a server can have held when the group came to
    the API (Waiting).
    """

    def __init__(
        self, spec: RolloutSpec, send: Send, fail: Callable[[BaseException], None]
    ) -> None:
        """``fail``: gets the error that ends the source."""
        super().__init__(spec, send)
        self._fail = fail
        self._driver = AsyncDriver(spec.atropos_url, max_connections=1)
        # batch_size counts sequences, not groups.
        self._registration = spec.registration | {"batch_size": self._per_step}
        self._batch = batch_call(spec)
        self._room = asyncio.Event()
        self._room.set()
        self._rejected_in_a_row = 0
        # Of no version known: a resumed run may meet groups that waited in the API before it.
        self._age = Waiting(0, 0)
        self._unknown: dict[str, bool] = {}
        """Servers whose version is unknown -> whether ``_held`` has named them."""
        self._task = asyncio.get_running_loop().create_task(self._take_batches())
        self._task.add_done_callback(self._ended)

    async def close(self) -> None:
        """Stop taking batches; groups in the API stay there."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        await self._driver.close()

    def on(self, message: messages.ToWorker) -> None:
        """Handle a message as the base does, and take batches again if there is room."""
        super().on(message)
        match message:
            case ServerState(url, None):
                self._unknown.setdefault(url, False)
            case ServerState(url) | messages.ServerLeft(url):
                self._unknown.pop(url, None)
        self._update_room()

    def _update_room(self) -> None:
        # Leave further groups in the API: it hands out the newest first.
        if self.waiting < self._per_step * (1 + min(self._spec.max_staleness, 1)):
            self._room.set()
        else:
            self._room.clear()

    async def _take_batches(self) -> None:
        known, proven, pause = False, False, POLL_S[0]
        while True:
            # no deadline: the trainer takes a batch and so makes room, or close() cancels
            await self._room.wait()
            try:
                # Read before the API answers: a group that comes after its answer, or after its
                # count, is not older.
                held = self._held()
                batch = await (self._driver.run(self._batch) if known else self._register())
                known = batch is not None
                proven = proven or known
                if known and not batch:
                    self._age = self._age.none(held, await self._driver.run(LEFT))
            except PeerError as error:
                # Later it is an outage: a proxy answers so for an API that restarts.
                if isinstance(error, HttpRefused) and error.status < 500 and not proven:
                    raise ConfigError(
                        f"rollout.atropos_url must be that of an Atropos API: {error}"
                    ) from error
                # Register again: the API may have been restarted or reset. After a reset it answers
                # 500 until a trainer registers.
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

    def _held(self) -> int:
        """Return the oldest version that environments may sample now; 0 while no server is known to
        hold one: it may have weights of before a resume. Report each server of unknown version that
        makes it too old to be trained on."""
        trainer, most = self._trainer_version, self._spec.max_staleness
        for url, named in self._unknown.items():
            held = self._versions.get(url, trainer)
            if not named and too_stale(held, trainer, most):
                self._unknown[url] = True
                self._report(
                    f"groups without policy_version count as made by version {held}, too old to be"
                    f" trained on: {url} held it last, is out of reach now, and may still generate"
                    " with it. Start it again, or take it out of the run (titan-grpo servers remove"
                    f" {url} --run DIR), or let environments send policy_version"
                )
        return min(self._versions.values(), default=0)

    async def _register(self) -> Batch:
        """Register (repeating it does no harm) and ask for a batch."""
        register = register_call(self._registration)
        await self._driver.run(register)
        batch = await self._driver.run(self._batch)
        if batch is None:
            # The API got groups before a trainer registered. Now it takes no registration any more
            # and never hands groups out, so reset it.
            self._report(
                f"{self._driver.url} held groups from before its registration, and has to throw"
                " them away"
            )
            await self._driver.run(RESET)
            await self._driver.run(register)
            batch = await self._driver.run(self._batch)
        if batch is None:
            raise ServerRefused(f"{self._driver.url} does not take our registration")
        return batch

    def _take(self, item: Mapping[str, Any]) -> None:
        try:
            group = group_of(item, self._age.oldest)
            _check_length(group, self._spec.row_tokens)
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
        # no deadline: the task has ended (this is its done callback)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self._fail(error)


async def _pause(seconds: float, longest: float) -> float:
    """Wait; return the length of the next pause, in seconds."""
    await asyncio.sleep(min(seconds, longest))
    return min(2 * seconds, longest)
