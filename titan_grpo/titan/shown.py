"""From a micro-batch that rank 0 trained on to the completions that samples.jsonl shows."""

from collections.abc import Callable, Mapping, Sequence
from math import isfinite
from typing import NamedTuple

import torch

from titan_grpo.algorithm.rows import IGNORE_INDEX
from titan_grpo.observe.shown import Shown
from titan_grpo.samples import Completion, Group

COLUMNS = ("reward", "versions", "server", "gap", "prompt", "completion")
"""Of a table of completions."""

Row = tuple[float, str, str, float, str, str]

SequenceKey = tuple[int, ...]
"""Prompt and completion tokens of a sequence."""


class FirstBatch(NamedTuple):
    """Rank 0's first micro-batch of a step, each int64 or float32 [R, L], detached: what was fed in
    and what the policy says to it before its first optimizer step of the batch."""

    inputs: torch.Tensor
    labels: torch.Tensor
    sequence: torch.Tensor
    logprobs: torch.Tensor


def sequences(batch: FirstBatch) -> dict[SequenceKey, list[float | None]]:
    """The policy's log-probability of each token of each sequence; None for tokens that are no
    label (the prompt, a tool's answer).

    Waits for the device. A sequence whose last token is no label is left out: the batch does not
    have that token. Example: inputs 5 6 7, labels -100 7 8, log-probabilities (any), -1, -2 ->
    {(5, 6, 7, 8): [None, None, -1, -2]}.
    """
    inputs, labels, numbers = (x.reshape(-1).tolist() for x in batch[:3])
    logprobs = batch.logprobs.reshape(-1).float().tolist()
    out: dict[SequenceKey, list[float | None]] = {}
    start = 0
    for at in range(1, len(numbers) + 1):
        if at < len(numbers) and numbers[at] == numbers[start]:
            continue
        if numbers[start] >= 0 and labels[at - 1] != IGNORE_INDEX:
            own = [
                None
                if labels[k] == IGNORE_INDEX or not isfinite(logprobs[k])
                else round(logprobs[k], 4)
                for k in range(start, at)
            ]
            out[(*inputs[start:at], labels[at - 1])] = [None, *own]
        start = at
    return out


def shown(
    groups: Sequence[Group], trained: Mapping[SequenceKey, list[float | None]]
) -> list[Shown]:
    """The completions of ``groups`` that are among the ``trained`` sequences, in their order."""
    out = []
    for group in groups:
        for completion in group.completions:
            prompt = group.prompt.token_ids
            own = trained.get((*prompt, *completion.token_ids))
            if own is not None:
                out.append(_shown(list(prompt), completion, own[len(prompt) :]))
    return out


def _shown(prompt: list[int], completion: Completion, own: list[float | None]) -> Shown:
    return Shown(
        completion.server,
        completion.reward,
        completion.version_first,
        completion.version_last,
        prompt,
        list(completion.token_ids),
        [round(logprob, 4) for logprob in completion.logprobs],
        own,
    )


def rows(chosen: Sequence[Shown], decode: Callable[[Sequence[int]], str]) -> list[Row]:
    """Completions as rows of ``COLUMNS``."""
    return [
        (
            each.reward,
            f"{each.version_first} to {each.version_last}",
            each.server,
            each.gap,
            decode(each.prompt),
            decode(each.tokens),
        )
        for each in chosen
    ]
