"""A rank's rows in compact form, and the tensors that they become. batch.py decides, this builds.

The compact form travels to a rank that builds its own tensors: 8 bytes for a completion token,
where the tensors take 44 and their padding besides.

With several sequences in one row everything in a transformer but attention works as before, token
by token. For attention the row is taken apart (``attention_rows``): its tokens are gathered into
rows of one sequence each, plain causal attention runs on those, and the results go back to where
the tokens lie. So no mask is needed (the fast kernels take none), and only attention pays for
padding: rows of similar length go together, and less than half of such a batch is padding.
"""

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import NamedTuple

import torch

from titan_grpo.algorithm.balance import padded_length
from titan_grpo.samples import Completion, Prompt

IGNORE_INDEX = -100
"""Label of positions that are not a completion token; torchtitan's and torch's own value."""

MicroBatch = dict[str, torch.Tensor]
"""R rows of L tokens; see ``build`` for the tensors."""


@dataclass(frozen=True, slots=True)
class Row:
    """One sequence to train on, with what was decided about it."""

    group: int
    """Place of its group in the step."""
    prompt: Prompt
    completion: Completion
    advantage: float
    weight: float = 0.0
    """Of each of its sampled tokens in the loss."""

    @property
    def length(self) -> int:
        """Input length: the last token of a sequence is only ever a label."""
        return len(self.prompt.token_ids) + len(self.completion.token_ids) - 1


@dataclass(frozen=True, slots=True)
class Layout:
    """How rows lie in the tensors of a micro-batch."""

    token_budget: int
    """Rows times padded length of one micro-batch on one rank."""

    max_len: int
    """Most tokens of prompt plus completion, and the greatest padded length (the model's sequence
    length)."""

    pad_id: int = 0
    """Input token at padded positions; any valid one, attention is causal and padding is on the
    right."""

    pad_multiple: int = 8
    """Padded lengths are multiples of this (fewer shapes, and divisible by the tensor-parallel
    degree)."""

    pack: bool = False
    """Several sequences in one row; false gives each a row of its own, padded."""

    routes: int = 0
    """Experts of a token over all layers, with grpo.router_replay: a completion without its routes
    is a defective one. 0: routes are left out."""

    def shape(self, lengths: Sequence[int]) -> tuple[int, int]:
        """Rows and padded length of a micro-batch with sequences of these input lengths."""
        if self.pack:
            # A packed row may be longer than max_len: positions begin anew with each sequence.
            return 1, padded_length(max(sum(lengths), 1), self.pad_multiple, self.token_budget)
        return max(len(lengths), 1), padded_length(
            max(lengths, default=1), self.pad_multiple, self.max_len
        )


@dataclass(frozen=True, slots=True)
class Rows:
    """What one rank trains on in one step, in the order of its micro-batches. Small and quick to
    pickle; see ``compact``."""

    layout: Layout
    cuts: tuple[int, ...]
    """Sequences of each micro-batch; 0 where other ranks have more than this one."""
    prompt_tokens: "array[int]"
    """int32, by sequence: tokens of its prompt."""
    completion_tokens: "array[int]"
    """int32, by sequence: tokens of its completion."""
    ids: "array[int]"
    """int32: prompt and completion of every sequence, one after the other."""
    logprobs: "array[float]"
    """float32, by completion token: the engine's log-probability."""
    sampled: "array[int]"
    """int8, by completion token: 0 where the policy did not sample it. Empty if it sampled all of
    them."""
    weights: "array[float]"
    """float32, by sequence."""
    advantages: "array[float]"
    """float32, by sequence."""
    oldest: "array[int]"
    """int64, by sequence: the oldest policy version that it depends on."""
    spans: "array[int]"
    """int32, by sequence: how many spans of one version its completion has."""
    span_versions: "array[int]"
    """int64, by span: the version that sampled its tokens."""
    span_tokens: "array[int]"
    """int32, by span: how many completion tokens it has."""
    routes: bytes = b""
    """Of all sequences, one after the other, as in samples.Completion; empty without
    ``layout.routes``."""


def compact(cuts: Sequence[Sequence[Row]], layout: Layout) -> Rows:
    """The rows of one rank, micro-batch by micro-batch. What is too large for a float32 becomes
    infinite."""
    rows = list(chain.from_iterable(cuts))
    completions = [row.completion for row in rows]
    ids, logprobs = array("i"), array("f")
    for row in rows:
        # Through array: both numpy and torch take longer on a tuple, torch six times as long.
        ids += array("i", row.prompt.token_ids)
        ids += array("i", row.completion.token_ids)
        logprobs += array("f", row.completion.logprobs)
    sampled: list[bool] = []
    if any(completion.sampled for completion in completions):
        for c in completions:
            sampled += c.sampled or (True,) * len(c.token_ids)
    spans = [completion.token_spans for completion in completions]
    return Rows(
        layout=layout,
        cuts=tuple(len(cut) for cut in cuts),
        prompt_tokens=array("i", [len(row.prompt.token_ids) for row in rows]),
        completion_tokens=array("i", [len(completion.token_ids) for completion in completions]),
        ids=ids,
        logprobs=logprobs,
        sampled=array("b", sampled),
        weights=array("f", [row.weight for row in rows]),
        advantages=array("f", [row.advantage for row in rows]),
        oldest=array("q", [completion.version_first for completion in completions]),
        spans=array("i", [len(own) for own in spans]),
        span_versions=array("q", [version for own in spans for version, _ in own]),
        span_tokens=array("i", [tokens for own in spans for _, tokens in own]),
        routes=b"".join(c.routes for c in completions) if layout.routes else b"",
    )


