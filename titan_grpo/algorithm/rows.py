"""A rank's rows in compact form, and their tensors. batch.py decides, this module builds.

A rank that builds its own tensors receives the compact form: 8 bytes per completion token instead
of the tensors' 52 (packed 60) plus padding.

In a packed row, all of a transformer but attention works token by token, as usual. For attention
(``attention_rows``) the tokens are gathered into rows of one sequence each; plain causal attention
runs on those, and the results return to the places of the tokens. So no mask is needed (the fast
kernels take none), and only attention pays for padding: rows of similar length are batched
together, and less than half of such a batch is padding.
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
"""Label of positions without a sampled completion token; torchtitan's and torch's own value."""

MicroBatch = dict[str, torch.Tensor]
"""R rows of L tokens; see ``build`` for the tensors."""


@dataclass(frozen=True, slots=True)
class Row:
    """One sequence to train on, with its advantage and weight."""

    group: int
    """Index of its group in the step."""
    prompt: Prompt
    completion: Completion
    advantage: float
    weight: float = 0.0
    """Weight in the loss of each of its sampled tokens."""

    @property
    def length(self) -> int:
        """Input length: the last token of a sequence is only a label."""
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
    """Input token at padded positions: any valid one (causal attention, padding on the right)."""

    pad_multiple: int = 8
    """Padded lengths are multiples of this: fewer shapes. It must be a multiple of the
    tensor-parallel degree, whose ranks share the positions of a row."""

    pack: bool = False
    """Put several sequences in one row; false: one padded row per sequence."""

    routes: int = 0
    """Experts of a token over all layers, with grpo.router_replay: a completion without routes is
    then defective. 0: leave routes out."""

    def shape(self, lengths: Sequence[int]) -> tuple[int, int]:
        """Return rows and padded length of a micro-batch with sequences of these input lengths."""
        if self.pack:
            # A packed row may exceed max_len: positions start from 0 in each sequence.
            return 1, padded_length(max(sum(lengths), 1), self.pad_multiple, self.token_budget)
        return max(len(lengths), 1), padded_length(
            max(lengths, default=1), self.pad_multiple, self.max_len
        )


@dataclass(frozen=True, slots=True)
class Rows:
    """One rank's sequences of one step, in the order of its micro-batches. Small and quick to
    pickle; see ``compact``."""

    layout: Layout
    cuts: tuple[int, ...]
    """Number of sequences of each micro-batch; 0 in one that only other ranks need."""
    prompt_tokens: "array[int]"
    """int32, by sequence: tokens of its prompt."""
    completion_tokens: "array[int]"
    """int32, by sequence: tokens of its completion."""
    ids: "array[int]"
    """int32: prompt and completion of every sequence, one after the other."""
    logprobs: "array[float]"
    """float32, by completion token: the engine's log-probability."""
    sampled: "array[int]"
    """int8, by completion token: 0 where the policy did not sample it. Empty if it sampled all."""
    weights: "array[float]"
    """float32, by sequence."""
    advantages: "array[float]"
    """float32, by sequence."""
    oldest: "array[int]"
    """int64, by sequence: the oldest policy version that it depends on."""
    spans: "array[int]"
    """int32, by sequence: number of its completion's spans; a span has one version."""
    span_versions: "array[int]"
    """int64, by span: the version that sampled its tokens."""
    span_tokens: "array[int]"
    """int32, by span: its number of completion tokens."""
    routes: bytes = b""
    """Routes of all sequences, concatenated, as in samples.Completion; empty without
    ``layout.routes``."""


def compact(cuts: Sequence[Sequence[Row]], layout: Layout) -> Rows:
    """Return one rank's rows, micro-batch by micro-batch, in compact form. Values too large for
    float32 become infinite."""
    rows = list(chain.from_iterable(cuts))
    completions = [row.completion for row in rows]
    ids, logprobs = array("i"), array("f")
    for row in rows:
        # numpy and torch are slower than array on a tuple, torch six times.
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
    """Build the micro-batches of one rank. The same tensors, bit for bit, on every machine.

    Tensors of a micro-batch with R rows of L tokens, on the CPU, all [R, L]:

    * ``inputs`` int64: prompt and completion without the last token, then ``pad_id``;
    * ``labels`` int64: the next token if it is a sampled one of the completion, else
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
    * ``routes`` int16 [R, L, layout.routes], if that is not 0: the experts to which the engine sent
      the token, layer by layer; -1 at padding.

    Example: prompt (5, 6), completion (7, 8) -> inputs 5 6 7, labels -100 7 8.

    A micro-batch without sequences is one all-masked row of minimal length: every rank must run
    every collective.
    """
    sequences = iter(_sequences(rows))
    return [_micro_batch(list(islice(sequences, count)), rows.layout) for count in rows.cuts]


class _Sequence(NamedTuple):
    """One sequence, as views of a rank's rows."""

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
    # Copy: torch warns about read-only memory.
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
    """Return a tensor that shares the memory of ``values``; torch takes no empty buffer."""
    return torch.frombuffer(values, dtype=dtype) if values else torch.empty(0, dtype=dtype)


def _micro_batch(sequences: Sequence[_Sequence], layout: Layout) -> MicroBatch:
    # The last token of a sequence is only a label.
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
    """Indices that gather a packed micro-batch's tokens [R, L] for attention, and put them back."""

    rows: tuple[torch.Tensor, ...]
    """int64 [S, P] each: flat indices of the tokens of S sequences of similar length, each filled
    up to P with any tokens."""

    home: torch.Tensor
    """int64 [R * L]: for each token of the micro-batch, its place in ``rows``, all flattened and
    concatenated."""

    def to(self, device: torch.device | str) -> "AttentionRows":
        """Return a copy on ``device``."""
        return AttentionRows(
            tuple(rows.to(device, non_blocking=True) for rows in self.rows), self.home.to(device)
        )


def attention_rows(sequence: torch.Tensor, multiple: int = 8) -> AttentionRows:
    """Return the attention rows of ``sequence``, int64 [R, L] on the CPU: each token's sequence
    (its tokens lie together), -1 for padding.

    Padding tokens get the result of some other token: finite, and unused. A micro-batch of padding
    only counts as R sequences, so that attention has a gradient graph there too.

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
        # Fill a row with the tokens after its sequence (causal attention hides them from it); past
        # the end of the micro-batch, with its last token.
        index = (starts.unsqueeze(-1) + torch.arange(longest)).clamp_(max=home.numel() - 1)
        for number, (start, length) in enumerate(spans[alike]):
            place = filled + number * longest
            home[start : start + length] = torch.arange(place, place + length)
        rows.append(index)
        filled += index.numel()
    return AttentionRows(tuple(rows), home)


def _spans(sequence: torch.Tensor) -> list[tuple[int, int]]:
    """Return (first token, number of tokens) of every sequence, in order, without padding."""
    flat = sequence.reshape(-1)
    values, lengths = torch.unique_consecutive(flat, return_counts=True)
    ends = lengths.cumsum(0)
    table = zip(values.tolist(), (ends - lengths).tolist(), lengths.tolist(), strict=True)
    return [(start, length) for value, start, length in table if value >= 0]


def _alike(lengths: Sequence[int]) -> list[slice]:
    """Cut falling ``lengths`` into runs whose shortest is more than half of the longest. Example:
    (8, 5, 4, 1) -> 0:2, 2:3, 3:4."""
    cuts = [0]
    for at, length in enumerate(lengths):
        if 2 * length <= lengths[cuts[-1]]:
            cuts.append(at)
    return [slice(start, stop) for start, stop in zip(cuts, [*cuts[1:], len(lengths)], strict=True)]
