"""The Atropos API (atroposlib's server) as data: what a trainer asks, and how its groups become
ours. Pure.

A group of Atropos has, per sequence, ``tokens`` (prompt and completion), ``masks`` (-100 where a
token was not sampled, else the token), a score, and ``inference_logprobs``. The last are aligned
with the tokens: entry t is the log-probability OF token t, and 1.0 where the token is masked. Our
records keep that alignment; what predicts what is the business of algorithm/batch.py. The API knows
no policy versions. An environment may say one, as ``policy_version`` in ``group_overrides`` or
``generation_params``; without it a group counts as made by the version that its reader gives.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from titan_grpo.engines.http import Call, ignore, want
from titan_grpo.errors import DataError, ServerRefused
from titan_grpo.rollout.push import LARGEST_LOGPROB
from titan_grpo.samples import Completion, Group, Prompt

MASKED = -100
"""Mask of a token that the policy did not sample."""

CALL_S = 30.0
"""Deadline of a call, in seconds; a batch can be some hundred megabytes of JSON."""


@dataclass(frozen=True, slots=True)
class Registration:
    """What a trainer tells the server before it takes batches. ``batch_size`` counts sequences, not
    groups."""

    batch_size: int
    max_token_len: int
    num_steps: int
    starting_step: int = 0
    checkpoint_dir: str = ""
    save_checkpoint_interval: int = 0
    wandb_group: str = "titan_grpo"
    wandb_project: str = "titan_grpo"


@dataclass(frozen=True, slots=True)
class Answer:
    """Of ``GET /batch``: the groups of one batch, none while there are too few; or the server knows
    no trainer."""

    groups: tuple[Mapping[str, Any], ...] = ()
    registered: bool = True


class Rejected(DataError):
    """A group that can not be trained on; ``reason`` is one word for the counters."""

    def __init__(self, reason: str, text: str) -> None:
        super().__init__(text)
        self.reason = reason


def register_call(registration: Registration) -> Call[int]:
    """Make us known; the answer is a number that the API gives no use to. Raises ServerRefused for
    another answer."""
    return Call(
        "POST",
        "/register",
        CALL_S,
        lambda a: int(want(a, "uuid", int, "/register")),
        json=asdict(registration),
    )


def reset_call() -> Call[None]:
    """Throw away all that the server holds."""
    return Call("GET", "/reset_data", CALL_S, ignore)


def batch_call() -> Call[Answer]:
    """Take one batch. The first one lets environments register. Raises ServerRefused for an answer
    of another form."""
    return Call("GET", "/batch", CALL_S, _answer)


def _answer(answer: Any) -> Answer:
    if isinstance(answer, Mapping) and answer.get("status") == "error":
        return Answer(registered=False)
    batch = answer.get("batch", ...) if isinstance(answer, Mapping) else ...
    if batch is None:
        return Answer()
    if not isinstance(batch, list) or not all(isinstance(group, Mapping) for group in batch):
        raise ServerRefused(
            f"/batch must answer with 'batch', a list of groups or null, got {str(answer)[:200]!r}"
        )
    return Answer(tuple(batch))


def group_of(item: Mapping[str, Any], version: int) -> Group:
    """One group, with prompt index 0. ``version`` is used where the group does not say its own.

    The prompt is what all sequences have in common before their first sampled token; what follows
    is the completion, with its masked tokens as context (turns of a tool, say); masked tokens at
    the end are cut, since nothing is learnt from them. ``overrides[i]["set_advantage_to_zero"]``
    takes a sequence out of the learning, not out of its group's mean.

    Raises Rejected for a group that is not what it says it is.
    """
    tokens, masks = _table(item, "tokens", int), _table(item, "masks", int)
    scores = item.get("scores")
    if not isinstance(scores, list) or not all(
        _number(score) and math.isfinite(score) for score in scores
    ):
        raise Rejected(
            "bad_score", f"scores must be a list of finite numbers, got {str(scores)[:100]}"
        )
    if item.get("inference_logprobs") is None:
        raise Rejected(
            "no_logprobs",
            "inference_logprobs are missing: without them nothing corrects for how the data was"
            " made",
        )
    if item.get("images"):
        raise Rejected("images", "images can not be trained on")
    logprobs = _table(item, "inference_logprobs", float)
    if not tokens or not len(tokens) == len(masks) == len(scores) == len(logprobs):
        counts = (len(tokens), len(masks), len(scores), len(logprobs))
        raise Rejected(
            "length_mismatch",
            f"tokens, masks, scores and inference_logprobs must be as many, got {counts}",
        )
    for number, row in enumerate(zip(tokens, masks, logprobs, strict=True)):
        if len({len(values) for values in row}) != 1:
            lengths = tuple(len(values) for values in row)
            raise Rejected(
                "length_mismatch",
                f"sequence {number}: tokens, masks and inference_logprobs have lengths {lengths}",
            )
    start = _prompt_length(tokens, masks)
    if start == 0:
        raise Rejected(
            "empty_prompt",
            "the sequences must begin with one masked token at least that they have in common",
        )
    zero = _zeroed(item.get("overrides"), len(tokens))
    said = _version(item)
    made = (version if said is None else said, f"atropos environment {item.get('env_id')}")
    completions = []
    for number, score in enumerate(scores):
        rest = _Sequence(tokens[number][start:], masks[number][start:], logprobs[number][start:])
        completions.append(rest.completion(number, float(score), zero[number], made))
    return Group(Prompt(0, tuple(tokens[0][:start])), tuple(completions))


@dataclass(frozen=True, slots=True)
class _Sequence:
    """What follows the prompt."""

    tokens: list[int]
    masks: list[int]
    logprobs: list[float]

    def completion(
        self, number: int, score: float, zero: bool, made: tuple[int, str]
    ) -> Completion:
        sampled = [mask != MASKED for mask in self.masks]
        if True not in sampled:
            raise Rejected("nothing_sampled", f"sequence {number} has no token that is not masked")
        stop = len(sampled) - sampled[::-1].index(True)
        sampled = sampled[:stop]
        for place, (chosen, logprob) in enumerate(zip(sampled, self.logprobs, strict=False)):
            if chosen and not (math.isfinite(logprob) and logprob <= LARGEST_LOGPROB):
                raise Rejected(
                    "bad_logprob",
                    f"sequence {number}: token {place} after the prompt is not masked and its"
                    f" inference_logprob is {logprob}",
                )
        version, source = made
        return Completion(
            token_ids=tuple(self.tokens[:stop]),
            logprobs=tuple(
                lp if chosen else 0.0 for lp, chosen in zip(self.logprobs, sampled, strict=False)
            ),
            finish_reason="external",
            version_first=version,
            version_last=version,
            server=source,
            reward=score,
            sampled=() if all(sampled) else tuple(sampled),
            zero_advantage=zero,
        )


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _table(item: Mapping[str, Any], name: str, kind: type) -> list[list[Any]]:
    rows = item.get(name)
    good = (
        _number
        if kind is float
        else lambda value: isinstance(value, int) and not isinstance(value, bool)
    )
    if not isinstance(rows, list) or not all(
        isinstance(row, list) and all(map(good, row)) for row in rows
    ):
        raise Rejected(
            "malformed",
            f"{name} must be lists of {'numbers' if kind is float else 'integers'}, got"
            f" {str(rows)[:100]}",
        )
    return rows


def _prompt_length(tokens: Sequence[Sequence[int]], masks: Sequence[Sequence[int]]) -> int:
    """Leading masked tokens that all sequences have in common."""
    length = min(
        next((at for at, mask in enumerate(row) if mask != MASKED), len(row)) for row in masks
    )
    while length and any(row[:length] != tokens[0][:length] for row in tokens):
        length -= 1
    return length


def _zeroed(overrides: Any, count: int) -> list[bool]:
    if overrides is None:
        return [False] * count
    if (
        not isinstance(overrides, list)
        or len(overrides) != count
        or not all(isinstance(o, Mapping) for o in overrides)
    ):
        raise Rejected(
            "malformed",
            f"overrides must be one object per sequence ({count}), got {str(overrides)[:100]}",
        )
    return [bool(override.get("set_advantage_to_zero")) for override in overrides]


def _version(item: Mapping[str, Any]) -> int | None:
    for name in ("group_overrides", "generation_params"):
        said = item.get(name)
        value = said.get("policy_version") if isinstance(said, Mapping) else None
        if isinstance(value, int) and not isinstance(value, bool):
            return value
    return None