def build(rows: Rows) -> list[MicroBatch]:
    """The micro-batches of one rank. The same tensors, bit for bit, wherever it is called.

    Tensors of a micro-batch with R rows of L tokens, on the CPU, all [R, L]:

    * ``inputs`` int64: prompt and completion without the last token, then ``pad_id``;
    * ``labels`` int64: the next token where that is a sampled one of the completion, else
      ``IGNORE_INDEX``;
    * ``sequence`` int64: number of the sequence, from 0 in each micro-batch; its tokens lie
      together. -1 is padding;
    * ``rollout_logprobs`` float32: the engine's log-probability of the label, 0 where ignored;
    * ``weights`` float32: the normalisation over the whole step, 0 where ignored;
    * ``advantages`` float32 and ``oldest`` int64 (the oldest policy version that the sequence
      depends on, its KV included): 0 at padding;
    * ``versions`` int64: the policy version that sampled the label (of context: the one before it;
      in the prompt: that of the first label), never older than ``oldest``: 0 at padding;
    * ``positions`` int64, with ``layout.pack`` only: place of the token in its sequence;
    * ``routes`` int16 [R, L, layout.routes], where that is not 0: the experts that the engine sent
      the token to, layer by layer; -1 at padding.

    Example: prompt (5, 6), completion (7, 8) -> inputs 5 6 7, labels -100 7 8.

    A micro-batch without sequences is one all-masked row of the least length, because every rank
    must run every collective.
    """
    sequences = iter(_sequences(rows))
    return [_micro_batch(list(islice(sequences, count)), rows.layout) for count in rows.cuts]


class _Sequence(NamedTuple):
    """Views of one sequence's part of a rank's rows."""

    prompt_tokens: int
    ids: torch.Tensor
    logprobs: torch.Tensor
    context: torch.Tensor | None
    """bool, by completion token: not sampled."""
    weight: float
    advantage: float
    oldest: int
    versions: torch.Tensor
    """int64, by completion token."""
    routes: torch.Tensor
    """int16 [tokens but the last times layout.routes]."""


def _sequences(rows: Rows) -> Iterator[_Sequence]:
    ids, logprobs = _tensor(rows.ids, torch.int32), _tensor(rows.logprobs, torch.float32)
    context = _tensor(rows.sampled, torch.int8) == 0 if rows.sampled else None
    of_spans = _tensor(rows.span_versions, torch.int64)
    versions = of_spans.repeat_interleave(_tensor(rows.span_tokens, torch.int32))
    width = rows.layout.routes
    # A copy: torch warns of memory that it may not write.
    data = bytearray(rows.routes)
    routes = torch.frombuffer(data, dtype=torch.int16) if data else torch.empty(0).short()
    start = first = routed = 0
    counts = zip(rows.prompt_tokens, rows.completion_tokens, strict=True)
    figures = zip(rows.weights, rows.advantages, rows.oldest, strict=True)
    for (prompt, completion), decided in zip(counts, figures, strict=True):
        stop, last = start + prompt + completion, first + completion
        own = None if context is None else context[first:last]
        until = routed + (prompt + completion - 1) * width
        yield _Sequence(
            prompt,
            ids[start:stop],
            logprobs[first:last],
            own,
            *decided,
            versions[first:last],
            routes[routed:until],
        )
        start, first, routed = stop, last, until


def _tensor(values: "array[int] | array[float]", dtype: torch.dtype) -> torch.Tensor:
    """Sharing the memory of ``values``; torch takes no empty buffer."""
    return torch.frombuffer(values, dtype=dtype) if values else torch.empty(0, dtype=dtype)


def _micro_batch(sequences: Sequence[_Sequence], layout: Layout) -> MicroBatch:
    # The last token of a sequence is only ever a label.
    lengths = [len(sequence.ids) - 1 for sequence in sequences]
    shape = layout.shape(lengths)
    out = {
        "inputs": torch.full(shape, layout.pad_id, dtype=torch.int64),
        "labels": torch.full(shape, IGNORE_INDEX, dtype=torch.int64),
        "sequence": torch.full(shape, -1, dtype=torch.int64),
        "rollout_logprobs": torch.zeros(shape),
        "weights": torch.zeros(shape),
        "advantages": torch.zeros(shape),
        "oldest": torch.zeros(shape, dtype=torch.int64),
        "versions": torch.zeros(shape, dtype=torch.int64),
    }
    if layout.pack:
        out["positions"] = torch.zeros(shape, dtype=torch.int64)
    flat = {name: tensor.view(-1) for name, tensor in out.items()}
    if layout.routes:
        out["routes"] = torch.full((*shape, layout.routes), -1, dtype=torch.int16)
        routes = out["routes"].view(-1, layout.routes)
    start = 0
    for number, (sequence, length) in enumerate(zip(sequences, lengths, strict=True)):
        stop, first = start + length, start + sequence.prompt_tokens - 1
        flat["inputs"][start:stop] = sequence.ids[:-1]
        flat["labels"][first:stop] = sequence.ids[sequence.prompt_tokens :]
        flat["sequence"][start:stop] = number
        flat["rollout_logprobs"][first:stop] = sequence.logprobs
        flat["weights"][first:stop] = sequence.weight
        if sequence.context is not None:
            nothing = {"labels": IGNORE_INDEX, "rollout_logprobs": 0, "weights": 0}
            for name, value in nothing.items():
                flat[name][first:stop][sequence.context] = value
        flat["advantages"][start:stop] = sequence.advantage
        flat["oldest"][start:stop] = sequence.oldest
        flat["versions"][start:first] = sequence.versions[0]
        flat["versions"][first:stop] = sequence.versions
        if layout.routes:
            routes[start:stop] = sequence.routes.view(length, layout.routes)
        if layout.pack:
            flat["positions"][start:stop] = torch.arange(length)
        start = stop if layout.pack else start + shape[1]
    return out


class AttentionRows(NamedTuple):
    """Where attention finds the tokens of a packed micro-batch of R rows with L tokens, counted row
    by row."""

    rows: tuple[torch.Tensor, ...]
    """int64 [S, P] each: the tokens of S sequences of similar length, each followed by any tokens
    up to P."""

    home: torch.Tensor
    """int64 [R * L]: for each token of the micro-batch, where it is in those rows, flattened and
    one after the other."""

    def to(self, device: torch.device | str) -> "AttentionRows":
        """The same on ``device``."""
        return AttentionRows(
            tuple(rows.to(device, non_blocking=True) for rows in self.rows), self.home.to(device)
        )


def attention_rows(sequence: torch.Tensor, multiple: int = 8) -> AttentionRows:
    """From ``sequence`` int64 [R, L] on the CPU: which sequence a token belongs to (its tokens lie
    together), -1 for padding.

    Results of padding tokens are those of some other token: finite, and unused. A
    micro-batch of nothing but padding counts as R sequences, so that attention has a gradient graph
    there too.

    Example: sequence ((0, 0, 1, -1),), multiple 1 -> rows ((0, 1),) and ((2,),), home (0, 1, 2, 0).
    """
    num_rows, row_tokens = sequence.shape
    spans = _spans(sequence) or [(row * row_tokens, row_tokens) for row in range(num_rows)]
    spans.sort(key=lambda span: -span[1])
    home = torch.zeros(num_rows * row_tokens, dtype=torch.int64)
    rows, filled = [], 0
    for alike in _alike([length for _, length in spans]):
        longest = padded_length(spans[alike.start][1], multiple, row_tokens)
        starts = torch.tensor([start for start, _ in spans[alike]])
        # Past a sequence's end follow its neighbours, which its own tokens cannot see; past the
        # last row any token will do.
        index = (starts.unsqueeze(-1) + torch.arange(longest)).clamp_(max=home.numel() - 1)
        for number, (start, length) in enumerate(spans[alike]):
            place = filled + number * longest
            home[start : start + length] = torch.arange(place, place + length)
        rows.append(index)
        filled += index.numel()
    return AttentionRows(tuple(rows), home)


def _spans(sequence: torch.Tensor) -> list[tuple[int, int]]:
    """(first token, number of tokens) of every sequence, in order; padding left out."""
    flat = sequence.reshape(-1)
    values, lengths = torch.unique_consecutive(flat, return_counts=True)
    ends = lengths.cumsum(0)
    table = zip(values.tolist(), (ends - lengths).tolist(), lengths.tolist(), strict=True)
    return [(start, length) for value, start, length in table if value >= 0]


def _alike(lengths: Sequence[int]) -> list[slice]:
    """Runs of falling ``lengths`` whose shortest is more than half of the longest. Example: (8, 5,
    4, 1) -> 0:2, 2:3, 3:4."""
    cuts = [0]
    for at, length in enumerate(lengths):
        if 2 * length <= lengths[cuts[-1]]:
            cuts.append(at)
    return [slice(start, stop) for start, stop in zip(cuts, [*cuts[1:], len(lengths)], strict=True)]
